"""What a mutant is, and how a fault is put into a runner from outside.

The runner has no switch for any of this: a fault replaces a function, a method or one half of an op
for as long as it is applied.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from mrv2.ops.twin import TwinOp
from mrv2_diff.verdict import Verdict

Patch = Callable[[], AbstractContextManager[object]]
Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault."""

    id: str
    kind: str
    """What kind of fault it is, such as `block tables`."""
    title: str
    case: str
    """Case that must find it."""
    first: str | None
    """First value of the chain that must differ; None where the verdict alone tells."""
    apply: Patch
    """Makes a context in which the runner has the fault."""
    verdict: Verdict = Verdict.WRONG_VALUE


def after(op: "TwinOp[...]", fault: Callable[[Arguments], None]) -> AbstractContextManager[object]:
    """Let a fault change an op's arguments after its reference has run; CPU runs the reference."""
    reference = op.reference

    def faulty(*args: Any, **kwargs: Any) -> None:
        reference(*args, **kwargs)
        fault(dict(zip(op.parameters, args, strict=False)) | kwargs)

    return patch.object(op, "reference", faulty)


def before(op: "TwinOp[...]", fault: Callable[[Arguments], None]) -> AbstractContextManager[object]:
    """Let a fault change what an op's reference is given."""
    reference = op.reference

    def faulty(*args: Any, **kwargs: Any) -> None:
        arguments = dict(zip(op.parameters, args, strict=False)) | kwargs
        fault(arguments)
        reference(**arguments)

    return patch.object(op, "reference", faulty)


@contextmanager
def changed(
    owner: Any, name: str, fault: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Put what a fault makes of a function or a method in its place."""
    with patch.object(owner, name, fault(getattr(owner, name))):
        yield


def of_a_neighbour(op: "TwinOp[...]") -> AbstractContextManager[object]:
    """Let an op read the rows of its batch in reverse."""

    def swap(arguments: Arguments) -> None:
        arguments["logit_rows"] = arguments["logit_rows"].flip(0)

    return before(op, swap)


def by_batch_position(op: "TwinOp[...]") -> AbstractContextManager[object]:
    """Let an op take the place in the batch for the row."""

    def by_position(arguments: Arguments) -> None:
        rows = arguments["logit_rows"]
        arguments["logit_rows"] = rows.new_tensor(range(len(rows)))

    return before(op, by_position)


def late_by(op: "TwinOp[...]", num_tokens: int) -> AbstractContextManager[object]:
    """Let an op see so many tokens less than there are; a negative number sees more."""

    def late(arguments: Arguments) -> None:
        arguments["positions"] = arguments["positions"] - num_tokens

    return before(op, late)
