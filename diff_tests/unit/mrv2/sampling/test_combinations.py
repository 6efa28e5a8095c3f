"""Parameters three and more at a time, while requests come and go: logits against a plain loop.

The right values are worked out here, token by token and in float64, from the parameters' meaning.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mrv2.config import RunnerConfig
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling, sampling_faults
from mrv2.plan import Arrival
from mrv2.sampling.sampler import Sampler
from mrv2.sampling.stage import LogitsView
from mrv2.state.requests import RequestColumns
from mrv2.trace import NullTrace, Probe

VOCAB = 37
ROWS = 6
LENGTH = 40
EOS = 0
STEPS = 25
NEAR = 1e-4
"""Of a float32 logit or probability that stands at a bound: either side is right."""
Floats = npt.NDArray[np.float64]


class Processed(NullTrace):
    """Keeps the processed logits."""

    value: torch.Tensor

    def wants(self, probe: Probe) -> bool:
        """Return True for the processed logits."""
        return probe == "processed_logits"

    def record(self, probe: Probe, value: object) -> None:
        """Keep a copy: the draw comes after."""
        if probe == "processed_logits":
            assert isinstance(value, torch.Tensor)
            self.value = value.clone()


def right_values(
    logits: Floats, sampling: Sampling, prompt: list[int], outputs: list[int]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the logits that are drawn from, and which of them may as well be cut or kept."""
    values = logits.copy()
    mask(values, sampling, outputs)
    for token, bias in sampling.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *outputs}:
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, count in Counter(outputs).items():
        values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if sampling.temperature < 1e-5:
        return values, np.zeros(VOCAB, dtype=np.bool_)
    values /= sampling.temperature
    return values, cut(values, sampling)


def mask(values: Floats, sampling: Sampling, outputs: list[int]) -> None:
    if sampling.allowed_token_ids is not None:
        values[sorted(set(range(VOCAB)) - set(sampling.allowed_token_ids))] = -math.inf
    for *before, last in sampling.bad_words:
        if not before or outputs[-len(before) :] == before:
            values[last] = -math.inf
    if len(outputs) < sampling.min_tokens:
        held = values.copy()
        held[list(sampling.stop_token_ids)] = -math.inf
        if not (sampling.is_structured and held.max() == -math.inf):
            values[:] = held


def cut(values: Floats, sampling: Sampling) -> npt.NDArray[np.bool_]:
    """Cut divided logits; return the tokens that stand so near a bound that rounding decides."""
    near = np.zeros(VOCAB, dtype=np.bool_)
    if values.max() == -math.inf:
        return near
    if sampling.min_p > 0:
        lowest = values.max() + math.log(sampling.min_p)
        near |= np.abs(values - lowest) < NEAR
        values[values < lowest - NEAR] = -math.inf
    if 0 < sampling.top_k < VOCAB:
        smallest = np.sort(values)[-sampling.top_k]
        values[values < smallest] = -math.inf
    if sampling.top_p < 1:
        weight = np.exp(values - values.max())
        weight /= weight.sum()
        above = np.array([weight[values > value].sum() for value in values])
        near |= np.abs(above - sampling.top_p) < NEAR
        values[above >= sampling.top_p] = -math.inf
    return near


def some_of(rng: random.Random, most: int) -> list[int]:
    return rng.sample(range(VOCAB), rng.randint(1, most))


def random_sampling(rng: random.Random) -> Sampling:
    """Three parameters at least, of which none leaves nothing to draw."""
    choices: dict[str, Any] = {
        "allowed_token_ids": tuple({EOS, *some_of(rng, 20)}),
        "bad_words": tuple(
            tuple(rng.choices(range(8), k=rng.choice((1, 2, 2, 3)))) for _ in range(5)
        ),
        "min_tokens": rng.randint(1, 12),
        "logit_bias": {token: rng.uniform(-8, 8) for token in some_of(rng, 9)},
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.choice((0.5, 1.3, 2.0)),
        "min_p": rng.choice((0.02, 0.3, 1.0)),
        "top_k": rng.choice((1, 2, 7, VOCAB - 1, VOCAB, VOCAB + 5)),
        "top_p": rng.choice((1e-6, 0.4, 0.95)),
    }
    while True:
        names = rng.sample(sorted(choices), rng.randint(3, 6))
        sampling = Sampling(
            temperature=rng.choice((0.0, 1e-6, 0.02, 0.7, 1.0, 3.0)),
            seed=rng.randrange(2**64),
            stop_token_ids=tuple({EOS, *some_of(rng, 3)}),
            is_structured=rng.random() < 0.3,
            **{name: choices[name] for name in names},
        )
        if not sampling_faults(sampling, VOCAB, has_markers=False):
            return sampling
        choices["allowed_token_ids"] = tuple(some_of(rng, 20))


