"""The reader of vLLM's source, on small sources, and what touching a name without work does."""

from typing import Any

import pytest

from mrv2.errors import UnsupportedByRunner
from mrv2_compat.vllm_v1 import surface
from mrv2_compat.vllm_v1.surface_scan import scan_source


def touched(body: str) -> dict[str, str]:
    """Return the names that a source touches, each with its kind."""
    source = "# model_runner\n" + body
    return {name: access.kind for name, access in scan_source(source, "x.py")}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def f(worker): return worker.model_runner.a", {"a": "load"}),
        ("def f(worker): worker.model_runner.a()", {"a": "call"}),
        ("def f(worker): worker.model_runner.a = 1", {"a": "store"}),
        ("def f(worker): worker.model_runner.a += 1", {"a": "store"}),
        ("def f(worker):\n  r = worker.model_runner\n  s = r\n  s.a()", {"a": "call"}),
        ("def f(w):\n  s = r\n  r = w.model_runner\n  s.a()", {"a": "call"}),
        ("def f(w):\n  r: object = w.model_runner\n  r.a()", {"a": "call"}),
        ("def f(w):\n  if (r := w.model_runner) is not None: r.a()", {"a": "call"}),
        ("def f(w):\n  cast('R', w.model_runner).a()", {"a": "call"}),
        ("def f(w):\n  typing.cast(R, w.model_runner).a()", {"a": "call"}),
        ("def f(w):\n  r = w.model_runner if w else None\n  r.a()", {"a": "call"}),
        ("def f(w):\n  getattr(w, 'model_runner', None).a()", {"a": "call"}),
        ("def f(w): getattr(w.model_runner, 'a', None)", {"a": "getattr"}),
        ("def f(w): hasattr(w.model_runner, 'a')", {"a": "hasattr"}),
        ("def f(w): setattr(w.model_runner, 'a', 1)", {"a": "setattr"}),
        ("def f(w, n): setattr(w.model_runner, n, 1)", {surface.DYNAMIC: "setattr"}),
        ("def f(r: 'GPUModelRunner'): r.a()", {"a": "call"}),
        ("def f(r: GPUModelRunner | None): r.a()", {"a": "call"}),
        ("def f(runner): runner.a()", {"a": "call"}),
        ("def f(r: ModelRunnerOutput): r.a()", {}),
        ("def f(runner: CliRunner): runner.a()", {}),
        ("def f(x): x.a()", {}),
        ("def f(w):\n  r = w.model_runner\n  def g(): r.a()", {"a": "call"}),
        ("def f(w):\n  r = w.model_runner\n  return lambda: r.a", {"a": "load"}),
        ("async def f(w): w.model_runner.a()", {"a": "call"}),
        ("def f(w): w.model_runner.model.config", {"model": "load"}),
        (
            "class C:\n"
            "  def __init__(self, model_runner): self.r = model_runner\n"
            "  def f(self): self.r.a()\n"
            "class D:\n"
            "  def f(self): self.r.b()",
            {"a": "call"},
        ),
        ("def f(w):\n  r = w.model_runner\ndef g(r): r.a()", {}),
    ],
)
def test_what_counts_as_touching_a_runner(body: str, expected: dict[str, str]) -> None:
    assert touched(body) == expected


def test_a_file_that_never_speaks_of_runners_is_skipped() -> None:
    assert list(scan_source("def f(runner): runner.a()", "x.py")) == []


class Facade:
    def __getattr__(self, name: str) -> object:
        return surface.answer(self, name)


def test_a_no_op_takes_whatever_it_is_given_and_returns_what_its_entry_says() -> None:
    facade: Any = Facade()
    assert facade.take_draft_token_ids() is None
    assert facade.maybe_remove_all_loras(None) is None
    assert facade.get_encoder_timing_stats() == {}
    assert facade.get_encoder_timing_stats() is not facade.get_encoder_timing_stats()
    assert facade.eplb_state is None
    assert facade.is_pooling_model is False


def test_a_no_op_is_there_for_whoever_probes_for_it() -> None:
    facade: Any = Facade()
    assert hasattr(facade, "reset_mm_cache")
    assert callable(getattr(facade, "get_draft_model", None))
    assert getattr(facade, "eep_eplb_suppressed", True) is False


def test_an_attribute_without_work_may_be_set_and_then_holds_what_was_set() -> None:
    facade: Any = Facade()
    facade.eep_eplb_suppressed = True
    assert facade.eep_eplb_suppressed is True
    assert Facade().eep_eplb_suppressed is False


def test_touching_a_refused_name_says_why() -> None:
    with pytest.raises(UnsupportedByRunner, match="add_lora: LoRA is not supported"):
        Facade().add_lora(object())  # type: ignore[operator]


def test_probing_a_refused_name_finds_it_absent() -> None:
    facade = Facade()
    assert not hasattr(facade, "add_lora")
    assert getattr(facade, "speculator", None) is None


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Facade' object has no attribute 'nonsense'") as info:
        _ = Facade().nonsense
    assert not isinstance(info.value, UnsupportedByRunner)


def test_faults_name_what_is_absent_and_what_should_be() -> None:
    faults = surface.faults_of(Facade(), lambda _, name: name in ("execute_model", "pool"))
    assert "pool is refused and present" in faults
    assert "sample_tokens is served and absent" in faults
    assert not any(fault.startswith("execute_model ") for fault in faults)


def test_unknown_names_are_a_to_do_list() -> None:
    assert surface.unknown_names(["execute_model", "zzz", surface.DYNAMIC, "aaa"]) == ["aaa", "zzz"]
