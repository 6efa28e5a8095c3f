"""Allowed tokens, min tokens and logit bias: the values of the draw's logits, by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2.config import RunnerConfig
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.sampler import Sampler, SamplerOutput
from mrv2.sampling.stage import LogitsView
from mrv2.state.requests import RequestColumns
from mrv2.trace import Probe

VOCAB = 101
MAX_ROWS = 9
PROMPT = [3, 1, 4, 1, 5]
INF = float("inf")


class Bench:
    """A sampler whose rows are filled by hand, and what it drew from."""

    def __init__(self) -> None:
        self._arena = arena = Arena(Transfers(torch.device("cpu")))
        config = RunnerConfig(
            device=arena.transfers.device,
            max_num_reqs=MAX_ROWS,
            max_num_tokens=MAX_ROWS,
            max_model_len=32,
            vocab_size=VOCAB,
            kv_groups=(),
        )
        self._requests = RequestColumns(MAX_ROWS, 32, arena)
        self._sampler = Sampler(config, self._requests, arena, self)
        self.processed = torch.empty(0)

    def wants(self, probe: Probe) -> bool:
        return probe == "processed_logits"

    def record(self, probe: Probe, value: Any) -> None:
        if probe == "processed_logits":
            self.processed = value.clone()

    def admit(self, row: int, outputs: list[int] | None = None, **asked: Any) -> None:
        arrival = Arrival(
            req_id=f"r{row}",
            token_ids=PROMPT + (outputs or []),
            prompt_len=len(PROMPT),
            num_computed_tokens=0,
            block_ids=(),
            sampling=Sampling(**asked),
        )
        self._requests.admit(row, arrival)
        self._sampler.admit(row, arrival)

    def evict(self, row: int) -> None:
        self._requests.evict(row)
        self._sampler.evict(row)

    def draw(self, logits: Tensor, rows: list[int], num_outputs: list[int]) -> SamplerOutput:
        """Draw for each logit the token behind as many outputs."""
        self._requests.flush()
        self._sampler.flush()
        self._arena.flush()
        view = LogitsView(
            logit_rows=torch.tensor(rows, dtype=torch.int32),
            positions=torch.tensor([len(PROMPT) + count for count in num_outputs]),
            rows_np=np.array(rows, dtype=np.int32),
        )
        return self._sampler(logits, view)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def some_logits(count: int) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(11)) * 3


def masked(logits: Tensor, forbidden: list[list[int]]) -> Tensor:
    """The logits with these tokens of each row at -inf."""
    wanted = logits.clone()
    for row, token_ids in zip(wanted, forbidden, strict=True):
        row[token_ids] = -INF
    return wanted


# Allowed tokens.


def test_only_allowed_tokens_keep_their_logits(bench: Bench) -> None:
    bench.admit(7, allowed_token_ids=(100, 2, 2, 64))
    bench.admit(1)
    bench.admit(4, allowed_token_ids=(31,))
    logits = some_logits(4)
    others = [token for token in range(VOCAB) if token not in (2, 64, 100)]
    wanted = masked(logits, [others, [], [token for token in range(VOCAB) if token != 31], others])
    output = bench.draw(logits, [7, 1, 4, 7], [0, 0, 3, 1])
    assert torch.equal(bench.processed, wanted)
    assert output.token_ids.tolist() == wanted.argmax(1).tolist()


def test_a_row_that_changes_hands_keeps_nothing_of_its_last_owner(bench: Bench) -> None:
    bench.admit(2, allowed_token_ids=(5,), min_tokens=9, stop_token_ids=(7,), logit_bias={5: 1.0})
    logits = some_logits(1)
    bench.draw(logits.clone(), [2], [0])
    assert not torch.equal(bench.processed, logits)
    bench.evict(2)
    bench.admit(2)
    bench.draw(logits.clone(), [2], [0])
    assert torch.equal(bench.processed, logits)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 50.0])
def test_rows_with_all_but_two_tokens_masked_draw_one_of_the_two(
    bench: Bench, temperature: float
) -> None:
    for row in range(MAX_ROWS):
        pair = (row, VOCAB - 1 - row)
        bench.admit(row, allowed_token_ids=pair, temperature=temperature, seed=row)
    for step in range(20):
        drawn = bench.draw(some_logits(MAX_ROWS), list(range(MAX_ROWS)), [step] * MAX_ROWS)
        for row, token in enumerate(drawn.token_ids.tolist()):
            assert token in (row, VOCAB - 1 - row)


# Min tokens.


@pytest.mark.parametrize(
    ("num_outputs", "held"), [(0, True), (1, True), (2, True), (3, False), (4, False)]
)
def test_stop_tokens_are_free_exactly_from_the_least_number_on(
    bench: Bench, num_outputs: int, held: bool
) -> None:
    bench.admit(3, min_tokens=3, stop_token_ids=(8, 99))
    logits = some_logits(1)
    logits[0, 99] = 50.0
    wanted = masked(logits, [[8, 99]]) if held else logits.clone()
    output = bench.draw(logits, [3], [num_outputs])
    assert torch.equal(bench.processed, wanted)
    assert (output.token_ids.tolist() == [99]) is not held


def test_every_stop_token_is_held_and_each_logit_counts_for_itself(bench: Bench) -> None:
    bench.admit(6, min_tokens=2, stop_token_ids=(0, 50, 100))
    bench.admit(5, min_tokens=9)
    bench.admit(0, stop_token_ids=(4,))
    logits = some_logits(6)
    wanted = masked(logits, [[0, 50, 100], [], [0, 50, 100], [], [], []])
    bench.draw(logits, [6, 0, 6, 5, 6, 0], [0, 0, 1, 0, 2, 1])
    assert torch.equal(bench.processed, wanted)


@pytest.mark.parametrize(("outputs", "held"), [([9], True), ([9, 9], True), ([9, 9, 9], False)])
def test_a_resumed_request_counts_from_its_prompt(
    bench: Bench, outputs: list[int], held: bool
) -> None:
    bench.admit(1, outputs, min_tokens=3, stop_token_ids=(8,))
    logits = some_logits(1)
    wanted = masked(logits, [[8]]) if held else logits.clone()
    bench.draw(logits, [1], [len(outputs)])
    assert torch.equal(bench.processed, wanted)


def test_stop_tokens_outside_the_vocabulary_are_never_drawn_and_never_written(
    bench: Bench,
) -> None:
    bench.admit(1, min_tokens=3, stop_token_ids=(VOCAB, 8, 4 * VOCAB, -1))
    memory = torch.full((3, 2 * VOCAB), 7.0)
    logits = memory[:, :VOCAB]
    logits.copy_(some_logits(3))
    wanted = masked(logits, [[8], [8], []])
    bench.draw(logits, [1, 1, 1], [0, 1, 3])
    assert torch.equal(bench.processed, wanted)
    assert bool((memory[:, VOCAB:] == 7.0).all())


def after_grammar(allowed: dict[int, float]) -> Tensor:
    logits = torch.full((1, VOCAB), -INF)
    logits[0, list(allowed)] = torch.tensor(list(allowed.values()))
    return logits


def test_a_finished_grammar_that_allows_only_stop_tokens_wins(bench: Bench) -> None:
    bench.admit(2, min_tokens=5, stop_token_ids=(8, 9), is_structured=True)
    output = bench.draw(after_grammar({9: -3.0}), [2], [1])
    assert output.token_ids.tolist() == [9]
    assert torch.equal(bench.processed, after_grammar({9: -3.0}))


def test_a_grammar_that_allows_anything_else_waits(bench: Bench) -> None:
    bench.admit(2, min_tokens=5, stop_token_ids=(8, 9), is_structured=True)
    output = bench.draw(after_grammar({9: 4.0, 8: 5.0, 40: -60.0}), [2], [1])
    assert output.token_ids.tolist() == [40]
    assert torch.equal(bench.processed, after_grammar({40: -60.0}))


def test_only_structured_requests_yield(bench: Bench) -> None:
    bench.admit(2, min_tokens=5, stop_token_ids=(8, 9))
    bench.draw(after_grammar({9: -3.0}), [2], [1])
    assert bool(bench.processed.isneginf().all())


def test_of_a_row_that_yields_only_finite_stop_logits_stay(bench: Bench) -> None:
    bench.admit(2, min_tokens=5, stop_token_ids=(7, 8, 9), is_structured=True)
    bench.draw(after_grammar({7: INF, 8: 2.0, 9: float("nan")}), [2], [1])
    assert torch.equal(bench.processed, after_grammar({8: 2.0}))


# Logit bias.


def test_a_bias_is_added_in_float32_to_each_logit_of_the_request(bench: Bench) -> None:
    bench.admit(4, logit_bias={100: 0.1, 0: -100.0, 7: 100.0})
    bench.admit(8)
    logits = some_logits(4)
    logits[1, 7] = -INF
    wanted = logits.clone()
    for row in (0, 1, 3):
        wanted[row, [100, 0, 7]] += torch.tensor([0.1, -100.0, 100.0])
    output = bench.draw(logits, [4, 4, 8, 4], [0, 1, 0, 2])
    assert torch.equal(bench.processed, wanted)
    assert output.token_ids.tolist() == wanted.argmax(1).tolist()


def test_masks_come_before_the_bias_and_the_bias_before_the_temperature(bench: Bench) -> None:
    bench.admit(
        0,
        allowed_token_ids=(1, 2, 3),
        min_tokens=1,
        stop_token_ids=(3,),
        logit_bias={2: 5.0, 3: 90.0, 50: 90.0},
        temperature=0.5,
    )
    logits = some_logits(1)
    wanted = torch.full((1, VOCAB), -INF)
    wanted[0, 1] = logits[0, 1] / 0.5
    wanted[0, 2] = (logits[0, 2] + 5.0) / 0.5
    bench.draw(logits, [0], [0])
    assert torch.equal(bench.processed, wanted)


def test_logprobs_are_of_the_logits_before_any_of_the_three(bench: Bench) -> None:
    bench.admit(0, allowed_token_ids=(3,), logit_bias={3: 5.0}, num_logprobs=2)
    logits = some_logits(1)
    raw = torch.log_softmax(logits, 1)
    output = bench.draw(logits.clone(), [0], [0])
    assert output.logprobs is not None
    assert output.logprobs.token_ids[0].tolist() == [3, *raw.topk(2).indices[0].tolist()]
    assert torch.allclose(output.logprobs.values[0], raw[0, output.logprobs.token_ids[0]])