class Bench:
    """A sampler, and the tokens that its rows must hold."""

    def __init__(self) -> None:
        self.trace = Processed()
        self.arena = arena = Arena(Transfers(torch.device("cpu")))
        config = RunnerConfig(
            device=arena.transfers.device,
            max_num_reqs=ROWS,
            max_num_tokens=64,
            max_model_len=LENGTH,
            vocab_size=VOCAB,
            kv_groups=(),
        )
        self.requests = RequestColumns(ROWS, LENGTH, arena)
        self.sampler = Sampler(config, self.requests, arena, self.trace)
        self.live: dict[int, tuple[Sampling, list[int], list[int]]] = {}

    def admit(
        self, row: int, sampling: Sampling, prompt: list[int], outputs: Iterable[int] = ()
    ) -> None:
        known = [*prompt, *outputs]
        arrival = Arrival(
            req_id=f"r{row}",
            token_ids=known,
            prompt_len=len(prompt),
            num_computed_tokens=0,
            block_ids=(),
            sampling=sampling,
        )
        self.requests.admit(row, arrival)
        self.sampler.admit(row, arrival)
        self.live[row] = sampling, prompt, known[len(prompt) :]

    def evict(self, row: int) -> None:
        self.requests.evict(row)
        self.sampler.evict(row)
        del self.live[row]

    def draw(self, rows: list[int], drafts: list[list[int]], logits: torch.Tensor) -> list[int]:
        """Draw for each row behind its tokens and each further one behind its drafts."""
        self.requests.flush()
        self.sampler.flush()
        self.arena.flush()
        of_logits, positions = [], []
        for row, draft in zip(rows, drafts, strict=True):
            _, prompt, outputs = self.live[row]
            start = len(prompt) + len(outputs)
            written = torch.tensor([*outputs, *draft], dtype=torch.int32)
            self.requests.token_ids.tensor[row, len(prompt) : start + len(draft)] = written
            for extra in range(len(draft) + 1):
                of_logits.append(row)
                positions.append(start + extra)
        rows_np = np.array(of_logits, dtype=np.int32)
        view = LogitsView(
            logit_rows=torch.from_numpy(rows_np),
            positions=torch.tensor(positions),
            rows_np=rows_np,
        )
        token_ids: list[int] = self.sampler(logits.clone(), view).token_ids.tolist()
        return token_ids


def assert_right(
    logit: torch.Tensor,
    processed: torch.Tensor,
    drawn: int,
    sampling: Sampling,
    prompt: list[int],
    outputs: list[int],
) -> None:
    right, either = right_values(logit.double().numpy(), sampling, prompt, outputs)
    ours = processed.double().numpy()
    assert not np.isnan(ours).any()
    decided = ~either
    assert np.array_equal(np.isinf(ours)[decided], np.isinf(right)[decided]), sampling
    both = np.isfinite(ours) & np.isfinite(right)
    scale = max(1.0, float(np.abs(right[both]).max(initial=0.0)))
    assert np.abs(ours[both] - right[both]).max(initial=0.0) < 1e-6 * scale, sampling
    if np.isfinite(ours).any():
        assert np.isfinite(ours[drawn])
    if sampling.temperature < 1e-5:
        assert drawn == int(processed.argmax())


def come_and_go(rng: random.Random, bench: Bench) -> None:
    for row in range(ROWS):
        if row in bench.live and (rng.random() < 0.15 or len(bench.live[row][2]) > 20):
            bench.evict(row)
        elif row in bench.live and rng.random() < 0.1:  # preempted, and resumed elsewhere
            kept = bench.live[row]
            bench.evict(row)
            bench.admit(max(set(range(ROWS)) - set(bench.live)), *kept)
        elif row not in bench.live and rng.random() < 0.5:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
            bench.admit(row, random_sampling(rng), prompt)


def some_logits(count: int, generator: torch.Generator) -> torch.Tensor:
    """A seventh of them masked, and a tenth of the rows as a grammar leaves them that has ended."""
    logits = torch.randn(count, VOCAB, generator=generator) * 4
    logits[torch.rand(count, VOCAB, generator=generator) < 0.15] = -torch.inf
    ended = torch.rand(count, generator=generator) < 0.1
    logits[ended] = -torch.inf
    logits[ended, EOS] = 1.5
    return logits


