"""Engines on a CUDA device, ours against V1's: tokens, logprobs, and no wait for the device.

Each runs in a process of its own, eagerly or with CUDA graphs, with async scheduling, prefix
caching, and a KV cache so small that requests are preempted. Where the environment variable `OUT`
names a folder, the figures are written there.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrv2_diff.drivers.compare import Agreement, agreement
from mrv2_diff.drivers.one_engine import OURS, Job, Outcome, Watch, run_job
from mrv2_diff.environment import collect
from mrv2_diff.models import ModelSpec, cached_model
from mrv2_diff.record import Agreement as ValueAgreement
from mrv2_diff.record import Record, append
from mrv2_diff.verdict import Verdict

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]

V1 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
NUM_REQUESTS = 64
VOCABULARY = range(4, 244)
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "seed": 0,
    "max_model_len": 512,
    "max_num_seqs": NUM_REQUESTS,
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "num_gpu_blocks_override": 400,
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
}
KINDS = {
    "bfloat16-FLASH_ATTN": {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN"},
    "bfloat16-TRITON_ATTN": {"dtype": "bfloat16", "attention_backend": "TRITON_ATTN"},
    "float32-TRITON_ATTN": {"dtype": "float32", "attention_backend": "TRITON_ATTN"},
}
_SIZES = [1, 2, 4, 8, 16, 24, 40]
"""Of graphs. Larger batches run eagerly, others are padded."""
_FLASH = KINDS["bfloat16-FLASH_ATTN"]
GRAPHS: dict[str, dict[str, Any]] = {
    "bfloat16-FLASH_ATTN-FULL_DECODE_ONLY": {**_FLASH, "mode": 0},
    "bfloat16-FLASH_ATTN-FULL": {**_FLASH, "mode": 0},
    "float32-TRITON_ATTN-FULL_DECODE_ONLY": {**KINDS["float32-TRITON_ATTN"], "mode": 0},
    "bfloat16-FLASH_ATTN-PIECEWISE": {**_FLASH, "mode": 3},
    "bfloat16-FLASH_ATTN-FULL_AND_PIECEWISE": {**_FLASH, "mode": 3},
}
"""Engines with CUDA graphs; the mode is that of compilation."""
_MIXED_SIZES = [*_SIZES, 128, 256, 512]
"""Where steps with prompt tokens are padded, too."""
REFERENCES = {"bfloat16-FLASH_ATTN-FULL": "bfloat16-FLASH_ATTN-FULL_DECODE_ONLY"}
"""Which engine of V1's an engine of ours is held against, where it is not the one with the same
graphs. V1's decodes in FULL graphs differ from its own in every other mode; see the test of it."""
WHOLE = [kind for kind in GRAPHS if "FULL" in kind]
PIECES = [kind for kind in GRAPHS if "PIECEWISE" in kind]
PLAIN = "-plain"
"""Of our engine whose requests want no logprobs, so that the graph's own draw is the step's."""
BOUNDS = {"bfloat16": 0.15, "float32": 0.02}
"""Of a logprob's difference, and of the gap at which tokens may part. The logits reach 15, where
bfloat16 steps by 0.0625; Triton multiplies float32 in attention with 10 bits of fraction."""
MOST_DIVERGENCES = NUM_REQUESTS // 4
NO_WAIT = "no-wait-"
PARAMETERS = "parameters"
CHECKED_FROM = 12
"""Step from which nothing may wait: all prompts are in, and every kernel was compiled."""


def prompts() -> list[list[int]]:
    """Of 5 to 204 tokens; every other one starts with the same 64."""
    shared = [VOCABULARY[(7 * place) % 240] for place in range(64)]
    made = []
    for number in range(NUM_REQUESTS):
        own = [
            VOCABULARY[(number * 31 + place * place) % 240]
            for place in range(5 + (number * 37) % 200)
        ]
        made.append((shared + own)[:204] if number % 2 else own)
    return made


def parity_job(model: str, kind: str) -> Job:
    return Job(
        model=model,
        engine=engine_arguments(kind),
        prompts=prompts(),
        max_tokens=[40 + number % 61 for number in range(NUM_REQUESTS)],
        logprobs=[5] * NUM_REQUESTS,
    )


