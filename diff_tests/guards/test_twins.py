"""Every Triton kernel of `mrv2` is one half of a registered TwinOp.

A kernel is reached when the launcher of an op, or another reached kernel, names it. Kernels are
found in the source, so one that nothing imports is found too.
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path

import mrv2
from mrv2.ops.twin import registered_ops

PACKAGE = Path(mrv2.__file__).parent


def import_all() -> None:
    """Import every module of the runner, so that each op has registered itself."""
    for module in pkgutil.walk_packages(mrv2.__path__, "mrv2."):
        importlib.import_module(module.name)


def kernel_bodies(source: str) -> dict[str, ast.FunctionDef]:
    """Functions decorated with `triton.jit`, bare or called, by name."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(text.split("(")[0] in ("triton.jit", "jit") for text in decorators):
                found[node.name] = node
    return found


def names_in(function: Callable[..., object]) -> set[str]:
    """Global and attribute names that a function's code mentions."""
    return set(inspect.unwrap(function).__code__.co_names)


def unreached(kernels: Mapping[str, ast.FunctionDef], launched: set[str]) -> set[str]:
    """Kernels that neither a launcher nor a reached kernel names."""
    reached = {name for name in kernels if name in launched}
    fresh = set(reached)
    while fresh:
        called = set()
        for name in fresh:
            nodes = ast.walk(kernels[name])
            called |= {node.id for node in nodes if isinstance(node, ast.Name)}
        fresh = (called & set(kernels)) - reached
        reached |= fresh
    return set(kernels) - reached


def test_every_kernel_is_reached_from_an_op() -> None:
    import_all()
    kernels: dict[str, ast.FunctionDef] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        here = kernel_bodies(path.read_text())
        twice = set(here) & set(kernels)
        assert not twice, f"{path}: a second kernel named {sorted(twice)}"
        kernels |= here
    assert kernels, "no kernel was found: the guard looks in the wrong place"
    launched = set().union(*(names_in(op.launch) for op in registered_ops()))
    missing = unreached(kernels, launched)
    assert not missing, f"kernels without a TwinOp: {sorted(missing)}"


def test_a_kernel_without_an_op_is_seen() -> None:
    source = """
@triton.jit
def _helper(x): return x
@triton.jit
def _used_kernel(x): _helper(x)
@triton.jit(do_not_specialize=["n"])
def _lonely_kernel(n): pass
def plain(): pass
"""
    kernels = kernel_bodies(source)
    assert set(kernels) == {"_helper", "_used_kernel", "_lonely_kernel"}
    assert unreached(kernels, {"_used_kernel"}) == {"_lonely_kernel"}
