"""Device memory that sampling makes beside the logits, counted by allocation on the kernels' path.

Tensors are on the meta device: they have the shapes of the real thing and no data. Each op builds
its launch, scratch included, and does not run it. So what is counted is what a GPU would allocate.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mrv2.config import LogprobsMode, RunnerConfig, ThinkingMarkers
from mrv2.extension import ExtensionResources
from mrv2.features.prompt_logprobs import CHUNK_BYTES, PromptLogprobs
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers, queue_copy
from mrv2.ops.twin import TwinOp
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling import gumbel, likeliest
from mrv2.sampling.gumbel import draw
from mrv2.sampling.likeliest import summarize_logits
from mrv2.sampling.logprobs import gather_logprobs
from mrv2.sampling.narrowing import Narrowing
from mrv2.sampling.sampler import Sampler, draw_unattached
from mrv2.sampling.stage import LogitsView, NarrowingStage, StageFactory, StageResources
from mrv2.sampling.stages import STAGES
from mrv2.state.block_tables import BlockTables
from mrv2.state.requests import RequestColumns
from mrv2.trace import NullTrace

META = torch.device("meta")
BATCH = 256
VOCAB = 151_936
HIDDEN = 1024
PROMPT_LEN = 20

DRAWN = 8
"""Bytes that each logits row costs: its drawn token."""
CUTOFF = 4
SPARE = 73_728
"""Room for the candidates of top-k and top-p."""
LOGPROBS = 512
"""Five logprobs and what leads to them, for a large batch; 376 of it are in use."""
FLOAT32_ROW = 4 * VOCAB
"""A row of logits that some stage rewrites while somebody wants the model's own, or of bfloat16."""
PENALTY_SCRATCH = 64 * VOCAB * 4
"""Once, when the first request with a penalty arrives; whatever the batch."""


class DeviceMemory(TorchDispatchMode):
    """Counts the bytes on the meta device that operations make and hold; those on a CPU are not.

    A storage counts from the operation that makes it until the last tensor on it is gone.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self.peak = 0
        self._tensors: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        given = {_storage(value) for value in tree_leaves((args, kwargs)) if is_device(value)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if is_device(made):
                self._hold(made, is_new=_storage(made) not in given)
        return result

    def _hold(self, tensor: Tensor, *, is_new: bool) -> None:
        key, num_bytes = _storage(tensor), tensor.untyped_storage().nbytes()
        if is_new:
            self._tensors[key] = 0
            self.held += num_bytes
            self.peak = max(self.peak, self.held)
        if key in self._tensors:
            self._tensors[key] += 1
            weakref.finalize(tensor, self._let_go, key, num_bytes)

    def _let_go(self, key: int, num_bytes: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key]
            self.held -= num_bytes


def is_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device == META


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def build_only(op: TwinOp[...], *args: Any, **kwargs: Any) -> None:
    """Stand in for `TwinOp.__call__`: make what the launch needs, and do not run it."""
    op.launch(*args, **kwargs)


@pytest.fixture(autouse=True)
def _kernels_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwinOp, "__call__", build_only)
    monkeypatch.setattr(likeliest, "INTERPRETED", True)
    monkeypatch.setattr(gumbel, "_spaces", {})


def copy_unless_lost(destination: Tensor, source: Tensor) -> None:
    """Copy, but not to the host, since a meta tensor has nothing to give."""
    if destination.device == META:
        queue_copy(destination, source)


def arrival(row: int, sampling: Sampling, prompt_len: int = PROMPT_LEN) -> Arrival:
    return Arrival(
        req_id=f"r{row}",
        token_ids=[7] * prompt_len,
        prompt_len=prompt_len,
        num_computed_tokens=0,
        block_ids=(),
        sampling=sampling,
    )


class Rows:
    """A sampler whose rows all ask for the same, and the view of a batch of them."""

    def __init__(
        self,
        sampling: Sampling,
        batch: int,
        mode: LogprobsMode,
        stages: tuple[StageFactory, ...] = STAGES,
    ) -> None:
        arena = Arena(Transfers(META, copy_unless_lost))
        config = RunnerConfig(
            device=META,
            max_num_reqs=batch,
            max_num_tokens=batch,
            max_model_len=64,
            vocab_size=VOCAB,
            kv_groups=(),
            logprobs_mode=mode,
            thinking=ThinkingMarkers(start=(1,), end=(2, 3)),
        )
        requests = RequestColumns(batch, 64, arena)
        self.sampler = Sampler(config, requests, arena, NullTrace(), stages)
        for row in range(batch):
            requests.admit(row, arrival(row, sampling))
            self.sampler.admit(row, arrival(row, sampling))
        requests.flush()
        arena.flush()
        rows = np.arange(batch, dtype=np.int32)
        self.view = LogitsView(
            logit_rows=arena.transfers.upload(rows),
            positions=torch.full((batch,), PROMPT_LEN, device=META),
            rows_np=rows,
        )


def peak_of(call: Callable[[], object]) -> int:
    """Bytes held at most during a call, its result included; the first call's own do not count."""
    call()
    with DeviceMemory() as memory:
        call()
    return int(memory.peak)