def engine_arguments(kind: str) -> dict[str, Any]:
    if kind in KINDS:
        return {**ENGINE, **KINDS[kind]}
    arguments = dict(GRAPHS[kind])
    compilation = {
        "mode": arguments.pop("mode"),
        "cudagraph_mode": kind.rpartition("-")[2],
        "cudagraph_capture_sizes": _SIZES if kind.endswith("DECODE_ONLY") else _MIXED_SIZES,
    }
    arguments |= {"enforce_eager": False, "compilation_config": compilation}
    return {**ENGINE, **arguments}


def dtype_of(kind: str) -> str:
    return str({**KINDS, **GRAPHS}[kind]["dtype"])


ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"logit_bias": {50: 3.5, 51: -100.0}},
    {"allowed_token_ids": [*range(40, 90)]},
    {"_bad_words_token_ids": [[60], [61, 62], [9, 20, 33]]},
    {"min_tokens": 30, "stop_token_ids": [*range(0, 300, 2)]},
    {"prompt_logprobs": 2},
)
"""What greedy requests ask for, by turns; their tokens are V1's."""
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"choice": ["river", "the quick fox", "over"]}, "ignore_eos": False},
    {"structured_outputs": {"regex": r"[a-f]{3}-[0-9]{4,9}\."}, "ignore_eos": False},
)
DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05, "seed": 7},
    {"temperature": 0.6, "top_p": 0.8, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_k": 5, "seed": 9},
)
"""What random requests ask for, by turns; nothing is compared but that no step waits for them."""


def parameters_job(model: str) -> Job:
    """Every deterministic parameter in one batch, grammars among them, with preemptions."""
    options = [
        GRAMMARS[number // 8 % 2] if number % 8 == 0 else ASKED[number % 8]
        for number in range(NUM_REQUESTS)
    ]
    return dataclasses.replace(
        parity_job(model, "float32-TRITON_ATTN"), options=options, tokenizer=True
    )


def no_wait_job(model: str, kind: str) -> Job:
    """Long steady decoding of a batch that asks for everything that vLLM does not wait for itself.

    A grammar is left out: the scheduler itself needs its tokens before the next step.
    """
    return Job(
        model=model,
        engine=engine_arguments(kind),
        prompts=[[VOCABULARY[number], 9, 20] for number in range(16)],
        max_tokens=[100] * 16,
        logprobs=[3 if number % 2 else None for number in range(16)],
        options=[(ASKED + DRAWN)[number % 12] for number in range(16)],
        check_syncs_from=CHECKED_FROM,
    )


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str], Outcome | RuntimeError]:
    """What the engines of the selected tests did, by kind and runner.

    All run at once, since only results count.
    """
    model = str(cached_model(ModelSpec()))
    jobs = {}
    for kind in {kind for item in request.session.items for kind in kinds_of(item)}:
        if kind.startswith(NO_WAIT):
            jobs[kind, "mrv2"] = no_wait_job(model, kind.removeprefix(NO_WAIT))
        elif kind.endswith(PLAIN):
            job = parity_job(model, kind.removesuffix(PLAIN))
            jobs[kind, "mrv2"] = dataclasses.replace(job, logprobs=[None] * NUM_REQUESTS)
        else:
            make = parameters_job if kind == PARAMETERS else partial(parity_job, kind=kind)
            jobs |= {(kind, runner): make(model) for runner in ("mrv2", "v1")}

    def run(key: tuple[str, str]) -> Outcome | RuntimeError:
        compiles = any(name in key[0] for name in PIECES)
        try:
            return run_job(jobs[key], key[1], {"TORCH_COMPILE_DISABLE": "0"} if compiles else {})
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return dict(zip(jobs, pool.map(run, jobs), strict=True))


def kinds_of(item: pytest.Item) -> list[str]:
    """Return the kinds of engine that a test looks at."""
    named = item.get_closest_marker("engines")
    kind = getattr(item, "callspec", SimpleNamespace(params={})).params.get("kind")
    return [*(named.args if named else ()), *([kind] if kind else ())]


