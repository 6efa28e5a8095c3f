"""The installed vLLM is the one that `mrv2_compat` was written for.

Each test recomputes from vLLM what a table or an override of ours claims about it, so that a new
vLLM yields a list of things to do, by name and place, and not a failure in production.
"""

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from mrv2.errors import UnsupportedByRunner
from mrv2_compat.vllm_v1 import surface, versions
from mrv2_compat.vllm_v1.requests import refusals
from mrv2_compat.vllm_v1.surface import SURFACE, Status
from mrv2_compat.vllm_v1.surface_scan import EXCLUDED, Access, scan_vllm

pytestmark = pytest.mark.vllm

ONLY_FROM_0_33 = {"dp_rank", "eplb", "max_model_len", "num_speculative_steps", "speculative_config"}


@pytest.fixture(scope="module")
def vllm_root() -> Path:
    import vllm

    return Path(vllm.__file__).parent


@pytest.fixture(scope="module")
def touched(vllm_root: Path) -> dict[str, tuple[Access, ...]]:
    return scan_vllm(vllm_root)


@pytest.fixture(scope="module")
def facade() -> Any:
    """Return the facade as it is before a model is loaded."""
    import torch

    from mrv2_compat.vllm_v1.runner import VllmRunner

    return VllmRunner(MagicMock(), torch.device("cpu"))


def test_every_name_that_vllm_touches_has_an_entry(touched: dict[str, tuple[Access, ...]]) -> None:
    unknown = surface.unknown_names(touched)
    todo = [f"{name}: {', '.join(map(str, touched[name]))}" for name in unknown]
    assert not todo, "add these names to surface.py and to the facade:\n" + "\n".join(todo)


def test_every_entry_is_a_name_that_vllm_touches(touched: dict[str, tuple[Access, ...]]) -> None:
    gone = set(SURFACE) - set(touched)
    assert gone <= ONLY_FROM_0_33, "vLLM no longer touches these names: remove them"


def test_the_scan_finds_what_is_known_to_be_there(touched: dict[str, tuple[Access, ...]]) -> None:
    kinds = {name: {access.kind for access in places} for name, places in touched.items()}
    assert len(touched) >= 60
    assert "call" in kinds["execute_model"]
    assert "getattr" in kinds["get_draft_model"]
    assert "hasattr" in kinds["_init_kv_zero_meta"]
    assert "store" in kinds["execute_model_state"]
    assert kinds[surface.DYNAMIC] == {"setattr"}


def test_the_one_computed_name_is_where_it_was(touched: dict[str, tuple[Access, ...]]) -> None:
    assert [access.path for access in touched[surface.DYNAMIC]] == ["v1/worker/gpu_worker.py"]


def test_excluded_files_are_there(vllm_root: Path) -> None:
    absent = [name for name in EXCLUDED if not (vllm_root / name).exists()]
    assert not absent


def test_the_facade_has_what_is_served_and_lacks_what_is_refused(facade: Any) -> None:
    assert surface.faults_of(facade) == []


@pytest.mark.parametrize("name", surface.names(Status.NO_OP))
def test_the_table_alone_answers_for_what_has_nothing_to_do(facade: Any, name: str) -> None:
    assert name not in vars(facade)
    assert not hasattr(type(facade), name)
    assert getattr(facade, name) is SURFACE[name].returns


@pytest.mark.parametrize("name", surface.names(Status.REFUSED))
def test_touching_a_refused_name_on_the_facade_gives_the_reason(facade: Any, name: str) -> None:
    with pytest.raises(UnsupportedByRunner) as raised:
        getattr(facade, name)
    assert f"{name}: {SURFACE[name].reason}" in str(raised.value)


def test_called_names_are_callable_on_the_facade(
    facade: Any, touched: dict[str, tuple[Access, ...]]
) -> None:
    wrong = [
        name
        for name in surface.names(Status.SERVED, Status.NO_OP)
        if any(access.kind == "call" for access in touched.get(name, ()))
        and not callable(getattr(facade, name))
    ]
    assert not wrong


def test_every_sampling_parameter_has_one_place() -> None:
    from vllm import SamplingParams

    places = [refusals.SERVED_BY_RUNNER, refusals.SCHEDULER_OR_FRONTEND, refusals.REFUSED]
    fields = set(SamplingParams.__struct_fields__)
    assert fields - set().union(*places) == set(), "say in refusals.py what becomes of these"
    assert set().union(*places) - fields == set(), "vLLM no longer has these"
    assert sum(map(len, places)) == len(fields), "a parameter is in two places"