def peak_of_sampling(rows: Rows, dtype: torch.dtype) -> int:
    rows.sampler.flush()
    logits = torch.empty((len(rows.view.rows_np), VOCAB), dtype=dtype, device=META)
    return peak_of(lambda: rows.sampler(logits, rows.view))


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
RANDOM: dict[str, Any] = {"temperature": 0.7}
MASKS: dict[str, Any] = {
    "allowed_token_ids": (4, 5, 6, 7),
    "bad_words": ((4,), (7, 5)),
    "logit_bias": {5: 1.5},
    "min_tokens": 3,
    "stop_token_ids": (6,),
    "thinking_budget": 4,
}
PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
}
TOP: dict[str, Any] = {"top_k": 50, "top_p": 0.9}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all rows ask for, and the bytes that a row may cost."""

    asks: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = FLOAT32
    mode: LogprobsMode = "raw_logprobs"
    bound: int


CASES = {
    "greedy": Case(bound=DRAWN),
    "greedy, bfloat16": Case(dtype=BFLOAT16, bound=DRAWN),
    "random": Case(asks=RANDOM, bound=DRAWN),
    "random, bfloat16": Case(asks=RANDOM, dtype=BFLOAT16, bound=DRAWN),
    "min-p": Case(asks=RANDOM | {"min_p": 0.1}, bound=DRAWN + CUTOFF),
    "min-p, bfloat16": Case(asks=RANDOM | {"min_p": 0.1}, dtype=BFLOAT16, bound=DRAWN + CUTOFF),
    "top-k and top-p": Case(asks=RANDOM | TOP, bound=DRAWN + CUTOFF + SPARE),
    "top-k and top-p, bfloat16": Case(
        asks=RANDOM | TOP, dtype=BFLOAT16, bound=DRAWN + CUTOFF + SPARE
    ),
    "all cuts and logprobs": Case(
        asks=RANDOM | TOP | {"min_p": 0.1, "num_logprobs": 5},
        dtype=BFLOAT16,
        bound=DRAWN + CUTOFF + SPARE + LOGPROBS,
    ),
    "logprobs": Case(asks={"num_logprobs": 5}, bound=DRAWN + LOGPROBS),
    "logprobs, bfloat16": Case(asks={"num_logprobs": 5}, dtype=BFLOAT16, bound=DRAWN + LOGPROBS),
    "logprobs of listed tokens": Case(
        asks={"logprob_token_ids": (3, 1, 4)}, dtype=BFLOAT16, bound=DRAWN + LOGPROBS
    ),
    "processed logprobs": Case(
        asks=RANDOM | TOP | {"num_logprobs": 5},
        mode="processed_logprobs",
        bound=DRAWN + CUTOFF + SPARE + LOGPROBS,
    ),
    "penalties": Case(asks=PENALTIES, bound=DRAWN),
    "masks": Case(asks=MASKS, bound=DRAWN + CUTOFF),
    "everything that rewrites, then all cuts": Case(
        asks=RANDOM | MASKS | PENALTIES | TOP | {"min_p": 0.1},
        bound=DRAWN + CUTOFF + SPARE + CUTOFF,
    ),
    "penalties, bfloat16": Case(asks=PENALTIES, dtype=BFLOAT16, bound=DRAWN + FLOAT32_ROW),
    "penalties beside raw logprobs": Case(
        asks=PENALTIES | {"num_logprobs": 5}, bound=DRAWN + FLOAT32_ROW + LOGPROBS
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_row_costs_what_its_wishes_need(case: Case) -> None:
    rows = Rows(Sampling(**case.asks), BATCH, case.mode)
    assert BATCH * DRAWN <= peak_of_sampling(rows, case.dtype) <= BATCH * case.bound


@pytest.mark.parametrize("cuts", [{}, TOP, TOP | {"min_p": 0.1}], ids=["draw", "top", "all cuts"])
def test_what_a_draw_costs_does_not_depend_on_the_dtype(cuts: dict[str, Any]) -> None:
    rows = Rows(Sampling(**RANDOM, **cuts), BATCH, "raw_logprobs")
    assert peak_of_sampling(rows, BFLOAT16) == peak_of_sampling(rows, FLOAT32)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_the_profiled_draw_takes_what_any_batch_takes(dtype: torch.dtype) -> None:
    logits = torch.empty((BATCH, VOCAB), dtype=dtype, device=META)
    with DeviceMemory() as memory:
        draw_unattached(logits)
    profiled = int(memory.peak)
    for name, case in CASES.items():
        for mode in get_args(LogprobsMode):
            rows = Rows(Sampling(**case.asks), BATCH, mode)
            peak = peak_of_sampling(rows, dtype)
            assert peak + PENALTY_SCRATCH <= profiled + BATCH * LOGPROBS, (name, mode)


def test_penalties_cost_their_scratch_once_whatever_the_batch() -> None:
    held = {}
    for batch in (BATCH, 4 * BATCH):
        rows = Rows(Sampling(**PENALTIES), batch, "raw_logprobs")
        with DeviceMemory() as memory:
            rows.sampler.flush()
            held[batch] = memory.held
            rows.sampler.admit(0, arrival(0, Sampling(presence_penalty=1.0)))
            rows.sampler.flush()
            assert memory.held == memory.peak == held[batch]
    assert set(held.values()) == {PENALTY_SCRATCH}


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("batch", [1, 32, 256, 1024])
def test_five_logprobs_cost_a_summary_of_each_split(batch: int, dtype: torch.dtype) -> None:
    num_splits = min(75 * batch, 1056 + batch)
    peak = peak_of_logprobs(batch, dtype)
    assert peak <= 60 * num_splits + 76 * batch
    assert peak < batch * VOCAB * dtype.itemsize / 50


def peak_of_logprobs(batch: int, dtype: torch.dtype) -> int:
    logits = torch.empty((batch, VOCAB), dtype=dtype, device=META)
    token_ids = torch.empty(batch, dtype=torch.int64, device=META)
    return peak_of(lambda: gather_logprobs(logits, token_ids, 5))


def peak_of_prompt(
    length: int, count: int, dtype: torch.dtype, keep: list[Tensor] | None = None
) -> int:
    """Bytes held at most while a prompt is scored in one step, its logits counted in."""
    arena = Arena(Transfers(META, copy_unless_lost))
    config = RunnerConfig(
        device=META,
        max_num_reqs=1,
        max_num_tokens=length,
        max_model_len=length,
        vocab_size=VOCAB,
        kv_groups=(),
    )
    requests = RequestColumns(1, length, arena)
    scorer = PromptLogprobs(
        ExtensionResources(
            config=config,
            model=cast("Any", SimpleNamespace(compute_logits=None)),
            requests=requests,
            block_tables=BlockTables((), config.num_rows, arena),
            arena=arena,
        )
    )
    arrived = arrival(0, Sampling(num_prompt_logprobs=count), length)
    requests.admit(0, arrived)
    requests.flush()
    arena.flush()
    scorer.admit(0, arrived)
    hidden = torch.empty((length, HIDDEN), dtype=dtype, device=META)
    weights = torch.empty((HIDDEN, VOCAB), dtype=dtype, device=META)

    def to_logits(part: Tensor) -> Tensor:
        logits = part @ weights
        if keep is not None:
            keep.append(logits)
        return logits

    start = np.zeros(1, dtype=np.int32)
    with DeviceMemory() as memory:
        given = scorer.score(start, start, np.array([0, length], np.int32), hidden, to_logits)
    assert given["r0"].values.shape == (length - 1, 1 + count)
    return int(memory.peak)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("count", [0, 5, 200])
def test_a_prompt_costs_a_chunk_however_long_it_is(count: int, dtype: torch.dtype) -> None:
    peaks = {peak_of_prompt(length, count, dtype) for length in (2048, 8192, 32_768)}
    assert len(peaks) == 1
    assert CHUNK_BYTES // 2 < peaks.pop() <= CHUNK_BYTES


class Copies(NarrowingStage):
    """A stage as nobody should write it: it takes a float32 copy of the logits to look at them."""

    takes_plain = True

    def __init__(self, resources: StageResources) -> None: ...
    def admit(self, row: int, arrival: Arrival) -> None: ...
    def evict(self, row: int) -> None: ...
    def flush(self) -> None: ...
    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        return True

    def narrow(self, narrowing: Narrowing, logits: Tensor, view: LogitsView) -> None:
        copy = logits.float() if logits.dtype == BFLOAT16 else logits.clone()
        copy.amax(dim=1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_stage_that_copies_the_logits_is_found(case: Case) -> None:
    """Also where the bound has room for one copy: this one is the second."""
    rows = Rows(Sampling(**case.asks), BATCH, case.mode, (*STAGES, Copies))
    assert peak_of_sampling(rows, case.dtype) > BATCH * case.bound


def test_a_launcher_that_copies_the_logits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(Sampling(**RANDOM), BATCH, "raw_logprobs")
    for op in (draw, summarize_logits):
        monkeypatch.setattr(op, "launch", copying(op.launch))
    peaks = peak_of_sampling(rows, BFLOAT16), peak_of_logprobs(BATCH, BFLOAT16)
    assert min(peaks) >= BATCH * FLOAT32_ROW


def copying(launch: Callable[..., object]) -> Callable[..., object]:
    """A launcher that widens the logits first."""

    def widened(*args: Any, **kwargs: Any) -> object:
        wide = [value.float() if is_logits(value) else value for value in args]
        return launch(*wide, **kwargs)

    return widened


def is_logits(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == VOCAB


def test_logits_that_outlive_their_chunk_are_found() -> None:
    assert peak_of_prompt(8192, 5, BFLOAT16, keep=[]) > 2 * CHUNK_BYTES


def test_memory_is_counted_while_it_is_held() -> None:
    before = torch.empty(1000, device=META)
    with DeviceMemory() as memory:
        one = torch.empty(100, device=META)
        head, tail = one.split(50)
        del one, head
        before.add_(1)
        before[:10].zero_()
        torch.empty(1000)
        assert (memory.held, memory.peak) == (400, 400)
        del tail
        two = torch.empty(50, device=META) * 2
        assert (memory.held, memory.peak) == (200, 400)
        del two
    assert (memory.held, memory.peak) == (0, 400)
