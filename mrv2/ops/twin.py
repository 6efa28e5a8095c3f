"""An operation with two halves that claim to be equal: a torch reference and a Triton kernel.

The reference is the contract and the CPU implementation; the kernel is a claim about it. Which half
runs depends only on the device of the arguments and on whether this process interprets Triton, both
fixed at start. Every `TwinOp` registers itself, so a test can walk all of them and fail on one that
has no samples.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Generic, ParamSpec

from mrv2.ops.launch import Launch

P = ParamSpec("P")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Read once, at import, as Triton does: it reads the variable when a kernel is decorated."""

_REGISTRY: dict[str, "TwinOp[...]"] = {}


class TwinOp(Generic[P]):
    """A reference and a kernel with the same parameters.

    Args:
        name: Dotted, `<package>.<op>`; samples are keyed by it.
        reference: Torch code that states the contract.
        launch: Builds the kernel's `Launch` from the same arguments.
        mutates: Names of the arguments that the op writes; all others must be left as they were.

    Raises:
        TypeError: The two parameter lists differ, or `mutates` names a parameter that is not there.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[P, None],
        launch: Callable[P, Launch],
        mutates: frozenset[str],
    ) -> None:
        ours, theirs = _parameters(reference), _parameters(launch)
        if ours != theirs:
            raise TypeError(f"{name}: the reference takes {ours}, the launcher takes {theirs}")
        unknown = mutates - set(ours)
        if unknown or not mutates:
            raise TypeError(f"{name}: mutates {sorted(mutates)} must name some of {ours}")
        if name in _REGISTRY:
            raise TypeError(f"{name} is registered twice")
        self.name = name
        self.reference = reference
        self.launch = launch
        self.mutates = mutates
        self.parameters = ours
        _REGISTRY[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run the kernel on a GPU or under the interpreter, the reference otherwise.

        The first argument is a tensor; it tells the device of all of them.
        """
        first = args[0] if args else next(iter(kwargs.values()))
        if INTERPRETED or first.is_cuda:  # type: ignore[attr-defined]
            self.launch(*args, **kwargs).run()
        else:
            self.reference(*args, **kwargs)


def registered_ops() -> Iterator["TwinOp[...]"]:
    """Yield every op that was defined by the modules imported so far, in order of definition."""
    yield from _REGISTRY.values()


def _parameters(function: Callable[..., object]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
