"""An op refuses halves that disagree, and picks its half by device and interpreter alone."""

import pytest
import torch
from torch import Tensor

from mrv2.ops import twin
from mrv2.ops.launch import Launch
from mrv2.ops.twin import TwinOp, registered_ops


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the ops that are made here out of the real registry."""
    monkeypatch.setattr(twin, "_REGISTRY", {})
    monkeypatch.setattr(twin, "INTERPRETED", False)


class Kernel:
    """Stands for a Triton kernel: remembers its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> "Kernel":
        return self

    def __call__(self, *args: object, **constexprs: object) -> None:
        self.launches.append((*args, constexprs))


KERNEL = Kernel()


def reference(out: Tensor, value: int) -> None:
    """Fill `out`."""
    out.fill_(value)


def launch(out: Tensor, value: int) -> Launch:
    return Launch(KERNEL, (out.numel(),), (out, value), {"BLOCK": 8})


def swapped(value: int, out: Tensor) -> Launch:
    return launch(out, value)


def make(name: str = "test.fill", mutates: frozenset[str] = frozenset({"out"})) -> TwinOp[...]:
    return TwinOp(name, reference=reference, launch=launch, mutates=mutates)


def test_other_parameters_are_refused_and_both_lists_shown() -> None:
    with pytest.raises(TypeError, match=r"test\.fill.*'out', 'value'.*'value', 'out'"):
        TwinOp("test.fill", reference=reference, launch=swapped, mutates=frozenset({"out"}))
    assert not list(registered_ops())


@pytest.mark.parametrize("mutates", [frozenset[str](), frozenset({"outs"})])
def test_mutates_must_name_parameters(mutates: frozenset[str]) -> None:
    with pytest.raises(TypeError, match="must name some of"):
        make(mutates=mutates)


def test_a_name_is_registered_once() -> None:
    op = make()
    with pytest.raises(TypeError, match="registered twice"):
        make()
    assert list(registered_ops()) == [op]


def test_on_a_cpu_the_reference_runs() -> None:
    out, before = torch.zeros(3), len(KERNEL.launches)
    make()(out, 7)
    assert out.tolist() == [7, 7, 7]
    assert len(KERNEL.launches) == before


def test_under_the_interpreter_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "INTERPRETED", True)
    out = torch.zeros(3)
    make()(out, 7)
    assert out.tolist() == [0, 0, 0]
    number, options = KERNEL.launches[-1][1:]
    assert number == 7
    assert isinstance(options, dict)
    assert {"BLOCK": 8, "num_warps": 4}.items() <= options.items()


@pytest.mark.parametrize("by_name", [False, True])
def test_device_tensors_go_to_the_kernel(by_name: bool) -> None:
    class OnDevice(Tensor):
        """A tensor that says it is on a GPU."""

        is_cuda = True

    out = torch.zeros(3).as_subclass(OnDevice)
    before = len(KERNEL.launches)
    make()(out=out, value=7) if by_name else make()(out, 7)
    assert len(KERNEL.launches) == before + 1


def test_an_empty_grid_launches_nothing() -> None:
    before = len(KERNEL.launches)
    launch(torch.zeros(0), 1).run()
    assert len(KERNEL.launches) == before
