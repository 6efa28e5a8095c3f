"""Prompt logprobs against the logprobs of drawn tokens, over every way to run a prompt; memory."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrv2 import (
    PROMPT_LOGPROBS,
    ConfigError,
    ExtensionResources,
    KVGroup,
    Logprobs,
    ProtocolError,
    RunnerConfig,
    RunnerOutput,
    Sampling,
)
from mrv2.config import LogprobsMode
from mrv2.features import prompt_logprobs
from mrv2.features.prompt_logprobs import PromptLogprobs, rows_per_chunk, score_unattached
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.plan import Arrival
from mrv2.state.block_tables import BlockTables
from mrv2.state.requests import RequestColumns
from mrv2_diff.toy_host import Toy

VOCAB = 97
CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=4,
    max_num_tokens=48,
    max_model_len=64,
    vocab_size=VOCAB,
    kv_groups=(KVGroup(block_size=4, max_blocks=16),),
)
PROMPT = tuple((5 + 31 * index) % VOCAB for index in range(13))


@cache
def logits_after(prefix: tuple[int, ...]) -> Tensor:
    """The model's logits behind a prefix, from its whole-vocabulary values of a drawn token."""
    toy = Toy(replace(CONFIG, logprobs_mode="raw_logits"))
    toy.host.add("probe", prefix, Sampling(num_logprobs=-1))
    pending = toy.step({"probe": len(prefix)})
    assert pending is not None
    given = pending.wait().logprobs
    assert given is not None
    logits = torch.empty(VOCAB)
    logits[torch.from_numpy(given.token_ids[0, 1:]).long()] = torch.from_numpy(given.values[0, 1:])
    return logits


def assert_right(
    scores: Logprobs, count: int, prompt: Iterable[int] = PROMPT, *, normalised: bool = True
) -> None:
    tokens = tuple(prompt)
    assert scores.token_ids.shape == scores.values.shape == (len(tokens) - 1, 1 + count)
    assert scores.ranks.shape == (len(tokens) - 1,)
    for position, token in enumerate(tokens[1:]):
        logits = logits_after(tokens[: position + 1])
        values = torch.log_softmax(logits, dim=0) if normalised else logits
        best = logits.topk(count).indices.tolist()
        assert scores.token_ids[position].tolist() == [token, *best]
        assert scores.values[position].tolist() == values[[token, *best]].tolist()
        assert scores.ranks[position] == int((values >= values[token]).sum())


def of_prompts(output: RunnerOutput) -> dict[str, Logprobs]:
    given: Any = output.extras.get(PROMPT_LOGPROBS, {})
    return dict(given)


def scorer_of(config: RunnerConfig, requests: RequestColumns, arena: Arena) -> PromptLogprobs:
    model: Any = SimpleNamespace(compute_logits=None)  # each test gives its own
    tables = BlockTables((), config.num_rows, arena)
    return PromptLogprobs(
        ExtensionResources(
            config=config, model=model, requests=requests, block_tables=tables, arena=arena
        )
    )


def run(toy: Toy, work: dict[str, int]) -> dict[str, Logprobs]:
    pending = toy.step(work)
    assert pending is not None
    output = pending.wait()
    toy.host.take(output)
    return of_prompts(output)


def add(toy: Toy, count: int | None, prompt: Iterable[int] = PROMPT, req_id: str = "a") -> None:
    toy.host.add(req_id, list(prompt), Sampling(num_prompt_logprobs=count))


@pytest.mark.parametrize(
    "chunks", [(13,), (12, 1), (1, 12), (1,) * 13, (5, 5, 3), (4, 8, 1)], ids=str
)
@pytest.mark.parametrize("count", [0, 3])
def test_any_chunks_give_the_whole_with_the_last_one(chunks: tuple[int, ...], count: int) -> None:
    toy = Toy(CONFIG)
    add(toy, count)
    for chunk in chunks[:-1]:
        assert run(toy, {"a": chunk}) == {}
    (scores,) = run(toy, {"a": chunks[-1]}).values()
    assert_right(scores, count)
    for _ in range(3):
        assert run(toy, {"a": 1}) == {}, "given once"


def test_the_whole_vocabulary() -> None:
    toy = Toy(CONFIG)
    add(toy, -1)
    scores = run(toy, {"a": 13})["a"]
    assert scores.values.shape == (12, 1 + VOCAB)
    for position, row in enumerate(scores.token_ids[:, 1:].tolist()):
        wanted = torch.log_softmax(logits_after(PROMPT[: position + 1]), dim=0)
        assert sorted(row) == list(range(VOCAB))
        assert scores.values[position, 1:].tolist() == wanted[row].tolist()


