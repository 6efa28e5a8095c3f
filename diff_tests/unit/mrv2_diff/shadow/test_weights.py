"""Parameters that two processes share: moved once, seen by both, and only where they fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mrv2_diff.shadow import weights as shared


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    made: Any = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3), nn.Linear(3, 2, bias=False))
    made[2].weight.data = torch.randn(3, 2).t()  # in column order
    made.register_parameter("packed", nn.Parameter(torch.empty(0)))
    return made.requires_grad_(False)


def test_values_stay_and_memory_is_one() -> None:
    mine, theirs = model(0), model(1)
    before = {name: p.clone() for name, p in mine.named_parameters()}
    places = shared.share(mine)
    try:
        assert shared.adopt(theirs, places) == (4, 0)
    finally:
        shared.release(places)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.stride() == before[name].stride()
    mine[0].weight.data[2, 3] = 77.0  # as when weights are reloaded in place
    assert theirs[0].weight[2, 3] == 77.0
    assert places.path is not None
    assert not Path(places.path).exists()


def test_another_shape_is_refused() -> None:
    places = shared.share(model(0))
    try:
        other = model(0)
        other[1] = nn.Linear(5, 4)
        with pytest.raises(ValueError, match=r"1\.weight"):
            shared.adopt(other, places)
    finally:
        shared.release(places)


def test_without_room_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    mine = model(0)
    before = mine[0].weight.data_ptr()
    with pytest.raises(OSError, match="No space"):
        shared.share(mine)
    assert mine[0].weight.data_ptr() == before


def test_nothing_shared_leaves_a_module_its_own() -> None:
    assert shared.adopt(model(0), shared.SharedWeights()) == (0, 4)


def test_the_choice_and_the_desk_import_no_vllm() -> None:
    program = (
        "import sys\n"
        "import mrv2_diff.shadow.choice, mrv2_diff.shadow.desk, mrv2_diff.shadow.child\n"
        "sys.exit('vllm' in sys.modules)\n"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == 0
