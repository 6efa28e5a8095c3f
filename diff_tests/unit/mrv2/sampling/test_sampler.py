"""The sampler: rows come and go, stages act only where wanted, logprobs are of the raw logits."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from mrv2.config import LogprobsMode, RunnerConfig, ThinkingMarkers
from mrv2.errors import CapacityError, ConfigError
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.columns import GREEDY_BELOW, DrawColumns
from mrv2.sampling.sampler import Sampler
from mrv2.sampling.stage import LogitsStage, LogitsView, StageFactory, StageResources
from mrv2.sampling.stages import STAGES, stages_with
from mrv2.state.requests import RequestColumns
from mrv2.trace import NullTrace, Probe, StepTrace

VOCAB = 101


class Recorder:
    """A trace that keeps the last value of each probe."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def wants(self, probe: Probe) -> bool:
        """Return True: every value is kept."""
        return True

    def record(self, probe: Probe, value: object) -> None:
        self.values[probe] = value


def sampler_with(
    rows: dict[int, Sampling],
    trace: StepTrace | None = None,
    device: str = "cpu",
    mode: LogprobsMode = "raw_logprobs",
) -> Sampler:
    arena = Arena(Transfers(torch.device(device)))
    config = RunnerConfig(
        device=arena.transfers.device,
        max_num_reqs=9,
        max_num_tokens=64,
        max_model_len=16,
        vocab_size=VOCAB,
        kv_groups=(),
        logprobs_mode=mode,
    )
    requests = RequestColumns(9, 16, arena)
    sampler = Sampler(config, requests, arena, trace or NullTrace())
    for row, sampling in rows.items():
        sampler.admit(row, arrival(sampling))
    flush(sampler)
    return sampler


def flush(sampler: Sampler) -> None:
    sampler.flush()
    sampler._columns.temperature._arena.flush()


def arrival(sampling: Sampling) -> Arrival:
    return Arrival(
        req_id="r",
        token_ids=[1],
        prompt_len=1,
        num_computed_tokens=0,
        block_ids=([0],),
        sampling=sampling,
    )


def view(rows: list[int], position: int = 5) -> LogitsView:
    return LogitsView(
        logit_rows=torch.tensor(rows, dtype=torch.int32),
        positions=torch.full((len(rows),), position),
        rows_np=np.array(rows, dtype=np.int32),
    )


def some_logits(count: int) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(11)) * 3


DEMANDS = (
    Sampling(allowed_token_ids=(3, 4)),
    Sampling(bad_words=((1,),)),
    Sampling(min_tokens=5, stop_token_ids=(7, 9)),
    Sampling(logit_bias={5: 90.0}),
    Sampling(presence_penalty=1.9, repetition_penalty=1.9),
    Sampling(temperature=1.0, min_p=0.9),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(num_logprobs=3),
    Sampling(logprob_token_ids=(4, 5)),
)


@pytest.mark.parametrize("demand", DEMANDS, ids=repr)
def test_a_plain_request_asks_for_nothing_whoever_had_its_row(demand: Sampling) -> None:
    """Beside a neighbour that asks for all that its row's last owner did."""
    plain = Sampling(temperature=1.2, seed=4)
    fresh, used, replaced = Recorder(), Recorder(), Recorder()
    outputs = []
    for trace, before in ((fresh, ()), (used, (demand, None)), (replaced, (demand,))):
        sampler = sampler_with({6: demand}, trace)
        assert sampler.draws_plainly(np.array([2], dtype=np.int32))
        for sampling in before:
            if sampling is None:
                sampler.evict(2)
            else:
                sampler.admit(2, arrival(sampling))
                assert not sampler.draws_plainly(np.array([2], dtype=np.int32))
        sampler.admit(2, arrival(plain))
        flush(sampler)
        assert sampler.draws_plainly(np.array([2], dtype=np.int32))
        assert not sampler.draws_plainly(np.array([2, 6], dtype=np.int32))
        outputs.append(sampler(some_logits(2), view([2, 6])).token_ids.tolist())
    assert outputs[0] == outputs[1] == outputs[2]
    for trace in (used, replaced):
        expected, found = fresh.values["processed_logits"], trace.values["processed_logits"]
        assert torch.equal(found, expected)
    raw = some_logits(2)[0].div(1.2)
    assert torch.equal(fresh.values["processed_logits"][0], raw)