def test_a_prompt_of_one_token_has_no_rows() -> None:
    toy = Toy(CONFIG)
    add(toy, 4, prompt=[7])
    scores = run(toy, {"a": 1})["a"]
    assert scores.token_ids.shape == scores.values.shape == (0, 5)
    assert scores.ranks.shape == (0,)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_modes_of_logits_are_not_normalised(mode: LogprobsMode) -> None:
    toy = Toy(replace(CONFIG, logprobs_mode=mode))
    toy.host.add("a", list(PROMPT), Sampling(num_prompt_logprobs=2, temperature=0.5))
    assert_right(run(toy, {"a": 13})["a"], 2, normalised=False)


def test_processed_logprobs_of_a_prompt_are_the_raw_ones() -> None:
    toy = Toy(replace(CONFIG, logprobs_mode="processed_logprobs"))
    toy.host.add("a", list(PROMPT), Sampling(num_prompt_logprobs=2, temperature=0.5))
    assert_right(run(toy, {"a": 13})["a"], 2)


def test_requests_with_other_wishes_share_the_batch() -> None:
    toy = Toy(CONFIG)
    other = [3, 1, 4, 1, 5, 9, 2, 6]
    add(toy, None, prompt=[8, 9], req_id="none")
    run(toy, {"none": 2})
    add(toy, 1)
    add(toy, 6, prompt=other, req_id="b")
    assert run(toy, {"none": 1, "a": 6, "b": 5}) == {}
    scores = run(toy, {"b": 3, "none": 1, "a": 4})
    assert list(scores) == ["b"]
    assert_right(scores["b"], 6, other)
    assert_right(run(toy, {"a": 3, "b": 1, "none": 1})["a"], 1)


def test_preempted_in_the_middle_of_its_prompt_it_starts_over() -> None:
    toy = Toy(CONFIG)
    add(toy, 2)
    add(toy, None, prompt=[8, 9], req_id="b")
    run(toy, {"a": 7, "b": 2})
    toy.host.preempt("a")
    run(toy, {"b": 1})
    run(toy, {"b": 1, "a": 3})
    toy.host.preempt("a")
    assert run(toy, {"a": 9}) == {}, "preempted and resumed in one step"
    assert_right(run(toy, {"a": 4, "b": 1})["a"], 2)


def test_resumed_behind_its_prompt_it_gets_nothing_again() -> None:
    toy = Toy(CONFIG)
    add(toy, 2)
    assert_right(run(toy, {"a": 13})["a"], 2)
    run(toy, {"a": 1})
    toy.host.preempt("a")
    assert run(toy, {"a": 5}) == {}
    assert run(toy, {"a": 9}) == {}
    assert run(toy, {"a": 1}) == {}


def test_a_prompt_whose_first_output_was_dropped_is_given_again() -> None:
    # The host dropped the step that completed the prompt, token and logprobs, when it preempted.
    toy = Toy(CONFIG)
    add(toy, 2)
    dropped = toy.step({"a": 13})
    assert dropped is not None
    toy.host.preempt("a")
    pending = toy.step({"a": 13})
    assert pending is not None
    assert_right(of_prompts(dropped.wait())["a"], 2)
    assert_right(of_prompts(pending.wait())["a"], 2)


def test_positions_that_run_again_change_nothing() -> None:
    toy = Toy(CONFIG)
    add(toy, 2)
    run(toy, {"a": 9})
    toy.host.rewind("a", 4)
    assert run(toy, {"a": 3}) == {}
    assert_right(run(toy, {"a": 5})["a"], 2)


def test_a_request_given_up_in_the_middle_leaves_its_row_clean() -> None:
    toy = Toy(CONFIG)
    add(toy, 2)
    run(toy, {"a": 7})
    toy.host.finish("a")
    add(toy, None, prompt=[8, 9, 10], req_id="b")
    assert run(toy, {"b": 3}) == {}
    toy.host.finish("b")
    add(toy, 1, prompt=PROMPT[::-1])
    assert_right(run(toy, {"a": 13})["a"], 1, PROMPT[::-1])


def test_steps_in_flight_keep_their_own_scores() -> None:
    toy = Toy(CONFIG)
    add(toy, 2)
    first, second = toy.step({"a": 6}), toy.step({"a": 7})
    add(toy, 2, prompt=PROMPT[::-1], req_id="b")
    third = toy.step({"b": 13, "a": 1})
    assert first is not None
    assert second is not None
    assert third is not None
    assert of_prompts(first.wait()) == {}
    assert_right(of_prompts(second.wait())["a"], 2)
    assert_right(of_prompts(third.wait())["b"], 2, PROMPT[::-1])


def test_a_cached_prefix_is_refused() -> None:
    toy = Toy(CONFIG)
    toy.host.add("a", list(PROMPT))
    toy.run({"a": 13})
    add(toy, 2, req_id="b")
    toy.host.share("a", "b", 8)
    with pytest.raises(ConfigError, match=r"num_prompt_logprobs is 2.*computed already"):
        toy.step({"b": 5})


def test_positions_that_are_left_out_are_refused() -> None:
    toy = Toy(CONFIG)
    add(toy, 2)
    run(toy, {"a": 4})
    toy.host.requests["a"].num_computed = 6
    with pytest.raises(ProtocolError, match="goes on from position 6; 4 were run"):
        toy.step({"a": 5})


