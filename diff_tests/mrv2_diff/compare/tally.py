"""Running totals of how two runners agree, by kind of value, and the first place where they do not.

Integers must be equal. Floats are judged in *spacings*: the distance between neighbouring float32
numbers at the size of the largest logit of the row. That is the unit in which rounding happens, so
one bound holds for rows of any size. A value that is NaN on one side only is as wrong as can be.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mrv2_diff.record import Agreement
from mrv2_diff.verdict import Divergence, Neighbour

CHAIN = (
    "plan",
    "layout",
    "input_ids",
    "positions",
    "seq_lens",
    "slots",
    "logits",
    "processed_logits",
    "right_values",
    "tokens",
    "logprobs",
    "ranks",
    "output",
    "ledger",
)
"""The compared values, in the order in which a step makes them. Hidden states by layer, where they
are asked for, come before the logits."""

BLOCKS = "block_tables"
"""Blocks that attention reads. Compared behind the slots, on a CPU."""
HIDDEN = "hidden_states"
"""Name of a layer's hidden states is this, a dot, and the number of the layer."""
_AROUND = 3
"""Values on each side of a divergence that are kept with it."""

Array = npt.NDArray[np.generic]
FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class Total:
    """One kind of value over all steps."""

    policy: str
    compared: int = 0
    differing: int = 0
    max_abs_diff: float = 0.0
    required: float = 0.0
    """Smallest bound, in the policy's unit, under which nothing would differ."""

    def agreement(self) -> Agreement:
        """Return the totals as a record keeps them."""
        return Agreement(
            compared=self.compared,
            differing=self.differing,
            max_abs_diff=self.max_abs_diff,
            required_tolerance=self.required,
            policy=self.policy,
        )


@dataclass(slots=True)
class Place:
    """Where in a run a comparison stands."""

    mode: str
    step: int