def done(
    outcomes: dict[tuple[str, str], Outcome | RuntimeError], kind: str, runner: str
) -> Outcome:
    outcome = outcomes[kind, runner]
    if isinstance(outcome, RuntimeError):
        pytest.fail(str(outcome))
    return outcome


def write_figures(kind: str, found: Agreement, ours: Outcome, theirs: Outcome) -> None:
    """Add one comparison to `parity.json` in the folder that OUT names."""
    folder = os.environ.get("OUT")
    if folder is None:
        return
    path = Path(folder) / "parity.json"
    figures = json.loads(path.read_text()) if path.is_file() else {}
    sides = {
        side: {**dataclasses.asdict(outcome), "continuations": None}
        for side, outcome in (("ours", ours), ("theirs", theirs))
    }
    figures[kind] = {**dataclasses.asdict(found), **sides}
    path.write_text(json.dumps(figures, indent=1))


def keep_record(kind: str, found: Agreement, ours: Outcome) -> None:
    """Add one comparison that passed to `records.jsonl` in the folder that OUT names."""
    folder = os.environ.get("OUT")
    if folder is not None:
        append(Path(folder) / "records.jsonl", as_record(kind, found, ours))


def as_record(kind: str, found: Agreement, ours: Outcome) -> Record:
    """Return a comparison of two engines that passed as a record: tokens and logprobs."""
    parted = len(found.divergences)
    bound = BOUNDS[dtype_of(kind)]
    return Record(
        id=f"engine.{kind}",
        area="engine",
        feature="greedy",
        pair=("v1", "mrv2"),
        verdict=Verdict.NEAR_TIE if parted else Verdict.MATCH,
        summary=f"{found.num_tokens} tokens of {found.num_requests} requests; {parted} parted",
        modes=("free",),
        steps=ours.steps,
        request_steps=found.num_tokens,
        events={"arrivals": found.num_requests, "preemptions": ours.preemptions},
        agreements={
            "tokens": compared(found.num_tokens, parted, 0.0, "exact, or a near tie"),
            "logprobs": compared(
                found.num_logprobs, 0, found.largest_logprob_difference, f"at most {bound:g}"
            ),
        },
        noise_floor={},
        memory={},
        latency={},
        command=f"python -m pytest -m gpu diff_tests/gpu/test_engines.py -k {kind}",
        environment=collect("cuda", seed=0),
    )


def compared(count: int, differing: int, largest: float, policy: str) -> ValueAgreement:
    return ValueAgreement(
        compared=count,
        differing=differing,
        max_abs_diff=largest,
        required_tolerance=largest,
        policy=policy,
    )


@pytest.mark.parametrize("kind", [*KINDS, *GRAPHS])
def test_each_engine_is_what_it_should_be(outcomes: Any, kind: str) -> None:
    ours, theirs = done(outcomes, kind, "mrv2"), done(outcomes, kind, "v1")
    assert (ours.runner_class, theirs.runner_class) == (OURS, V1)
    for outcome in (ours, theirs):
        assert outcome.async_scheduling
        assert outcome.preemptions > 0
        assert outcome.attention == [{**KINDS, **GRAPHS}[kind]["attention_backend"]]
        assert outcome.graph_mode == ("NONE" if kind in KINDS else kind.rpartition("-")[2])
        assert sum(len(made.token_ids) for made in outcome.continuations) == sum(
            40 + number % 61 for number in range(NUM_REQUESTS)
        )
    modes = ours.steps_by_mode
    assert (modes["decode"] > 20) == (kind in WHOLE), modes
    assert (modes["forward"] > 20) == (kind in PIECES), modes
    assert (modes["mixed"] > 10) == kind.endswith("-FULL"), modes