@pytest.mark.parametrize("seed", range(24))
def test_any_three_parameters_and_more_give_the_right_logits(seed: int) -> None:
    rng, bench = random.Random(seed), Bench()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        come_and_go(rng, bench)
        rows = rng.sample(sorted(bench.live), rng.randint(0, len(bench.live)))
        drafts = [rng.choices(range(8), k=rng.choice((0, 0, 0, 1, 3))) for _ in rows]
        logits = some_logits(len(rows) + sum(map(len, drafts)), generator)
        drawn = bench.draw(rows, drafts, logits)
        index = 0
        for row, draft in zip(rows, drafts, strict=True):
            sampling, prompt, outputs = bench.live[row]
            kept = drawn[index]
            for extra in range(len(draft) + 1):
                history = [*outputs, *draft[:extra]]
                shown = logits[index], bench.trace.value[index], drawn[index]
                assert_right(*shown, sampling, prompt, history)
                index += 1
            outputs.append(kept)


@pytest.mark.parametrize("top_p", [1e-38, 1e-45, 1e-300])
def test_the_likeliest_stays_though_no_float32_is_as_small_as_p(top_p: float) -> None:
    bench = Bench()
    bench.admit(3, Sampling(temperature=1.0, seed=2, top_p=top_p), [1])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8))
    likeliest = int(logits.argmax())
    assert bench.draw([3], [[]], logits) == [likeliest]
    assert bench.trace.value[0].isfinite().nonzero().flatten().tolist() == [likeliest]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 3.4e38},
        {"temperature": 1.0001e-5, "top_p": 0.9, "min_p": 0.1},
        {"min_p": 5e-324, "top_k": 3},
        {"frequency_penalty": 3.4e38, "top_p": 0.5},
        {"presence_penalty": -3.4e38, "top_k": 2},
        {"repetition_penalty": 3.4e38, "logit_bias": {3: 3.4e38}},
        {"min_tokens": 2**40, "stop_token_ids": (1,), "top_k": 2**40},
    ],
    ids=str,
)
def test_values_at_the_ends_of_float32_draw_a_token_that_is_left(asked: dict[str, Any]) -> None:
    bench = Bench()
    bench.admit(1, Sampling(**{"temperature": 1.0, "seed": 3, **asked}), [4, 5], [6])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(9)) * 3
    (drawn,) = bench.draw([1], [[]], logits)
    processed = bench.trace.value[0]
    assert not bool(processed.isnan().any())
    assert float(processed[drawn]) > -math.inf


def test_a_bias_revives_no_masked_token() -> None:
    bench = Bench()
    sampling = Sampling(
        temperature=1.0,
        logit_bias={5: 100.0, 9: 100.0, EOS: 100.0},
        allowed_token_ids=(EOS, 5, 9, 11),
        bad_words=((5,), (3, 9)),
        min_tokens=2,
        stop_token_ids=(EOS,),
        top_k=2,
        seed=1,
    )
    bench.admit(2, sampling, [1, 2], [3])
    assert bench.draw([2], [[]], torch.zeros(1, VOCAB)) == [11]
    assert bench.trace.value[0].isfinite().nonzero().flatten().tolist() == [11]


def test_a_row_that_is_masked_whole_draws_an_id_and_leaves_its_neighbours() -> None:
    # Words of several tokens may forbid all that is allowed, which no check can know beforehand.
    def tokens(*, beside: bool) -> list[int]:
        bench = Bench()
        cuts: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
        bench.admit(0, Sampling(seed=3, **cuts), [1])
        bench.admit(4, Sampling(repetition_penalty=2.0), [1])
        if beside:
            doomed = Sampling(
                allowed_token_ids=(7, 8),
                bad_words=((3, 7), (3, 8)),
                repetition_penalty=1.5,
                frequency_penalty=1.0,
                logit_bias={7: 3.0},
                num_logprobs=2,
                **cuts,
            )
            bench.admit(2, doomed, [7], [8, 3])
        rows = [0, 2, 4] if beside else [0, 4]
        logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
        return bench.draw(rows, [[]] * len(rows), logits if beside else logits[[0, 2]])

    first, doomed, last = tokens(beside=True)
    assert 0 <= doomed < VOCAB
    assert [first, last] == tokens(beside=False)