def test_rows_of_hand_made_logits() -> None:
    """Two requests in one step: each position's logits go to the row of the token behind it."""
    arena = Arena(Transfers(torch.device("cpu")))
    requests = RequestColumns(CONFIG.max_num_reqs, CONFIG.max_model_len, arena)
    scorer = scorer_of(replace(CONFIG, logprobs_mode="raw_logits"), requests, arena)
    prompts = {"a": [3, 1, 2], "b": [9, 8, 7, 6]}
    for row, (req_id, prompt) in enumerate(prompts.items()):
        arrived = arrival(req_id, prompt)
        requests.admit(row, arrived)
        scorer.admit(row, arrived)
    requests.flush()
    arena.flush()
    hidden = torch.arange(7.0).unsqueeze(1)
    token_values = torch.arange(VOCAB) / 100
    given = scorer.score(
        ints(1, 0), ints(0, 0), ints(0, 4, 7), hidden, lambda part: part + token_values
    )
    assert list(given) == ["b", "a"]
    assert given["b"].token_ids[:, 0].tolist() == [8, 7, 6]
    assert given["b"].values[:, 0].tolist() == pytest.approx([0.08, 1.07, 2.06])
    assert given["a"].token_ids[:, 0].tolist() == [1, 2]
    assert given["a"].values[:, 0].tolist() == pytest.approx([4.01, 5.02])
    assert given["a"].ranks.tolist() == [VOCAB - 1, VOCAB - 2]


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def arrival(req_id: str, prompt: list[int]) -> Arrival:
    return Arrival(
        req_id=req_id,
        token_ids=prompt,
        prompt_len=len(prompt),
        num_computed_tokens=0,
        block_ids=([0],),
        sampling=Sampling(num_prompt_logprobs=1),
    )


class Allocations(TorchDispatchMode):
    """Counts bytes of the tensors that operations make, and of the largest one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and not made._is_view():
                self.largest = max(self.largest, made.numel() * made.element_size())
        return result


def largest_temporary(prompt_len: int, vocab_size: int) -> int:
    """Score a prompt of random hidden states in one step; bytes of the largest tensor made."""
    arena = Arena(Transfers(torch.device("cpu")))
    config = replace(
        CONFIG,
        vocab_size=vocab_size,
        max_num_tokens=prompt_len,
        max_model_len=prompt_len,
        kv_groups=(),
    )
    requests = RequestColumns(1, prompt_len, arena)
    scorer = scorer_of(config, requests, arena)
    arrived = arrival("a", [index % vocab_size for index in range(prompt_len)])
    requests.admit(0, arrived)
    scorer.admit(0, arrived)
    requests.flush()
    arena.flush()
    batch = ints(0), ints(0), ints(0, prompt_len)
    weights = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(prompt_len, 2, generator=torch.Generator().manual_seed(1))
    with Allocations() as made:
        scores = scorer.score(*batch, hidden, lambda part: part @ weights)["a"]
    assert scores.values.shape == (prompt_len - 1, 2)
    wanted = torch.log_softmax(hidden[:-1] @ weights, dim=1)
    at = torch.arange(prompt_len - 1)
    assert torch.allclose(scores.values[:, 0], wanted[at, (at + 1) % vocab_size], atol=1e-5)
    return int(made.largest)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """A bound that a test reaches with little memory."""
    bound = 1 << 20
    monkeypatch.setattr(prompt_logprobs, "CHUNK_BYTES", bound)
    return bound


def test_memory_does_not_grow_with_the_prompt(small_chunks: int) -> None:
    lengths = (300, 1200, 4800)
    largest = [largest_temporary(length, 1000) for length in lengths]
    assert 0 < largest[-1] <= 1.1 * small_chunks
    assert all(one == other for one, other in pairwise(largest))


def test_chunks_are_bounded_in_bytes_whatever_is_asked() -> None:
    for dtype, columns in ((torch.bfloat16, 1), (torch.bfloat16, 21), (torch.float32, 151_937)):
        hidden = torch.empty(9, 4, dtype=dtype)
        rows = rows_per_chunk(hidden, 151_936, columns)
        size = rows * (151_936 * hidden.element_size() + columns * 24)
        assert prompt_logprobs.CHUNK_BYTES // 2 < size <= prompt_logprobs.CHUNK_BYTES
    assert rows_per_chunk(torch.empty(9, 4), 1 << 28, 1) == 1


def test_a_chunk_without_a_request_is_as_large_as_one_can_be(small_chunks: int) -> None:
    weights = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    seen = []

    def to_logits(part: Tensor) -> Tensor:
        seen.append(len(part))
        return part @ weights

    score_unattached(torch.randn(4000, 2), 1000, to_logits)
    score_unattached(torch.randn(9, 2), 1000, to_logits)
    assert seen == [256, 9]