@pytest.mark.parametrize("factory", STAGES)
def test_no_stage_wants_anything_of_a_plain_request(factory: StageFactory) -> None:
    """The temperature's is none of the sampler's business: it reads the shared columns."""
    arena = Arena(Transfers(torch.device("cpu")))
    columns = DrawColumns(4, arena)
    resources = StageResources(
        num_rows=4,
        vocab_size=VOCAB,
        arena=arena,
        columns=columns,
        requests=RequestColumns(4, 16, arena),
        thinking=ThinkingMarkers(start=(1,), end=(2,)),
    )
    stage = factory(resources)
    row = np.array([2], dtype=np.int32)
    assert not stage.wants(row)
    stage.admit(2, arrival(Sampling(temperature=0.7, seed=3)))
    assert not stage.wants(row)


class Own(LogitsStage):
    """A host's stage that wants one row, whatever the request asks for."""

    takes_plain = True

    def __init__(self, resources: StageResources) -> None:
        self.rows: set[int] = set()

    def admit(self, row: int, arrival: Arrival) -> None:
        self.rows.add(row)

    def evict(self, row: int) -> None:
        self.rows.discard(row)

    def flush(self) -> None:
        pass

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        return any(row in self.rows for row in rows.tolist())

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        logits[:] = 0.0
        logits[:, 42] = 1.0


def test_a_hosts_own_stage_is_told_of_plain_requests_too() -> None:
    arena = Arena(Transfers(torch.device("cpu")))
    config = RunnerConfig(
        device=arena.transfers.device,
        max_num_reqs=4,
        max_num_tokens=8,
        max_model_len=16,
        vocab_size=VOCAB,
        kv_groups=(),
    )
    stages = stages_with([Own], [])
    sampler = Sampler(config, RequestColumns(5, 16, arena), arena, NullTrace(), stages)
    rows = np.array([1], dtype=np.int32)
    assert sampler.draws_plainly(rows)
    sampler.admit(1, arrival(Sampling()))
    flush(sampler)
    assert not sampler.draws_plainly(rows)
    assert sampler(some_logits(1), view([1])).token_ids.tolist() == [42]
    sampler.evict(1)
    assert sampler.draws_plainly(rows)


def test_greedy_rows_leave_the_logits_and_take_the_largest() -> None:
    logits = some_logits(2)
    before = logits.clone()
    output = sampler_with({4: Sampling(), 1: Sampling()})(logits, view([4, 1]))
    assert output.token_ids.tolist() == before.argmax(1).tolist()
    assert output.logprobs is None
    assert torch.equal(logits, before)


def test_temperature_divides_as_torch_does_and_spares_greedy_rows() -> None:
    trace = Recorder()
    rows = {2: Sampling(temperature=0.7), 0: Sampling(), 5: Sampling(temperature=1.3)}
    sampler = sampler_with(rows, trace)
    logits = some_logits(4)
    divisors = torch.tensor([[1.3], [1.0], [0.7], [0.7]])
    wanted = logits.div(divisors)
    output = sampler(logits, view([5, 0, 2, 2]))
    assert torch.equal(trace.values["processed_logits"], wanted)
    assert trace.values["sampled"] is output
    assert logits.data_ptr() == trace.values["processed_logits"].data_ptr(), "not in place"


def test_logprobs_are_of_the_raw_logits() -> None:
    sampler = sampler_with({3: Sampling(temperature=0.5, num_logprobs=4)})
    logits = some_logits(1)
    raw = torch.log_softmax(logits, 1)
    output = sampler(logits, view([3]))
    assert output.logprobs is not None
    chosen = output.logprobs.token_ids
    assert chosen[:, 0].tolist() == output.token_ids.tolist()
    assert chosen[:, 1:].tolist() == raw.topk(4).indices.tolist()
    assert torch.allclose(output.logprobs.values, raw.gather(1, chosen), atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "width"), [([None, None], None), ([None, 0], 1), ([3, 7], 8), ([2, -1], VOCAB + 1)]
)
def test_the_most_demanding_row_of_the_batch_decides(
    asked: list[int | None], width: int | None
) -> None:
    rows = {index: Sampling(num_logprobs=count) for index, count in enumerate(asked)}
    # A row outside the batch does not count.
    sampler = sampler_with(rows | {8: Sampling(num_logprobs=50)})
    logprobs = sampler(some_logits(2), view([0, 1])).logprobs
    assert (logprobs and logprobs.values.shape[1]) == width