def test_whatever_a_models_generation_config_sets_is_served() -> None:
    # vLLM fills in these for every request that leaves them out: none may be refused.
    from vllm.config import ModelConfig

    source = inspect.getsource(ModelConfig.get_diff_sampling_param)
    listed = re.search(r"available_params = \[(.*?)\]", source, re.DOTALL)
    assert listed is not None
    names = set(re.findall(r'"(\w+)"', listed[1]))
    assert {"temperature", "top_k", "max_new_tokens"} <= names
    assert names - {"max_new_tokens"} <= refusals.SERVED_BY_RUNNER


def test_default_sampling_parameters_are_served() -> None:
    from vllm import SamplingParams

    assert refusals.request_refusals(SamplingParams()) == []


def test_every_section_of_the_configuration_is_looked_at_or_needs_no_look() -> None:
    from vllm.config import VllmConfig

    sections = {section.name for section in dataclasses.fields(VllmConfig)}
    ruled = {rule.path.partition(".")[0] for rule in refusals.CONFIG_RULES}
    assert sections - ruled - set(refusals.SECTIONS_WITHOUT_RULES) == set()
    assert not ruled & set(refusals.SECTIONS_WITHOUT_RULES)
    assert ruled <= sections


def test_every_rule_looks_at_something_that_exists() -> None:
    import vllm.config

    sections = {section.name: section for section in dataclasses.fields(vllm.config.VllmConfig)}
    for rule in refusals.CONFIG_RULES:
        section, *names = rule.path.split(".")
        owner: Any = getattr(vllm.config, _class_name(str(sections[section].type)))
        for name in names:
            members = {field.name: field.type for field in dataclasses.fields(owner)}
            assert name in members or _has_member(owner, name), rule.path
            owner = members.get(name, owner)


def _class_name(annotation: str) -> str:
    return annotation.replace("<class '", "").partition(" ")[0].strip("'>").rpartition(".")[2]


def _has_member(owner: type, name: str) -> bool:
    """Return whether a class has a property, or binds an attribute while it is made."""
    return hasattr(owner, name) or f"self.{name} = " in inspect.getsource(owner)


def test_environment_variables_are_ones_that_vllm_reads() -> None:
    import vllm.envs

    assert set(refusals.ENVIRONMENT_FLAGS) <= set(vllm.envs.environment_variables)


def test_attention_backends_and_cache_kinds_exist() -> None:
    from vllm.v1 import kv_cache_interface
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert set(refusals.ATTENTION_BACKENDS) <= set(AttentionBackendEnum.__members__)
    assert all(hasattr(kv_cache_interface, name) for name in refusals.KV_CACHE_SPECS)


def test_the_hooks_that_our_platforms_override_are_called_where_we_think(vllm_root: Path) -> None:
    source = (vllm_root / "config" / "vllm.py").read_text()
    places = [
        source.index("current_platform.apply_config_platform_defaults(self)"),
        source.index("current_platform.check_and_update_config(self)"),
        source.index("self._validate_v1_model_runner()"),
    ]
    assert places == sorted(places)
    assert "def _get_v1_model_runner_unsupported_features(self) -> list[str]:" in source
    requests = (vllm_root / "v1" / "engine" / "input_processor.py").read_text()
    assert "current_platform.validate_request(engine_input, params)" in requests


def test_the_workers_build_their_runner_where_we_think(vllm_root: Path) -> None:
    workers = vllm_root / "v1" / "worker"
    cuda = _method(workers / "gpu_worker.py", "Worker", "_make_model_runner")
    assert [argument.arg for argument in cuda.args.args] == ["self"]
    cpu = ast.unparse(_method(workers / "cpu_worker.py", "CPUWorker", "init_device"))
    assert "self.model_runner = CPUModelRunner(self.vllm_config" in cpu
    # Nothing after the construction: replacing the runner afterwards leaves nothing undone.
    assert cpu.rstrip().splitlines()[-1].lstrip().startswith("self.model_runner = ")


def _method(path: Path, class_name: str, name: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == name:
                    return method
    raise AssertionError(f"{path.name} has no {class_name}.{name}")


def test_the_installed_version_is_in_the_range() -> None:
    assert versions.version_refusals(versions.installed_vllm()) == []
