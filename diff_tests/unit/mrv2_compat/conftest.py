"""Configurations built by the installed vLLM, many cases in one process of their own.

What is tested depends on environment variables that vLLM reads while it is imported, so it cannot
run in the test's process; and importing vLLM takes seconds, so it does not run once for each case.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff.drivers.variables import clean_environment

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

PROGRAM = """
import json, os, sys

def build(model, engine):
    from vllm.engine.arg_utils import EngineArgs
    fixed = dict(skip_tokenizer_init=True, max_model_len=256, enforce_eager=True)
    return EngineArgs(model=model, **{**fixed, **engine}).create_engine_config()

def ask(request):
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    engine_input = {"type": request.pop("type", "token"), "prompt_token_ids": [1]}
    current_platform.validate_request(engine_input, SamplingParams(**request))

in_use = []

def outcome(case):
    for name, value in case["environ"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        if case["register"]:
            from mrv2_compat.plugin import register
            register()
        config = build(case["model"], case["engine"])
        if case["request"] is not None:
            ask(dict(case["request"]))
        if case["keep"]:
            in_use.append(config)
        return {
            "worker": config.parallel_config.worker_cls,
            "uses_v2": config.use_v2_model_runner,
            "flag": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
        }
    except Exception as error:
        return {"error": str(error), "types": [kind.__name__ for kind in type(error).__mro__]}

for case in json.load(sys.stdin):
    print("OUTCOME " + json.dumps([case["name"], outcome(case)]), flush=True)
if "vllm.v1.worker.cpu_worker" in sys.modules:
    print("A WORKER WAS IMPORTED")
"""


@dataclass(frozen=True)
class Outcomes:
    """What became of each case, and what vLLM logged."""

    by_case: dict[str, dict[str, Any]]
    log: str

    def error(self, name: str) -> str:
        """Return the error of a case that had to fail."""
        assert "error" in self.by_case[name], f"{name} did not fail: {self.by_case[name]}"
        return str(self.by_case[name]["error"])


def case(
    name: str,
    *,
    environ: dict[str, str | None] | None = None,
    engine: dict[str, Any] | None = None,
    request: dict[str, Any] | None = None,
    register: bool = False,
    keep: bool = False,
) -> dict[str, Any]:
    """Describe one configuration, with changes to the environment that stay for later cases.

    Args:
        name: Key of the outcome.
        environ: Variables to set, or to remove where the value is None.
        engine: Arguments of vLLM's EngineArgs.
        request: Arguments of SamplingParams, and the engine input's `type`, to be validated.
        register: Whether to call the plugin's `register` again, which vLLM does once a process.
        keep: Whether the configuration stays in use, as an engine's does, during later cases.
    """
    return {
        "name": name,
        "environ": environ or {},
        "engine": engine or {},
        "request": request,
        "register": register,
        "keep": keep,
    }


RunCases = Callable[[list[dict[str, Any]], dict[str, str]], Outcomes]


@pytest.fixture(scope="session")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> RunCases:
    """Return a function that builds the configurations of some cases in one new process."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))

    def run(cases: list[dict[str, Any]], environ: dict[str, str]) -> Outcomes:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps([{**entry, "model": str(model)} for entry in cases]),
            env={**clean_environment(os.environ), **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        marker = "OUTCOME "
        lines = [line for line in done.stdout.splitlines() if line.startswith(marker)]
        assert len(lines) == len(cases), f"{done.stdout}\n{done.stderr}"
        by_case = dict(json.loads(line.removeprefix(marker)) for line in lines)
        return Outcomes(by_case, done.stdout + done.stderr)

    return run


@pytest.fixture(scope="session")
def make_case() -> Callable[..., dict[str, Any]]:
    """Return `case`, which test modules cannot import from here."""
    return case


@pytest.fixture(scope="session")
def split_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a path entry with a distribution that names our two entry points differently.

    Only so can vLLM's allow-list hide one of them: the project's own names are the same.
    """
    folder = tmp_path_factory.mktemp("split")
    info = folder / "mrv2_split-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mrv2-split\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmrv2_general = mrv2_compat.plugin:register\n"
        "[vllm.platform_plugins]\nmrv2_platform = mrv2_compat.plugin:platform\n"
    )
    return folder


@pytest.fixture(scope="session")
def added_choice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a path entry with a distribution that adds `probe` to the values of MRV2_RUNNER."""
    folder = tmp_path_factory.mktemp("added")
    info = folder / "probe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[mrv2.runner_choices]\nprobe = probe:Choice\n")
    (folder / "probe.py").write_text(
        "class Choice:\n"
        "    @staticmethod\n"
        "    def worker_class(platform):\n"
        "        return f'probe.{platform}.Worker'\n"
    )
    return folder