def test_each_row_gets_its_own_list_or_its_likeliest() -> None:
    rows = {
        0: Sampling(num_logprobs=4),
        1: Sampling(logprob_token_ids=(7, 100, 0, 7, 3, 2)),
        2: Sampling(logprob_token_ids=(50,), num_logprobs=1),
        3: Sampling(),
        4: Sampling(num_logprobs=0, logprob_token_ids=()),
    }
    logits = some_logits(6)
    raw = torch.log_softmax(logits, 1)
    # Row 1 has two logits, as a request with drafts has.
    output = sampler_with(rows)(logits, view([2, 1, 0, 1, 3, 4]))
    given = output.logprobs
    assert given is not None
    assert given.token_ids.shape == (6, 7)
    assert given.token_ids[:, 0].tolist() == output.token_ids.tolist()
    listed = [7, 100, 0, 7, 3, 2]
    assert given.token_ids[0, 1:].tolist() == [50, 0, 0, 0, 0, 0]
    assert given.token_ids[[1, 3], 1:].tolist() == [listed, listed]
    assert given.token_ids[2, 1:5].tolist() == raw[2].topk(4).indices.tolist()
    assert given.values[0, 1:].tolist() == [raw[0, 50].item(), *[-float("inf")] * 5]
    for row in (1, 3):
        assert given.values[row, 1:].tolist() == raw[row, listed].tolist()
    assert given.values[2, 1:5].tolist() == raw[2].topk(4).values.tolist()
    assert given.values[:, 5:][[0, 2, 4, 5]].tolist() == [[-float("inf")] * 2] * 4
    assert given.ranks.tolist() == [1] * 6


def test_a_row_forgets_its_list() -> None:
    sampler = sampler_with({0: Sampling(logprob_token_ids=(5, 6))})
    sampler.evict(0)
    sampler.admit(0, arrival(Sampling(num_logprobs=1)))
    flush(sampler)
    given = sampler(some_logits(1), view([0])).logprobs
    assert given is not None
    assert given.token_ids.tolist() == [[some_logits(1).argmax().item()] * 2]


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_a_listed_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(ConfigError, match=rf"logprob_token_ids has \[{token_id}\]"):
        sampler_with({0: Sampling(logprob_token_ids=(3, token_id))})


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_every_mode_is_of_the_logits_that_it_names(mode: LogprobsMode) -> None:
    rows = {
        0: Sampling(temperature=0.5, seed=3, num_logprobs=3, logit_bias={7: 9.0}),
        1: Sampling(num_logprobs=3, logit_bias={9: 11.0}),
        2: Sampling(temperature=2.0, seed=5, num_logprobs=0, top_k=4),
    }
    logits = some_logits(3)
    biased = logits.clone()
    biased[0, 7] += 9.0
    biased[1, 9] += 11.0
    divided = biased / torch.tensor([[0.5], [1.0], [2.0]])
    cut = divided[2] < divided[2].topk(4).values[-1]
    divided[2, cut] = -float("inf")
    source = divided if mode.startswith("processed") else logits.clone()
    wanted = source if mode.endswith("logits") else torch.log_softmax(source, 1)
    output = sampler_with(rows, mode=mode)(logits, view([0, 1, 2]))
    assert output.logprobs is not None
    ids = output.logprobs.token_ids.long()
    assert ids[:, 0].tolist() == output.token_ids.tolist()
    assert torch.allclose(output.logprobs.values, wanted.gather(1, ids), atol=1e-6)
    assert ids[:2, 1:].tolist() == source[:2].topk(3).indices.tolist()
    drawn = wanted.gather(1, ids[:, :1])
    assert output.logprobs.ranks.tolist() == (wanted >= drawn).sum(1).tolist()


