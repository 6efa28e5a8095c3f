"""The rows of a runner, and all that has an entry a row: who comes, goes on, and leaves."""

from collections.abc import Sequence

from mrv2.errors import ExtensionError, Mrv2Error
from mrv2.plan import Arrival, StepPlan
from mrv2.state.block_tables import BlockTables
from mrv2.state.protocol import RowState
from mrv2.state.rows import RowTable


class Lifecycle:
    """Applies a plan's events to every row state. The only place where rows change on the host.

    Args:
        max_num_reqs: Rows that requests can have.
        block_tables: Takes the blocks of requests that go on.
        states: All row states in the order in which they are told, `block_tables` among them.
    """

    def __init__(
        self, max_num_reqs: int, block_tables: BlockTables, states: Sequence[RowState]
    ) -> None:
        self.rows = RowTable(max_num_reqs)
        self.states = tuple(states)
        self._block_tables = block_tables

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's events, which were checked.

        Raises:
            Mrv2Error: A state's own, about an arrival; what else it raises is told as an
                `ExtensionError`. No request of the plan has arrived or was given blocks then.
        """
        for req_id in plan.departed:
            self._leave(req_id)
        for number, arrival in enumerate(plan.arrivals):
            try:
                self._arrive(arrival)
            except Exception:
                for earlier in plan.arrivals[:number]:
                    self._leave(earlier.req_id)
                raise
        for continuation in plan.continuations:
            row = self.rows.row(continuation.req_id)
            self._block_tables.append(row, continuation.new_block_ids)

    def take_back(self, plan: StepPlan) -> None:
        """Undo what can be undone of a plan that was applied, at once and last.

        Requests that arrived have no row again, and blocks are as before. Who departed stays gone:
        a host that sends the plan once more names them again, and that is skipped.
        """
        for arrival in plan.arrivals:
            self._leave(arrival.req_id)
        for continuation in plan.continuations:
            row = self.rows.row(continuation.req_id)
            self._block_tables.take_back(row, continuation.new_block_ids)

    def flush(self) -> None:
        """Let every state stage what changed since the last step."""
        for state in self.states:
            state.flush()

    def _arrive(self, arrival: Arrival) -> None:
        row, told = self.rows.claim(arrival.req_id), list[RowState]()
        try:
            for state in self.states:
                state.admit(row, arrival)
                told.append(state)
        except Exception as fault:
            self.rows.release(arrival.req_id)
            for state in told:
                state.evict(row)
            if isinstance(fault, Mrv2Error):
                raise
            state = self.states[len(told)]
            raise ExtensionError(
                f"{type(state).__name__} raised {type(fault).__name__} when request "
                f"{arrival.req_id!r} arrived: {fault}"
            ) from fault

    def _leave(self, req_id: str) -> None:
        row = self.rows.release(req_id)
        if row is not None:
            for state in self.states:
                state.evict(row)
