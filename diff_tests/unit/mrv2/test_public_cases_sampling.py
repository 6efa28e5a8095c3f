"""Faults of sampling and logprobs that users of such runners reported: each by right values.

Logits are made by hand, and where a report has drafts a request has several of them in a step: its
tokens and its drafts stand in its row, and each logit knows its position.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2 import (
    PROMPT_LOGPROBS,
    Arrival,
    KVGroup,
    LogitsView,
    Logprobs,
    NullTrace,
    Probe,
    RunnerConfig,
    Sampling,
)
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.sampling.sampler import Sampler, SamplerOutput
from mrv2.state.requests import RequestColumns
from mrv2_diff.toy_host import Toy

VOCAB = 97
EOS = 2
CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=6,
    max_num_tokens=48,
    max_model_len=64,
    vocab_size=VOCAB,
    kv_groups=(KVGroup(block_size=4, max_blocks=16),),
)
PROMPT = [(5 + 31 * index) % VOCAB for index in range(23)]


class Rows(NullTrace):
    """A sampler over rows that hold what the test puts there; keeps the processed logits."""

    processed: Tensor

    def __init__(self, vocab_size: int = VOCAB) -> None:
        config = replace(CONFIG, vocab_size=vocab_size, max_num_tokens=1 << 17)
        self.arena = arena = Arena(Transfers(config.device))
        self.requests = RequestColumns(config.max_num_reqs, config.max_model_len, arena)
        self.sampler = Sampler(config, self.requests, arena, self)

    def wants(self, probe: Probe) -> bool:
        return probe == "processed_logits"

    def record(self, probe: Probe, value: object) -> None:
        if probe == "processed_logits":
            assert isinstance(value, Tensor)
            self.processed = value.clone()

    def admit(
        self, row: int, sampling: Sampling, prompt: Sequence[int], outputs: Sequence[int] = ()
    ) -> None:
        arrival = Arrival(
            req_id=f"r{row}",
            token_ids=[*prompt, *outputs],
            prompt_len=len(prompt),
            num_computed_tokens=0,
            block_ids=(),
            sampling=sampling,
        )
        self.requests.admit(row, arrival)
        self.sampler.admit(row, arrival)

    def evict(self, row: int) -> None:
        self.requests.evict(row)
        self.sampler.evict(row)

    def draw(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> SamplerOutput:
        self.requests.flush()
        self.sampler.flush()
        self.arena.flush()
        rows_np = np.array(rows, dtype=np.int32)
        view = LogitsView(
            logit_rows=torch.from_numpy(rows_np), positions=torch.tensor(positions), rows_np=rows_np
        )
        return self.sampler(logits, view)


# A least number of tokens.


@pytest.mark.parametrize("preempted_after", [None, 2])
@pytest.mark.parametrize("least", [0, 1, 2, 4])
def test_the_end_comes_right_behind_the_least_number(
    least: int, preempted_after: int | None
) -> None:
    toy = Toy(CONFIG)
    sampling = Sampling(logit_bias={EOS: 100.0}, min_tokens=least, stop_token_ids=(EOS,))
    request = toy.host.add("a", [9, 4, 7], sampling)
    toy.host.add("b", [8])
    toy.run({"a": 3, "b": 1})
    while request.outputs[-1] != EOS:
        assert len(request.outputs) <= least
        if len(request.outputs) == preempted_after:
            toy.host.preempt("a")
        toy.run({"b": 1, "a": request.num_left})
    assert len(request.outputs) == least + 1
    assert request.num_preemptions == (least >= 2 and preempted_after == 2)


# Penalties, with steps queued ahead.


def penalised(*, queued_ahead: bool) -> dict[str, list[int]]:
    """A plain request runs five steps, a penalised one joins, leaves, and another takes its row."""
    toy = Toy(CONFIG)
    pending = []

    def step(work: dict[str, int]) -> None:
        output = toy.step(work)
        assert output is not None
        pending.append(output)
        if not queued_ahead or len(pending) > 1:
            toy.host.take(pending.pop(0).wait())

    def settle() -> None:
        while pending:
            toy.host.take(pending.pop(0).wait())

    plain = toy.host.add("plain", PROMPT[:6])
    step({"plain": 6})
    for _ in range(4):
        step({"plain": 1})
    ended = {}
    for name, repetition in (("first", 1.5), ("second", 0.6)):
        penalty = Sampling(repetition_penalty=repetition, frequency_penalty=1.0)
        request = toy.host.add(name, PROMPT[3:9], penalty)
        step({"plain": 1, name: 6})
        for _ in range(11):
            step({"plain": 1, name: 1})
        settle()
        ended[name] = request.outputs
        toy.host.finish(name)
    return {**ended, "plain": plain.outputs}


def test_a_penalty_counts_the_token_in_flight_and_no_neighbours() -> None:
    ahead = penalised(queued_ahead=True)
    assert ahead == penalised(queued_ahead=False)
    for name, repetition in (("first", 1.5), ("second", 0.6)):
        toy = Toy(CONFIG)
        penalty = Sampling(repetition_penalty=repetition, frequency_penalty=1.0)
        alone = toy.host.add(name, PROMPT[3:9], penalty)
        toy.run({name: 6})
        for _ in range(11):
            toy.run({name: 1})
        assert ahead[name] == alone.outputs
        without = toy.host.add("without", PROMPT[3:9])
        toy.run({"without": 6})
        for _ in range(11):
            toy.run({"without": 1})
        assert without.outputs != alone.outputs, "the penalty changes nothing here"
    toy = Toy(CONFIG)
    plain = toy.host.add("plain", PROMPT[:6])
    toy.run({"plain": 6})
    for _ in range(len(ahead["plain"]) - 1):
        toy.run({"plain": 1})
    assert ahead["plain"] == plain.outputs


# What a request asks for holds in every row of its logits.


@pytest.mark.parametrize("asked", [{"min_p": 0.4}, {"logit_bias": {2: -100.0}}], ids=str)
def test_a_forbidden_token_has_no_probability_behind_any_draft(asked: dict[str, object]) -> None:
    num_logits, count = 4, 10_000
    rows = Rows(vocab_size=3)
    sampling = Sampling(temperature=1.0, seed=8, **asked)  # type: ignore[arg-type]
    rows.admit(3, sampling, [0], [1])
    rows.admit(1, Sampling(temperature=1.0, seed=9), [0], [1])
    logits = torch.tensor([0.6, 0.3, 0.1]).log().repeat(2 * num_logits * count, 1)
    positions = [2 + index % num_logits + index // (2 * num_logits) for index in range(len(logits))]
    of_rows = [3 if index // num_logits % 2 == 0 else 1 for index in range(len(logits))]
    drawn = rows.draw(logits, of_rows, positions).token_ids
    held = torch.tensor(of_rows) == 3
    assert not bool((drawn[held] == 2).any())
    assert set(drawn[held].tolist()) == {0, 1}
    assert int((drawn[~held] == 2).sum()) > 0.09 * num_logits * count


# The order of operations.


@pytest.mark.parametrize(("temperature", "value"), [(0.0, 1.5), (0.5, 3.0)])
def test_a_bias_is_added_then_penalised_then_divided(temperature: float, value: float) -> None:
    rows = Rows()
    sampling = Sampling(temperature=temperature, logit_bias={7: 2.0}, repetition_penalty=2.0)
    rows.admit(2, sampling, [7, 8])
    rows.draw(torch.ones(1, VOCAB), [2], [2])
    divisor = temperature or 1.0
    assert rows.processed[0, 7].item() == value
    assert rows.processed[0, 8].item() == 0.5 / divisor
    assert rows.processed[0, 9].item() == 1.0 / divisor


# NaN.


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_row_of_nan_among_those_of_a_request(temperature: float) -> None:
    def drawn(*, broken: bool) -> list[int]:
        rows = Rows()
        cuts = Sampling(temperature=temperature, seed=4, top_k=9, top_p=0.9, num_logprobs=1)
        rows.admit(4, cuts, [1], [2, 3])
        rows.admit(0, Sampling(temperature=1.0, seed=2), [1])
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(6))
        if broken:
            logits[1] = torch.nan
        return list(rows.draw(logits, [4, 4, 4, 0], [2, 3, 4, 1]).token_ids.tolist())

    good, bad = drawn(broken=False), drawn(broken=True)
    assert 0 <= bad[1] < VOCAB
    assert good[:1] + good[2:] == bad[:1] + bad[2:]


# Logprobs.


def test_logprobs_of_requests_with_several_logits_are_of_their_rows() -> None:
    rows = Rows()
    for row in (5, 0, 3):
        rows.admit(row, Sampling(temperature=1.0, seed=row, num_logprobs=2), [1])
    of_rows = [5, 5, 0, 0, 0, 0, 3]
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    wanted = torch.log_softmax(logits.double(), dim=1)
    output = rows.draw(logits, of_rows, [1, 2, 1, 2, 3, 4, 1])
    assert output.logprobs is not None
    assert output.logprobs.token_ids.shape == (7, 3)
    for index, token in enumerate(output.token_ids.tolist()):
        columns = output.logprobs.token_ids[index].tolist()
        assert columns == [token, *wanted[index].topk(2).indices.tolist()]
        given = output.logprobs.values[index].double()
        assert torch.allclose(given, wanted[index, columns], atol=1e-6)
        assert output.logprobs.ranks[index] == int((wanted[index] >= wanted[index, token]).sum())


@pytest.mark.parametrize(
    ("token", "count", "columns", "rank"), [(0, 3, [0, 0, 1, 2], 1), (3, 2, [3, 0, 1], 4)]
)
def test_ranks_are_of_the_vocabulary_and_no_column_shifts_them(
    token: int, count: int, columns: list[int], rank: int
) -> None:
    rows = Rows(vocab_size=4)
    # A seed for which this token is drawn.
    for seed in range(10_000):
        rows.admit(1, Sampling(temperature=1.0, seed=seed, num_logprobs=count), [1])
        output = rows.draw(torch.tensor([[9.0, 8.0, 7.0, 6.0]]), [1], [1])
        if output.token_ids.tolist() == [token]:
            break
        rows.evict(1)
    assert output.logprobs is not None
    assert output.logprobs.token_ids.tolist() == [columns]
    assert output.logprobs.ranks.tolist() == [rank]


def scored(chunks: Sequence[int], evicted_after: int | None = None) -> list[Logprobs]:
    """Everything that is given for the prompt while it runs in these chunks."""
    toy = Toy(CONFIG)
    toy.host.add("other", [3, 1])
    toy.host.add("a", PROMPT, Sampling(num_prompt_logprobs=2))
    given: list[Logprobs] = []
    computed, work = 0, {"other": 2}
    for chunk in chunks:
        if computed == evicted_after:
            toy.host.preempt("a")
        pending = toy.step({**work, "a": chunk})
        assert pending is not None
        output = pending.wait()
        toy.host.take(output)
        of_prompts: Any = output.extras.get(PROMPT_LOGPROBS, {})
        given += of_prompts.values()
        computed, work = computed + chunk, {"other": 1}
    for _ in range(2):
        toy.run({"other": 1, "a": 1})
    return given


@pytest.mark.parametrize(
    ("chunks", "evicted_after"),
    [
        ((8, 8, 7), None),
        ((8, 8, 6, 1), None),
        ((8, 8, 5, 5, 5, 5, 3), 16),
        ((8, 8, 6, 23), 22),
        ((8, 8, 6, 22, 1), 22),
    ],
    ids=str,
)
def test_a_prompt_in_chunks_and_evicted_has_every_logprob_once(
    chunks: tuple[int, ...], evicted_after: int | None
) -> None:
    (whole,) = scored([23])
    (parts,) = scored(chunks, evicted_after)
    assert parts.token_ids.shape == (22, 3)
    assert parts.token_ids[:, 0].tolist() == PROMPT[1:]
    assert parts.token_ids.tolist() == whole.token_ids.tolist()
    assert parts.values == pytest.approx(whole.values, abs=1e-6)
    assert parts.ranks.tolist() == whole.ranks.tolist()
