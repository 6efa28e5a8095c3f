"""What a case and its engine are on one device or the other."""

import dataclasses

import pytest

from mrv2_diff.case import CAPTURE_SIZES, DEVICES, GRAPHS, Case, EngineSpec
from mrv2_diff.catalog import CASES
from mrv2_diff.models.spec import ModelSpec

SPEC = EngineSpec(model=ModelSpec())


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_steps_come_one_at_a_time_and_eagerly(device: str) -> None:
    arguments = SPEC.arguments(device)
    assert arguments["async_scheduling"] is False
    assert arguments["enforce_eager"] is True
    assert "compilation_config" not in arguments


def test_a_cpu_chooses_its_own_attention_and_memory() -> None:
    assert SPEC.arguments() == SPEC.arguments("cpu", "none")
    assert not {"attention_backend", "gpu_memory_utilization"} & set(SPEC.arguments())


@pytest.mark.parametrize(
    ("dtype", "backend"), [("float32", "TRITON_ATTN"), ("bfloat16", "FLASH_ATTN")]
)
def test_on_cuda_the_dtype_decides_on_attention(dtype: str, backend: str) -> None:
    arguments = dataclasses.replace(SPEC, dtype=dtype).arguments("cuda")
    assert arguments["attention_backend"] == backend
    assert arguments["gpu_memory_utilization"] < 0.2


def test_graphs_are_of_whole_decodes_of_few_sizes() -> None:
    assert GRAPHS == ("none", "FULL_DECODE_ONLY")
    arguments = SPEC.arguments("cuda", "FULL_DECODE_ONLY")
    assert arguments["enforce_eager"] is False
    assert arguments["cudagraph_metrics"] is True
    assert arguments["compilation_config"] == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(CAPTURE_SIZES),
    }


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_fault_of_v1_on_some_devices_says_why_not_on_others(case: Case) -> None:
    for fault in (case.departure, case.apart):
        if fault is not None:
            assert fault.on
            assert fault.on <= DEVICES
            assert bool(fault.elsewhere) == (fault.on != DEVICES)


def test_a_case_of_all_devices_is_the_same_on_each() -> None:
    for name in ("lifecycle.greedy", "sampling.ties_of_top_p", "sampling.thinking_detours"):
        assert all(CASES[name].on(device) is CASES[name] for device in DEVICES)


@pytest.mark.parametrize("name", ["sampling.seeded_chunks", "sampling.beside_drafts"])
def test_what_v1_does_wrong_on_a_cpu_alone_runs_in_lockstep_on_cuda(name: str) -> None:
    case = CASES[name]
    assert case.on("cpu") is case
    there = case.on("cuda")
    assert there.apart is None
    assert there.remark.startswith("in lockstep, since on cuda ")
    assert (there.workload, there.engine) == (case.workload, case.engine)


def test_what_v1s_kernel_does_otherwise_is_not_expected_on_a_cpu() -> None:
    case = CASES["sampling.ties"]
    assert case.on("cuda") is case
    assert case.departure is not None
    here = case.on("cpu")
    assert here.departure is None
    assert here.remark == f"on cpu {case.departure.elsewhere}"


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("lifecycle.greedy", DEVICES),
        ("sampling.ties", {"cpu"}),
        ("sampling.seeded_chunks", {"cuda"}),
        ("sampling.ties_of_top_p", set()),
    ],
)
def test_v1_is_compared_with_itself_where_it_does_nothing_wrong(
    name: str, devices: set[str]
) -> None:
    assert {device for device in DEVICES if CASES[name].on(device).against_itself} == devices