def test_processed_and_raw_differ_by_the_temperature() -> None:
    """Temperature 2 halves the differences of logprobs: a ratio of likelihoods is its root."""
    logits = some_logits(1)
    raw, processed = (
        sampler_with({0: Sampling(temperature=2.0, seed=1, num_logprobs=-1)}, mode=mode)(
            logits.clone(), view([0])
        ).logprobs
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert raw is not None
    assert processed is not None
    assert raw.token_ids.tolist() == processed.token_ids.tolist()
    apart = raw.values[:, 1:].diff(), processed.values[:, 1:].diff()
    assert torch.allclose(apart[0], 2.0 * apart[1], atol=1e-5)


def test_more_logprobs_than_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_logprobs is 102.*101 tokens.*-1"):
        sampler_with({0: Sampling(num_logprobs=VOCAB + 1)})
    sampler_with({0: Sampling(num_logprobs=VOCAB)})


def test_temperature_below_the_bound_is_greedy() -> None:
    logits = some_logits(1)
    almost = sampler_with({0: Sampling(temperature=GREEDY_BELOW * 0.99)})
    assert almost(logits.clone(), view([0])).token_ids.tolist() == logits.argmax(1).tolist()
    trace = Recorder()
    at = sampler_with({0: Sampling(temperature=GREEDY_BELOW)}, trace)
    at(logits.clone(), view([0]))
    assert torch.equal(trace.values["processed_logits"], logits.div(torch.tensor(GREEDY_BELOW)))


def test_a_row_forgets_its_last_request() -> None:
    sampler = sampler_with({6: Sampling(temperature=5.0, seed=3, num_logprobs=2)})
    sampler.evict(6)
    flush(sampler)
    logits = some_logits(1)
    output = sampler(logits.clone(), view([6]))
    assert output.logprobs is None
    assert output.token_ids.tolist() == logits.argmax(1).tolist()
    sampler.admit(6, arrival(Sampling(num_logprobs=0)))
    flush(sampler)
    again = sampler(logits.clone(), view([6])).logprobs
    assert again is not None
    assert again.values.shape == (1, 1)


def test_seeds_of_64_bits_are_distinct_and_repeat() -> None:
    seeds = [0, 1, -1, 2**63 - 1, 2**63, -(2**63) + 1, 2**64 - 2]
    logits = torch.zeros(1, VOCAB)

    def stream(seed: int) -> list[int]:
        sampler = sampler_with({0: Sampling(temperature=1.0, seed=seed)})
        draws = [sampler(logits.clone(), view([0], position=at)) for at in range(12)]
        return [int(draw.token_ids) for draw in draws]

    streams = [stream(seed) for seed in seeds]
    assert len({tuple(drawn) for drawn in streams}) == len(seeds)
    assert stream(2**63) == stream(-(2**63)), "the same 64 bits"
    assert stream(0) == streams[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_drawn_in_float32_and_left_alone(dtype: torch.dtype) -> None:
    logits = some_logits(2).to(dtype)
    before = logits.clone()
    rows = {0: Sampling(temperature=0.5, seed=9, num_logprobs=3), 1: Sampling()}
    output = sampler_with(rows)(logits, view([0, 1]))
    wanted = sampler_with(rows)(before.float(), view([0, 1]))
    assert output.token_ids.tolist() == wanted.token_ids.tolist()
    assert output.logprobs is not None
    assert output.logprobs.values.dtype == torch.float32
    assert torch.equal(logits, before)


def test_no_logits() -> None:
    output = sampler_with({0: Sampling(temperature=0.5, num_logprobs=3)})(some_logits(0), view([]))
    assert output.token_ids.shape == (0,)
    assert output.logprobs is None


def test_more_logits_than_a_step_has_tokens_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"65 logits.*max_num_tokens is 64"):
        sampler_with({0: Sampling()})(some_logits(65), view([0] * 65))


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws_and_never_waits() -> None:
    rows = {
        0: Sampling(temperature=0.8, seed=5, num_logprobs=4),
        3: Sampling(),
        8: Sampling(temperature=1.5, seed=-6),
    }
    order = [8, 0, 3] * 20
    logits = some_logits(60)
    wanted = sampler_with(rows)(logits.clone(), view(order))
    sampler, there = sampler_with(rows, device="cuda"), view(order)
    on_gpu = LogitsView(
        logit_rows=there.logit_rows.cuda(),
        positions=there.positions.cuda(),
        rows_np=there.rows_np,
    )
    gpu_logits = logits.cuda()
    sampler(gpu_logits.clone(), on_gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = sampler(gpu_logits, on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.token_ids.tolist() == wanted.token_ids.tolist()
    assert output.logprobs is not None
    assert wanted.logprobs is not None
    assert output.logprobs.token_ids.tolist() == wanted.logprobs.token_ids.tolist()
    assert output.logprobs.ranks.tolist() == wanted.logprobs.ranks.tolist()
    assert torch.allclose(output.logprobs.values.cpu(), wanted.logprobs.values, atol=1e-6)
