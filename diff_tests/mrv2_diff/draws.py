"""Draws through the sampler, their exact distribution, and a chi-square between the two.

A correct sampler fails one chi-square with probability `ALPHA`, once: seeds are fixed. What a test
would miss is told by `missed`, the probability that a chi-square passes in spite of a bias.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from mrv2.config import RunnerConfig
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.sampler import Sampler
from mrv2.sampling.stage import LogitsView
from mrv2.state.requests import RequestColumns
from mrv2.trace import NullTrace, Probe, StepTrace
from mrv2_diff.parameters import PARAMETERS

NUM_DRAWS = 60_000
VOCAB = 24
ALPHA = 1e-5
LOGITS = torch.linspace(2.0, -4.0, VOCAB)[
    torch.randperm(24, generator=torch.Generator().manual_seed(7))
]
FEATURES: dict[str, dict[str, object]] = {
    row.counted[0]: {row.ours: row.counted[1]} for row in PARAMETERS if row.counted is not None
}
MIXES = [(), *((name,) for name in FEATURES), *combinations(FEATURES, 2)]


class Observed(NullTrace):
    """Makes the sampler settle the logits before the draw."""

    def wants(self, probe: Probe) -> bool:
        """Return True for the processed logits."""
        return probe == "processed_logits"


def sampling_of(mix: tuple[str, ...], seed: int = 0) -> Sampling:
    """What a request asks for that has these features, random in any case."""
    fields: dict[str, object] = {"temperature": 1.0, "seed": seed}
    for name in mix:
        fields |= FEATURES[name]
    return Sampling(**fields)  # type: ignore[arg-type]


def probabilities(sampling: Sampling, logits: Tensor = LOGITS) -> Tensor:
    """The exact distribution, by definition and in float64."""
    values = logits.double().clone()
    for token, bias in sampling.logit_bias.items():
        values[token] += bias
    values /= sampling.temperature
    values[values < values.max() + np.log(max(sampling.min_p, 1e-300))] = -torch.inf
    if sampling.top_k:
        values[values < values.topk(sampling.top_k).values[-1]] = -torch.inf
    weight = values.softmax(0)
    larger = (values.unsqueeze(0) > values.unsqueeze(1)).double() @ weight
    weight[larger >= sampling.top_p] = 0.0
    return weight / weight.sum()


def sampler_for(
    samplings: list[Sampling], vocab_size: int, trace: StepTrace, device: torch.device
) -> Sampler:
    """A sampler whose row i serves the i-th request."""
    arena = Arena(Transfers(device))
    config = RunnerConfig(
        device=arena.transfers.device,
        max_num_reqs=len(samplings),
        max_num_tokens=1 << 20,
        max_model_len=4,
        vocab_size=vocab_size,
        kv_groups=(),
    )
    requests = RequestColumns(len(samplings), 4, arena)
    sampler = Sampler(config, requests, arena, trace)
    for row, sampling in enumerate(samplings):
        arrival = Arrival(
            req_id=str(row),
            token_ids=[0],
            prompt_len=1,
            num_computed_tokens=0,
            block_ids=(),
            sampling=sampling,
        )
        requests.admit(row, arrival)
        sampler.admit(row, arrival)
    requests.flush()
    sampler.flush()
    arena.flush()
    return sampler


def drawn(
    samplings: list[Sampling],
    rows: Tensor,
    positions: Tensor,
    logits: Tensor = LOGITS,
    *,
    observed: bool = False,
) -> Tensor:
    """Draw a token for each of `rows`, all from the same logits, on the device of the logits.

    Args:
        samplings: What the request in each state row asks for.
        rows: [num_draws], host. State row of each draw.
        positions: [num_draws] int64, host. Position of the token that each draws.
        logits: [vocab_size] float32.
        observed: Whether somebody wants to see the processed logits.

    Returns:
        [num_draws] int64, host.
    """
    trace = Observed() if observed else NullTrace()
    device = logits.device
    sampler = sampler_for(samplings, len(logits), trace, device)
    view = LogitsView(
        logit_rows=rows.int().to(device),
        positions=positions.to(device),
        rows_np=rows.int().numpy(),
    )
    many = logits.expand(len(rows), -1).clone()
    return sampler(many, view).token_ids.cpu()


def over_positions(sampling: Sampling, count: int = NUM_DRAWS, logits: Tensor = LOGITS) -> Tensor:
    """Draw at `count` positions of one request."""
    return drawn([sampling], torch.zeros(count).long(), torch.arange(count), logits)


def p_value(token_ids: Tensor, expected: Tensor) -> float:
    """Chi-square over the tokens that can be drawn; 0 where another was."""
    counts = torch.bincount(token_ids, minlength=len(expected))
    possible = expected > 0
    if int(counts[~possible].sum()):
        return 0.0
    wanted = expected[possible] * len(token_ids)
    few = wanted < 10
    pooled = (
        torch.cat((values[~few].double(), values[few].sum().double().unsqueeze(0)))
        for values in (counts[possible], wanted)
    )
    ours, theirs = (values[:-1] if not bool(few.any()) else values for values in pooled)
    return float(stats.chisquare(ours.numpy(), theirs.numpy(), sum_check=False).pvalue)


def missed(ours: Tensor, theirs: Tensor, count: int = NUM_DRAWS) -> float:
    """Probability that a chi-square against `theirs` passes draws from `ours`."""
    possible = theirs > 0
    distance = count * float(((ours - theirs)[possible] ** 2 / theirs[possible]).sum())
    freedom = int(possible.sum()) - 1
    return float(stats.ncx2.cdf(stats.chi2.isf(ALPHA, freedom), freedom, distance))
