"""Capture of queued work as a CUDA graph, and its replay, with torch's own means.

All graphs share one memory pool. They are captured from the largest to the smallest and never run
side by side, so each may use what the ones before it used. That holds for their results, too:
`capture` hands them out as aliases, which do not keep their memory from the next capture. So a
result is valid from a replay to the next replay of any graph, in the order of the stream.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from mrv2.errors import CaptureError

_WARMUPS = 2
"""Runs before a capture. What a first run allocates, compiles or measures may not be captured."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue the work again on the current stream, over the same memory."""


class GraphMaker(Protocol):
    """Turns work into a graph."""

    def capture(self, name: str, work: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
        """Capture what a call queues.

        Args:
            name: For messages.
            work: Queues the work and returns its results. It is called several times, and must
                leave all state as it was.

        Returns:
            The graph, and where its results are after each replay.

        Raises:
            CaptureError: The work does something that cannot be captured, or memory runs out.
        """

    def release(self) -> None:
        """Give back the memory of every graph made so far. None may be replayed after this."""


class CudaGraphMaker:
    """Makes CUDA graphs that share one memory pool.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, name: str, work: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
        """Warm the work up on a side stream, and capture it; see `GraphMaker`."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None or self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            # One for all: torch keeps the memory of each stream apart.
            self._stream = torch.cuda.Stream(self._device)
        stream = self._stream
        try:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(_WARMUPS):
                    work()
            torch.cuda.current_stream(self._device).wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                results = work()
        except Exception as fault:
            graph.reset()
            raise CaptureError(
                f"{name} cannot be captured as a CUDA graph: {type(fault).__name__}: {fault}"
            ) from fault
        self._graphs.append(graph)
        return graph, [_alias(result) for result in results]

    def release(self) -> None:
        """Reset every graph; the pool goes back to torch's allocator with them."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = self._stream = None


class _Memory:
    """Names memory to torch by its address, without owning it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not keep it allocated."""
    ends = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (sum(ends) + 1) * tensor.itemsize
    memory = torch.as_tensor(_Memory(tensor.data_ptr(), num_bytes), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
