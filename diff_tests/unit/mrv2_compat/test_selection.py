"""MRV2_RUNNER: every value, every contradiction, and what `auto` decides. No vLLM is imported."""

from importlib.metadata import EntryPoint

import pytest

from mrv2.errors import ConfigError
from mrv2_compat import selection as sel
from mrv2_compat.entry_points import PLUGINS_VAR, RUNNER_VAR

ADDED = {
    "fractions": EntryPoint(name="fractions", value="fractions:Fraction", group=sel.CHOICES_GROUP)
}


def test_unset_selects_nothing() -> None:
    assert sel.read_selection({}, ADDED) is None


@pytest.mark.parametrize("name", ["v1", "mrv2", "auto"])
def test_built_in_values(name: str) -> None:
    selection = sel.read_selection({RUNNER_VAR: name}, {})
    assert selection is not None
    assert selection.name == name
    assert selection.load_choice is None


def test_added_value_loads_its_object() -> None:
    selection = sel.read_selection({RUNNER_VAR: "fractions"}, ADDED)
    assert selection is not None
    assert selection.load_choice is not None
    assert getattr(selection.load_choice(), "__name__", None) == "Fraction"


@pytest.mark.parametrize("value", ["", "V1", "mrv3", "vllm", " mrv2"])
def test_unknown_value_lists_every_known_one(value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sel.read_selection({RUNNER_VAR: value}, ADDED)
    text = str(raised.value)
    assert repr(value) in text
    assert "v1, mrv2, auto, fractions" in text


@pytest.mark.parametrize("name", ["auto", "vllm"])
def test_added_value_cannot_take_a_name_of_ours(name: str) -> None:
    point = EntryPoint(name=name, value="fractions:Fraction", group=sel.CHOICES_GROUP)
    with pytest.raises(ConfigError, match=name):
        sel.read_selection({}, {name: point})


@pytest.mark.parametrize("name", ["v1", "mrv2", "auto", "fractions"])
@pytest.mark.parametrize("flag", ["1", "true", "2"])
def test_asking_for_the_v2_runner_too_is_an_error(name: str, flag: str) -> None:
    environ = {RUNNER_VAR: name, sel.FLAG_VAR: flag}
    with pytest.raises(ConfigError) as raised:
        sel.prepare_flag(sel.read_selection(environ, ADDED), environ)
    assert f"{sel.FLAG_VAR}={flag!r}" in str(raised.value)
    assert f"{RUNNER_VAR}={name!r}" in str(raised.value)
    assert environ[sel.FLAG_VAR] == flag


@pytest.mark.parametrize("name", ["v1", "mrv2", "fractions"])
def test_v1_mode_is_set_and_noted(name: str) -> None:
    environ = {RUNNER_VAR: name}
    sel.prepare_flag(sel.read_selection(environ, ADDED), environ)
    assert environ[sel.FLAG_VAR] == "0"
    sel.release_flag(environ)
    assert environ == {RUNNER_VAR: name}


def test_the_users_own_flag_is_never_taken_back() -> None:
    environ = {RUNNER_VAR: "mrv2", sel.FLAG_VAR: "0"}
    sel.prepare_flag(sel.read_selection(environ, {}), environ)
    sel.release_flag(environ)
    assert environ[sel.FLAG_VAR] == "0"


def test_auto_starts_without_a_flag() -> None:
    environ = {RUNNER_VAR: "auto"}
    sel.prepare_flag(sel.read_selection(environ, {}), environ)
    assert sel.FLAG_VAR not in environ


def test_unset_takes_back_what_a_parent_process_set() -> None:
    environ = {sel.FLAG_VAR: "0", sel.FLAG_OWNER_VAR: "1"}
    sel.prepare_flag(None, environ)
    assert environ == {}
    environ = {sel.FLAG_VAR: "0"}
    sel.prepare_flag(None, environ)
    assert environ == {sel.FLAG_VAR: "0"}


@pytest.mark.parametrize(
    ("refusals", "obstacles", "runner"),
    [
        ([], [], "mrv2"),
        ([], ["x"], "mrv2"),
        (["LoRA"], [], "v1"),
        (["LoRA"], ["dspark"], "vllm"),
    ],
)
def test_auto_decides(refusals: list[str], obstacles: list[str], runner: str) -> None:
    decision = sel.decide_auto(refusals, obstacles)
    assert decision.runner == runner
    assert all(reason in decision.why for reason in refusals)
    assert runner != "vllm" or all(reason in decision.why for reason in obstacles)


def test_an_allow_list_without_us_is_reported_with_the_remedy() -> None:
    with pytest.raises(ConfigError) as raised:
        sel.require_entry_points({RUNNER_VAR: "mrv2", PLUGINS_VAR: "other"})
    text = str(raised.value)
    assert "vllm.general_plugins" in text
    assert "vllm.platform_plugins" in text
    assert "add 'mrv2' to VLLM_PLUGINS" in text
