"""A made-up trace is read as what it is: overlaps once, calls by name, kernels by class."""

from typing import Any

import pytest

from mrv2_diff.device_bench.trace import kind_of, read_profile, union_us


def event(cat: str, name: str, ts: float = 0, dur: float = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


TWO_STEPS = [
    event("kernel", "nvjet_tst_64x8_gemm", 100, 50),
    event("kernel", "_gumbel_sample_kernel", 140, 30),  # 10 of it beside the gemm
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 160, 20),  # 10 of it beside the draw
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 90, 4),
    event("kernel", "nvjet_tst_64x8_gemm", 300, 50),
    event("kernel", "_gumbel_sample_kernel", 350, 30),
    event("kernel", "void flash::prepare_varlen_num_blocks_kernel", 380, 6),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 290, 4),
    event("gpu_memset", "Memset (Device)", 299, 1),
    event("cuda_runtime", "cudaGraphLaunch", 80, 5),
    event("cuda_runtime", "cudaGraphLaunch", 280, 5),
    event("cuda_runtime", "cudaMemcpyAsync", 70, 5),
    event("cuda_driver", "cuLaunchKernelEx", 86, 2),
    event("cuda_runtime", "cudaDeviceSynchronize", 500, 9),
    event("cuda_runtime", "cudaDeviceSynchronize", 510, 9),
    event("cpu_op", "aten::add", 0, 1000),
    {"ph": "i", "cat": "kernel", "name": "no interval", "ts": 1},
    {"ph": "M", "name": "process_name"},
]


def test_what_overlaps_counts_once() -> None:
    assert union_us([(0, 10), (5, 10), (20, 5), (21, 1), (25, 5)]) == 25
    assert union_us([(5, 10), (0, 30), (29, 2)]) == 31
    assert union_us([]) == 0


def test_the_steps_share_the_busy_time() -> None:
    assert read_profile(TWO_STEPS, 2).busy_us == (80 + 4 + 86 + 4 + 1) / 2


def test_calls_are_counted_by_name_less_our_own() -> None:
    profile = read_profile(TWO_STEPS, 2)
    assert profile.calls == {"cudaGraphLaunch": 1, "cudaMemcpyAsync": 0.5, "cuLaunchKernelEx": 0.5}
    assert profile.num_calls == 2


def test_a_step_that_waits_for_the_device_is_not_hidden() -> None:
    waits = [event("cuda_runtime", "cudaDeviceSynchronize", 600 + n, 1) for n in range(4)]
    assert read_profile(TWO_STEPS + waits, 2).calls["cudaDeviceSynchronize"] == 2


def test_kernels_are_summed_by_class() -> None:
    profile = read_profile(TWO_STEPS, 2)
    assert profile.outside_us == 30
    assert profile.plan_us == 3
    assert profile.copy_us == (20 + 4 + 4 + 1) / 2
    assert (profile.uploads, profile.downloads) == (1, 0.5)
    gemm = profile.kernels[0]
    assert (gemm.name, gemm.kind, gemm.runs, gemm.microseconds) == (
        "nvjet_tst_64x8_gemm", "model", 1, 50,
    )  # fmt: skip


def test_a_trace_without_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        read_profile([event("cuda_runtime", "cudaGraphLaunch")], 2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "model"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "model"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "model"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>", "model"),
        ("void vllm::reshape_and_cache_flash_kernel", "model"),
        ("void cublasLt::splitKreduce_kernel", "model"),
        ("flash::prepare_varlen_num_blocks_kernel", "attention plan"),
        ("_topk_log_softmax_kernel", "outside"),
        ("_gather_block_tables_kernel", "outside"),
        ("_compute_slot_mappings_kernel", "outside"),
        ("void at::native::elementwise_kernel<128, 4>", "outside"),
        ("_penalties_kernel", "outside"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps>", "outside"),
    ],
)
def test_a_kernel_is_classed_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind
