"""Graphs for a machine without CUDA: to replay is to call the captured work again.

What a real graph bakes in is kept as it is there: the work runs with the arguments of its capture,
over the same memory, and its results are where they were. So all that the host decides about graphs
can be tested on a CPU: sizes, padding, idle rows, what is done again after a replay.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mrv2 import CaptureError, Graph


@dataclass(eq=False)
class PlayedGraph:
    """Work that is called again at each replay."""

    name: str
    work: Callable[[], list[Tensor]]
    results: list[Tensor]
    num_replays: int = 0
    is_released: bool = False

    def replay(self) -> None:
        """Run the work and put its results where the first ones are."""
        if self.is_released:
            raise RuntimeError(f"{self.name} is replayed after its release")
        self.num_replays += 1
        for result, value in zip(self.results, self.work(), strict=True):
            result.copy_(value)


class PlayedGraphMaker:
    """Makes such graphs.

    Args:
        fails_at: Part of a name whose capture fails.
    """

    def __init__(self, fails_at: str | None = None) -> None:
        self.graphs: list[PlayedGraph] = []
        self._fails_at = fails_at

    def capture(self, name: str, work: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
        """Run the work once, and remember it."""
        results = [result.clone() for result in work()]
        if self._fails_at is not None and self._fails_at in name:
            raise CaptureError(f"{name} cannot be captured: this one was made to fail")
        graph = PlayedGraph(name, work, results)
        self.graphs.append(graph)
        return graph, results

    def release(self) -> None:
        """Mark every graph as gone."""
        for graph in self.graphs:
            graph.is_released = True
