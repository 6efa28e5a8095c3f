"""The lifecycle that every piece of per-request state takes part in."""

from typing import Protocol

from mrv2.plan import Arrival


class RowState(Protocol):
    """State with one entry a row.

    The runner, and for its own parts the sampler, calls these for every state, in a fixed order, on
    the host. Within a step come first all evictions, then all admissions, then what continues, and
    last one `flush`. Behind the last state's `flush` the runner queues at once what all of them
    staged in its arena. Nothing but these flushes queues device work.
    """

    def admit(self, row: int, arrival: Arrival) -> None:
        """Fill `row` for a request that has just claimed it.

        Nothing of the row's last owner may remain visible.
        """

    def evict(self, row: int) -> None:
        """Forget the request in `row`."""

    def flush(self) -> None:
        """Stage what the host changed in this step, or queue it if it is not in the arena."""