@dataclass(slots=True)
class Tally:
    """Totals by kind of value, and the first divergence.

    Args: bounds: Largest difference allowed, in spacings, for the float values. None measures and
        allows anything.
    """

    bounds: dict[str, float] | None
    totals: dict[str, Total] = field(default_factory=dict)
    first: Divergence | None = None
    near_ties: int = 0
    """Greedy tokens that differ where the reference's two logits lie within the bound."""
    not_finite: int = 0
    """Logits of the reference that are NaN or infinite before any processing."""
    stopped: bool = False
    """A near tie in a free pass.

    The runners now see different tokens, and nothing more can be compared in it.
    """
    departed: int = 0
    """Rows in which the reference was shown to be wrong where its case expects it."""
    step_logit_diff: float = 0.0
    """Largest difference of a logit, in spacings, in the step that was compared last."""

    def exact(
        self, value: str, place: Place, owners: list[str], reference: Array, candidate: Array
    ) -> None:
        """Compare integers.

        Args:
            value: Kind of value.
            place: Mode and step.
            owners: Request of each row.
            reference: [num_rows, ...].
            candidate: Same shape; another shape differs as a whole.
        """
        if not reference.size and reference.shape == candidate.shape:
            return
        total = self.totals.setdefault(value, Total("exact"))
        if reference.shape != candidate.shape:
            self._shape(total, value, place, reference, candidate)
            return
        total.compared += reference.size
        if np.array_equal(reference, candidate):
            return
        wrong = reference != candidate
        difference = np.abs(reference.astype(np.float64) - candidate.astype(np.float64))
        total.max_abs_diff = max(total.max_abs_diff, float(difference.max()))
        total.required = max(total.required, total.max_abs_diff)
        total.differing += int(wrong.sum())
        self._diverge(value, place, owners, wrong, reference, candidate, "exact")

    def close(
        self,
        value: str,
        place: Place,
        owners: list[str],
        reference: FloatArray,
        candidate: FloatArray,
        scale: FloatArray,
    ) -> None:
        """Compare floats in spacings.

        Args:
            value: Kind of value.
            place: Mode and step.
            owners: Request of each row.
            reference: [num_rows, num_columns].
            candidate: Same shape.
            scale: [num_rows], size of each row's largest logit, at which a spacing is measured; or
                [num_rows, num_columns], a size for each value.
        """
        bound = self.bound(value)
        policy = (
            "measured only"
            if bound is None
            else f"at most {bound:g} spacings of float32 at the row's largest logit"
        )
        total = self.totals.setdefault(value, Total(policy))
        if reference.shape != candidate.shape:
            self._shape(total, value, place, reference, candidate)
            return
        total.compared += reference.size
        if value == "logits":
            self.step_logit_diff = 0.0
        if np.array_equal(reference, candidate):
            return
        difference = _difference(reference, candidate)
        sizes = scale if scale.ndim == 2 else scale[:, None]
        spacings = difference / np.spacing(sizes.astype(np.float32)).astype(np.float64)
        largest = float(difference.max())
        total.max_abs_diff = max(total.max_abs_diff, largest)
        total.required = max(total.required, float(spacings.max()))
        if value == "logits":
            self.step_logit_diff = float(spacings.max())
        if bound is None:
            return
        wrong = spacings > bound
        total.differing += int(wrong.sum())
        if wrong.any():
            self._diverge(value, place, owners, wrong, reference, candidate, policy)

    def structure(
        self,
        value: str,
        place: Place,
        compared: int,
        differences: list[str],
        policy: str = "equal structure",
    ) -> None:
        """Count a comparison of structured values and the differences that it found."""
        total = self.totals.setdefault(value, Total("equal structure"))
        total.compared += compared
        total.differing += len(differences)
        if differences and self.first is None:
            self.first = Divergence(
                mode=place.mode,
                step=place.step,
                value=value,
                req_id="",
                index=0,
                reference="",
                candidate=differences[0],
                policy=policy,
            )

    def missing(self, place: Place, what: str) -> None:
        """Note something that only one side has."""
        self.structure("output", place, 0, [what], policy="present")

    def bound(self, value: str) -> float | None:
        """Return the largest difference allowed, in spacings; None allows any."""
        return None if self.bounds is None else self.bounds[value]

    def _shape(
        self, total: Total, value: str, place: Place, reference: Array, candidate: Array
    ) -> None:
        total.compared += reference.size
        total.differing += max(reference.size, candidate.size, 1)
        if self.first is None:
            self.first = Divergence(
                mode=place.mode,
                step=place.step,
                value=value,
                req_id="",
                index=0,
                reference=f"shape {reference.shape}",
                candidate=f"shape {candidate.shape}",
                policy="same shape",
            )

    def _diverge(
        self,
        value: str,
        place: Place,
        owners: list[str],
        wrong: npt.NDArray[np.bool_],
        reference: Array,
        candidate: Array,
        policy: str,
    ) -> None:
        if self.first is not None:
            return
        index = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        first_row = owners.index(owners[index[0]])
        self.first = Divergence(
            mode=place.mode,
            step=place.step,
            value=value,
            req_id=owners[index[0]],
            index=index[0] - first_row if len(index) == 1 else index[-1],
            reference=str(reference[index]),
            candidate=str(candidate[index]),
            policy=policy,
            around=_around(index, owners, reference, candidate),
        )


def _around(
    index: tuple[int, ...], owners: list[str], reference: Array, candidate: Array
) -> tuple[Neighbour, ...]:
    """Return the values around one: of its row, or of its request where each row is one value."""
    if len(index) == 1:
        owner = owners[index[0]]
        rows = [row for row, name in enumerate(owners) if name == owner]
        reference, candidate, place = reference[rows], candidate[rows], rows.index(index[0])
    else:
        reference, candidate, place = reference[index[:-1]], candidate[index[:-1]], index[-1]
    return tuple(
        Neighbour(index=at, reference=str(reference[at]), candidate=str(candidate[at]))
        for at in range(max(0, place - _AROUND), min(len(reference), place + _AROUND + 1))
    )


def _difference(reference: FloatArray, candidate: FloatArray) -> FloatArray:
    """Return absolute differences.

    Equal infinities and a NaN on both sides differ by 0, a NaN on one by infinity.
    """
    with np.errstate(invalid="ignore"):
        difference = np.abs(reference.astype(np.float64) - candidate.astype(np.float64))
    same = (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
    return np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
