"""What the environment of a process must say before torch and vLLM are imported in it.

Both read it when they are imported, so this comes first; it imports neither.
"""

import os
import warnings

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # V1-mode scheduling, which both runners speak
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the harness must reach the worker
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # a case names its requests
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it draws without the processed logits
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "TORCH_COMPILE_DISABLE": "1",  # else V1 compiles for 20 s at its first logprob
    "KINETO_LOG_LEVEL": "99",  # torch's profiler prints two lines at each start
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM warns of its NUMA binding at each start
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set before vLLM is imported, where the user did not set it."""
_REQUIRED = (
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
)
"""Without these there is no lockstep; they are set whatever the user set."""


def prepare() -> None:
    """Set the environment for a lockstep run in this process."""
    # The lockstep worker holds both runners; nothing else may choose one.
    os.environ.pop("MRV2_RUNNER", None)
    for name, value in ENVIRONMENT.items():
        if name in _REQUIRED:
            os.environ[name] = value
        os.environ.setdefault(name, value)
    # vLLM walks over all of torch's names once, and one of them is deprecated.
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated")
