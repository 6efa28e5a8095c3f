"""Every case, by id. One module for each area."""

from mrv2_diff.case import Case
from mrv2_diff.catalog import (
    attention,
    faults_of_v1,
    lifecycle,
    logprobs,
    sampling,
    sampling_edges,
    sampling_pairs,
    sampling_single,
    structured,
)

_ALL = (
    *lifecycle.CASES,
    *sampling.CASES,
    *sampling_single.CASES,
    *sampling_pairs.CASES,
    *sampling_edges.CASES,
    *structured.CASES,
    *faults_of_v1.CASES,
    *logprobs.CASES,
    *attention.CASES,
)

CASES: dict[str, Case] = {case.id: case for case in _ALL}
"""Cases in the order in which a full run takes them."""

if len(CASES) != len(_ALL):
    raise ValueError(f"two cases share an id: {sorted(case.id for case in _ALL)}")
