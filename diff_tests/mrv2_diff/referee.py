"""Who is right about a row of logits: transformers' own model of the same checkpoint decides.

It runs one precision above the runners, float64 for float32 and float32 for bfloat16, over all of a
request's tokens at once: no KV cache, no batch, no kernel of either runner. So it has neither's
faults and hardly any of their rounding. How far rounding alone may be from it is measured as well,
with the same model in the runners' precision.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mrv2_diff import noise
from mrv2_diff.compare.right import row_sizes
from mrv2_diff.compare.tally import FloatArray, Place
from mrv2_diff.observation import Observation

ABOVE = {"float32": "float64", "bfloat16": "float32", "float16": "float32"}
"""The referee's dtype, by the runners'."""

MAX_ROWS = 64
"""Rows of a case that are kept for a ruling. More are counted, and make it no surer."""

Scores = Callable[[Sequence[int]], FloatArray]
"""Returns the logits of the token that follows some, [vocab_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """A row of logits on which two runners disagree beyond the floor."""

    place: Place
    req_id: str
    tokens: tuple[int, ...]
    """All of the request's tokens before the one that the row draws."""
    reference: FloatArray
    """[vocab_size]."""
    candidate: FloatArray
    """[vocab_size]."""


@dataclass(slots=True)
class Disputes:
    """The rows of a case on which its two runners disagree.

    Args:
        bound: Largest difference of a logit that is none, in spacings at the row's largest logit.
    """

    bound: float
    rows: list[Dispute] = field(default_factory=list)
    """The first `MAX_ROWS`."""
    num_rows: int = 0
    _tokens: dict[str, list[int]] = field(default_factory=dict)

    def arrive(self, req_id: str, prompt: Iterable[int]) -> None:
        """Begin a request's tokens."""
        self._tokens[req_id] = list(prompt)

    def commit(self, driver: Observation) -> None:
        """Add the tokens of a step that the engine goes on with."""
        for req_id, token in zip(driver.draw_ids, driver.tokens.tolist(), strict=True):
            self._tokens[req_id].append(token)

    def note(self, place: Place, reference: Observation, candidate: Observation) -> None:
        """Keep the rows of a step in dispute. Its tokens are committed afterwards."""
        for row, req_id in enumerate(reference.draw_ids):
            if req_id not in candidate.draw_ids:
                continue
            ours = reference.logits[row].numpy().astype(np.float64)
            theirs = candidate.logits[candidate.draw_ids.index(req_id)].numpy().astype(np.float64)
            if ours.shape != theirs.shape or distance(ours, theirs) <= self.bound:
                continue
            self.num_rows += 1
            if len(self.rows) < MAX_ROWS:
                self.rows.append(
                    Dispute(
                        place=Place(place.mode, place.step),
                        req_id=req_id,
                        tokens=tuple(self._tokens[req_id]),
                        reference=ours,
                        candidate=theirs,
                    )
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What the referee says of the rows in dispute."""

    num_disputed: int
    num_ruled: int
    reference_wrong: int
    """Rows in which the reference is further from the referee than rounding, and the candidate is
    not."""
    candidate_wrong: int
    """The other way round."""
    both_wrong: int
    nearer: Mapping[str, int]
    """Rows in which `reference` or `candidate` is the nearer one; equal counts for neither."""
    distances: tuple[float, float]
    """Largest distance of the reference and of the candidate from the referee, in spacings."""
    limit: float
    """Largest distance that rounding may make, in spacings."""
    dtype: str
    """Of the referee."""

    @property
    def clears_candidate(self) -> bool:
        """Whether the reference is wrong in every row in dispute, and the candidate in none."""
        return 0 < self.num_disputed == self.num_ruled == self.reference_wrong

    def sentence(self, reference: str) -> str:
        """Return what it comes to, for a person.

        Args:
            reference: Name of the reference.
        """
        rows = f"{self.num_ruled} rows in dispute"
        if self.num_ruled < self.num_disputed:
            rows = f"the first {self.num_ruled} of {self.num_disputed} rows in dispute"
        return (
            f"the referee ({self.dtype}) is nearer the candidate in {self.nearer['candidate']} and "
            f"nearer {reference} in {self.nearer['reference']} of {rows}: at most "
            f"{self.distances[1]:.3g} and {self.distances[0]:.3g} spacings away, where rounding "
            f"makes {self.limit:.3g}"
        )


class Referee:
    """A checkpoint in transformers, in two precisions; loaded at its first use.

    Args:
        model: Folder of the checkpoint.
        dtype: The runners'; one of `ABOVE`.

    Raises:
        KeyError: There is no precision above this dtype here.
    """

    def __init__(self, model: Path, dtype: str) -> None:
        self.dtype = ABOVE[dtype]
        self._model = model
        self._runners_dtype = dtype
        self._loaded: dict[str, nn.Module] = {}

    def logits(self, tokens: Sequence[int]) -> FloatArray:
        """Return the right logits of the token that follows, [vocab_size]."""
        return self._run(self.dtype, tokens)

    def rounded(self, tokens: Sequence[int]) -> FloatArray:
        """Return the same with the rounding of the runners' precision, [vocab_size]."""
        return self._run(self._runners_dtype, tokens)

    def _run(self, dtype: str, tokens: Sequence[int]) -> FloatArray:
        if dtype not in self._loaded:
            self._loaded[dtype] = self._load(dtype)
        model: Any = self._loaded[dtype]
        with torch.inference_mode(), _never_below(getattr(torch, dtype), model):
            output = model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
        values: FloatArray = output.double().numpy()
        return values

    def _load(self, dtype: str) -> nn.Module:
        from transformers import AutoModelForCausalLM  # seconds to import
        from transformers.utils import logging

        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            self._model,
            dtype=getattr(torch, self._runners_dtype),  # the weights as the runners have them
            attn_implementation="eager",
            local_files_only=True,
        )
        tables = [module for module in model.modules() if _is_rotary(module)]
        kept = [dict(module.named_buffers(recurse=False)) for module in tables]
        model = model.eval().to(getattr(torch, dtype))
        for module, buffers in zip(tables, kept, strict=True):
            for name, buffer in buffers.items():
                setattr(module, name, buffer)
        return model


def rule(
    disputes: Disputes, right: Scores, rounded: Scores, dtype: str, floor: float
) -> Ruling | None:
    """Return what the referee says of all rows in dispute; None without any.

    Args:
        disputes: The rows.
        right: The referee.
        rounded: The same model in the runners' precision: its distance from the referee is what
            rounding makes.
        dtype: Name of the referee's precision.
        floor: How far the reference is from itself, in spacings.
    """
    if not disputes.rows:
        return None
    rights = [right(row.tokens) for row in disputes.rows]
    made = [
        distance(exact, rounded(row.tokens))
        for exact, row in zip(rights, disputes.rows, strict=True)
    ]
    limit = noise.MARGIN * (max(made) + floor)
    ours = [
        distance(exact, row.reference) for exact, row in zip(rights, disputes.rows, strict=True)
    ]
    theirs = [
        distance(exact, row.candidate) for exact, row in zip(rights, disputes.rows, strict=True)
    ]
    pairs = list(zip(ours, theirs, strict=True))
    return Ruling(
        num_disputed=disputes.num_rows,
        num_ruled=len(pairs),
        reference_wrong=sum(mine > limit >= other for mine, other in pairs),
        candidate_wrong=sum(other > limit >= mine for mine, other in pairs),
        both_wrong=sum(mine > limit < other for mine, other in pairs),
        nearer={
            "reference": sum(mine < other for mine, other in pairs),
            "candidate": sum(other < mine for mine, other in pairs),
        },
        distances=(max(ours), max(theirs)),
        limit=limit,
        dtype=dtype,
    )


def distance(right: FloatArray, given: FloatArray) -> float:
    """Return the largest difference of two rows, in spacings of float32 at the largest logit."""
    size = np.float32(row_sizes(right[None])[0])
    with np.errstate(invalid="ignore"):
        apart = np.abs(right - given)
    same = (right == given) | (np.isnan(right) & np.isnan(given))
    apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
    return float(apart.max() / float(np.spacing(size)))


@dataclass(slots=True)
class TokenRuling:
    """What the referee says of tokens on which two engines part."""

    requests: int = 0
    """Greedy requests whose tokens part."""
    candidate: int = 0
    """Those in which it ranks the candidate's token above the reference's."""
    reference: int = 0
    open: int = 0
    """Those whose two logits rounding may exchange."""

    def sentence(self, dtype: str) -> str:
        """Return what it comes to, for a person."""
        return (
            f"where the tokens of {self.requests} requests part, the referee ({dtype}) prefers "
            f"the candidate's in {self.candidate}, V1's in {self.reference}"
        )


def rule_tokens(
    parted: Iterable[tuple[Sequence[int], int, int]], right: Scores, rounded: Scores
) -> TokenRuling:
    """Return whose greedy tokens the referee prefers.

    Args:
        parted: The tokens before, then the reference's and the candidate's next one.
        right: The referee.
        rounded: The same model in the runners' precision.
    """
    ruling = TokenRuling()
    for tokens, ours, theirs in parted:
        ruling.requests += 1
        exact = right(tokens)
        gap = float(exact[theirs] - exact[ours])
        slack = noise.MARGIN * float(np.abs(exact - rounded(tokens)).max())
        ruling.candidate += gap > slack
        ruling.reference += gap < -slack
        ruling.open += abs(gap) <= slack
    return ruling


@contextmanager
def _never_below(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """Let a model in float64 compute in it where its code says float32.

    Not in the rotary tables: those are float32 in every runner, by definition of the model.
    """
    if dtype != torch.float64:
        yield
        return
    mode = _Float64()
    handles = []
    for module in model.modules():
        if _is_rotary(module):
            handles.append(module.register_forward_pre_hook(mode.pause))
            handles.append(module.register_forward_hook(mode.go_on))
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


class _Float64(TorchFunctionMode):
    """Reads float64 where a call says float32."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False

    def pause(self, *_: Any) -> None:
        """Take calls at their word."""
        self._paused = True

    def go_on(self, *_: Any) -> None:
        """Raise them again."""
        self._paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._paused:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {
                name: torch.float64 if value is torch.float32 else value
                for name, value in kwargs.items()
            }
            if func is torch.Tensor.float:
                func = torch.Tensor.double
        return func(*args, **kwargs)
