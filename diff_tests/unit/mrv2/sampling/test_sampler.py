"""The sampler: rows come and go, stages act only where wanted, logprobs are of the raw logits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2.config import RunnerConfig
from mrv2.errors import ConfigError
from mrv2.memory.transfers import Transfers
from mrv2.plan import Arrival, Sampling
from mrv2.sampling.columns import GREEDY_BELOW
from mrv2.sampling.sampler import Sampler
from mrv2.sampling.stage import LogitsView
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
    rows: dict[int, Sampling], trace: StepTrace | None = None, device: str = "cpu"
) -> Sampler:
    transfers = Transfers(torch.device(device))
    config = RunnerConfig(
        device=transfers.device,
        max_num_reqs=9,
        max_num_tokens=9,
        max_model_len=16,
        vocab_size=VOCAB,
        kv_groups=(),
    )
    requests = RequestColumns(9, 16, transfers)
    sampler = Sampler(config, requests, transfers, trace or NullTrace())
    for row, sampling in rows.items():
        sampler.admit(row, arrival(sampling))
    sampler.flush()
    return sampler


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
    sampler.flush()
    logits = some_logits(1)
    output = sampler(logits.clone(), view([6]))
    assert output.logprobs is None
    assert output.token_ids.tolist() == logits.argmax(1).tolist()
    sampler.admit(6, arrival(Sampling(num_logprobs=0)))
    sampler.flush()
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