@pytest.mark.parametrize("kind", [*KINDS, *GRAPHS])
def test_tokens_and_logprobs_are_v1s(outcomes: Any, kind: str) -> None:
    ours, theirs = done(outcomes, kind, "mrv2"), done(outcomes, REFERENCES.get(kind, kind), "v1")
    found = agreement(ours, theirs)
    write_figures(kind, found, ours, theirs)
    bound = BOUNDS[dtype_of(kind)]
    assert found.num_logprobs > 6 * 1000
    assert found.largest_logprob_difference <= bound
    parted = [each for each in found.divergences if each.gap is None or each.gap > bound]
    assert not parted, f"{len(parted)} of {len(found.divergences)} parted for good: {parted[:4]}"
    assert len(found.divergences) <= MOST_DIVERGENCES
    keep_record(kind, found, ours)


@pytest.mark.engines("bfloat16-FLASH_ATTN", *itertools.chain(*REFERENCES.items()))
def test_v1s_full_graphs_are_not_v1s_own_tokens(outcomes: Any) -> None:
    """Why REFERENCES names another engine: once V1's tokens agree in all modes, it can go."""
    for kind, reference in REFERENCES.items():
        eager = done(outcomes, "bfloat16-FLASH_ATTN", "v1")
        others = agreement(done(outcomes, reference, "v1"), eager)
        bound = BOUNDS[dtype_of(kind)]
        assert others.largest_logprob_difference <= bound
        found = agreement(done(outcomes, kind, "v1"), eager)
        assert found.largest_logprob_difference > 4 * bound


@pytest.mark.parametrize("kind", [kind + PLAIN for kind in WHOLE])
def test_what_graphs_draw_themselves_is_what_is_drawn_from_their_logits(
    outcomes: Any, kind: str
) -> None:
    """The same steps, once with the draw in the graph and once with logprobs, drawn after it."""
    plain, scored = done(outcomes, kind, "mrv2"), done(outcomes, kind.removesuffix(PLAIN), "mrv2")
    assert plain.steps_by_mode["decode"] > 20
    assert [made.token_ids for made in plain.continuations] == [
        made.token_ids for made in scored.continuations
    ]


@pytest.mark.engines(PARAMETERS)
def test_every_parameter_gives_v1s_tokens(outcomes: Any) -> None:
    ours, theirs = done(outcomes, PARAMETERS, "mrv2"), done(outcomes, PARAMETERS, "v1")
    assert (ours.runner_class, theirs.runner_class) == (OURS, V1)
    for outcome in (ours, theirs):
        assert outcome.async_scheduling
        assert outcome.preemptions > 0
    found = agreement(ours, theirs)
    write_figures(PARAMETERS, found, ours, theirs)
    bound = BOUNDS["float32"]
    assert found.largest_logprob_difference <= bound
    parted = [each for each in found.divergences if each.gap is None or each.gap > bound]
    assert not parted, f"{len(parted)} of {len(found.divergences)} parted for good: {parted[:4]}"
    assert len(found.divergences) <= MOST_DIVERGENCES
    lengths = {len(made.token_ids) for made in ours.continuations}
    assert len(lengths) > 30, "grammars and stop tokens end requests at lengths of their own"


@pytest.mark.parametrize(
    "kind",
    [NO_WAIT + kind for kind in ("bfloat16-FLASH_ATTN", "bfloat16-FLASH_ATTN-FULL_DECODE_ONLY")],
)
def test_nothing_waits_for_the_device_in_a_steady_step(outcomes: Any, kind: str) -> None:
    outcome = done(outcomes, kind, "mrv2")
    assert outcome.runner_class == OURS
    assert outcome.async_scheduling
    assert outcome.steps_checked > 60


def test_a_wait_would_be_seen() -> None:
    import torch

    def waiting(*_: object) -> float:
        return float(torch.ones(1, device="cuda").sum())

    runner = SimpleNamespace(execute_model=waiting, sample_tokens=waiting)
    watch = Watch(runner, check_syncs_from=1)
    step = SimpleNamespace(total_num_scheduled_tokens=1, preempted_req_ids=None)
    with pytest.raises(RuntimeError, match="synchronizing"):
        runner.execute_model(step)
    with pytest.raises(RuntimeError, match="synchronizing"):
        runner.sample_tokens(None)
    assert watch.steps_checked == 1
