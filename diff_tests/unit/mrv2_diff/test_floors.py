"""A kept floor is used in its own environment only, and never where its file cannot be trusted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrv2_diff.floors import Floor, floor_of, floors_folder, key_of, measuring_hash, model_hash

ENVIRONMENT = {"device": "Some CPU", "dtype": "float32", "vllm": "0.32.0", "model hash": "12"}
MEASURED = {"logits": 3.0, "logprobs": 0.5}


class Measure:
    """Counts how often it measures."""

    def __init__(self, spacings: dict[str, float] | None = None) -> None:
        self.spacings = MEASURED if spacings is None else spacings
        self.calls = 0

    def __call__(self) -> dict[str, float]:
        self.calls += 1
        return dict(self.spacings)


def _ask(folder: Path, measure: Measure, **changes: str) -> Floor:
    return floor_of(ENVIRONMENT | changes, measure, folder)


def test_a_second_run_does_not_measure_again(tmp_path: Path) -> None:
    measure = Measure()
    first, second = _ask(tmp_path, measure), _ask(tmp_path, measure)
    assert measure.calls == 1
    assert first.spacings == second.spacings == MEASURED
    assert (first.origin, second.origin) == (
        "measured in this run",
        f"kept, measured {first.measured}",
    )


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_any_change_of_the_environment_measures_anew(tmp_path: Path, name: str) -> None:
    measure = Measure()
    _ask(tmp_path, measure)
    assert not _ask(tmp_path, measure, **{name: "another"}).is_kept
    assert measure.calls == 2
    assert _ask(tmp_path, measure).is_kept


def test_the_order_of_an_environment_is_nothing() -> None:
    assert key_of(ENVIRONMENT) == key_of(dict(reversed(ENVIRONMENT.items())))


def _altered(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def alter(text: bytes) -> bytes:
        raw = json.loads(text)
        change(raw)
        return json.dumps(raw).encode()

    return alter


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: b"",
    "no json": lambda text: b"\x00\xff" + text,
    "a list": lambda text: b"[]",
    "another format": _altered(lambda raw: raw.update(format=99)),
    "a wider floor": _altered(lambda raw: raw["floor"]["spacings"].update(logits=64.0)),
    "another day": _altered(lambda raw: raw["floor"].update(measured="2020-01-01")),
    "no checksum": _altered(lambda raw: raw.pop("checksum")),
    "no floor": _altered(lambda raw: raw.pop("floor")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_measured_anew_and_this_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    measure = Measure()
    _ask(tmp_path, measure)
    (file,) = tmp_path.iterdir()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    again = _ask(tmp_path, measure)
    assert (measure.calls, again.is_kept, again.spacings) == (2, False, MEASURED)
    assert "measured anew" in caplog.text
    assert file.name in caplog.text
    assert _ask(tmp_path, measure).is_kept, "it was written whole again"


def test_the_file_of_another_environment_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measure = Measure()
    _ask(tmp_path, measure)
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / f"{key_of(ENVIRONMENT | {'dtype': 'bfloat16'})}.json")
    assert not _ask(tmp_path, measure, dtype="bfloat16").is_kept
    assert "of another environment" in caplog.text


def test_a_folder_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    measure = Measure()
    for _ in range(2):
        assert _ask(taken / "floors", measure).spacings == MEASURED
    assert measure.calls == 2
    assert "is not kept" in caplog.text


def test_a_floor_that_is_no_number_is_not_kept(tmp_path: Path) -> None:
    measure = Measure({"logits": float("inf")})
    _ask(tmp_path, measure)
    assert not list(tmp_path.iterdir())


def test_another_weight_is_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 8)
    (tmp_path / "README.md").write_text("nothing")
    before = model_hash(tmp_path)
    (tmp_path / "README.md").write_text("something")
    assert model_hash(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 7 + b"\x01")
    assert model_hash(tmp_path) != before


def test_another_way_to_measure_is_another_floor(tmp_path: Path) -> None:
    for name in ("noise.py", "judge.py", "compare/steps.py", "lockstep/worker.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = measuring_hash(tmp_path)
    (tmp_path / "compare/steps.py").write_text("changed")
    assert measuring_hash(tmp_path) != before
    assert measuring_hash() == measuring_hash()


def test_floors_lie_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert floors_folder() == tmp_path / "mrv2" / "floors"
