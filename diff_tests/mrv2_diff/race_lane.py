"""One device stream that runs late, on a CPU: whatever is queued acts when a schedule lets it.

On a GPU the host queues work and goes on. On a CPU all work is done as it is queued, so a step that
forgets to wait, or to copy, gives the right values there all the same. `LateStream` takes
that away. While it is entered, each copy, each `TwinOp` and each other torch operation is put into
one queue and acts later, in the order in which it was queued, while the host already plans the next
steps. A `Schedule` says how late: an operation may be held back for some steps, or until the host
waits for an event behind it, which is the last moment that the order of a stream permits. What is
queued behind a held operation is held with it.

What it shows:

- a staging buffer that is written again before the device has read it;
- an output that is read before the copy to the host has happened: a tensor that nothing was
  written to yet holds `poison`;
- a copy, or a tensor, that reads live host memory, which has changed by the time it acts;
- host memory of an output that a later step writes again;
- a replayed step whose results are read before it has run, or after the next one has;
- a step that waits for the device, or needs a size that only the device knows (`HostSync`).

What it cannot show: two streams, since the runner has one; races between the programs of a kernel;
a wait inside the reference of an op, which stands for a kernel; memory that is freed while the
device still reads it, since what is queued keeps its tensors alive; what a capture bakes in, since
a replay here calls the captured work again (`mrv2_diff.played_graphs`). Results that do not change
here prove the order of the host's work, not the kernels.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, Protocol, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from mrv2 import Graph
from mrv2.batch.inputs import InputBatch
from mrv2.memory.transfers import Transfers, queue_copy
from mrv2.ops.twin import TwinOp
from mrv2.ports import AttentionPlanner, ForwardInputs, ForwardOutput
from mrv2_diff.models.hashlm import HashLM
from mrv2_diff.played_graphs import PlayedGraphMaker

Kind: TypeAlias = Literal["upload", "download", "op", "model", "graph", "torch"]
"""A copy to the device, a copy to the host, a `TwinOp`, a call of the model, the replay of a graph,
any other torch operation."""


class HostSync(AssertionError):
    """The host needed a value of the device although it was not waiting for an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """One operation in the queue."""

    number: int
    """Counts what was queued."""
    step: int
    """Step in which it was queued."""
    kind: Kind
    name: str
    """The op's name, or torch's."""
    run: Callable[[], object]


class Schedule(Protocol):
    """How late a stream runs."""

    def may_run(self, queued: Queued, step: int) -> bool:
        """Say whether the operation in front may act while the host is in `step`."""


class Prompt:
    """Nothing is late: as a CPU does it."""

    def may_run(self, queued: Queued, step: int) -> bool:
        """Return True."""
        return True


class LastMoment:
    """Nothing acts before the host waits for it."""

    def may_run(self, queued: Queued, step: int) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True, kw_only=True)
class HeldBack:
    """Some operations are late, and whatever stands behind them."""

    which: Callable[[Queued], bool]
    num_steps: int | None
    """Steps of the host that they are late; None until the host waits for them."""

    def may_run(self, queued: Queued, step: int) -> bool:
        """Say whether the operation is not one of them, or was held back long enough."""
        if not self.which(queued):
            return True
        return self.num_steps is not None and step >= queued.step + self.num_steps


class AtRandom:
    """Any operation may be late, by up to three steps.

    Args:
        seed: Of the schedule.
        probability: Of an operation being late.
    """

    def __init__(self, seed: int, probability: float = 0.02) -> None:
        self._random = Random(seed)
        self._probability = probability
        self._number = -1
        self._delay = 0

    def may_run(self, queued: Queued, step: int) -> bool:
        """Throw a coin for each operation, once."""
        if queued.number != self._number:
            self._number = queued.number
            late = self._random.random() < self._probability
            self._delay = self._random.randint(1, 3) if late else 0
        return step >= queued.step + self._delay


class LateEvent:
    """A point in a late stream; see `mrv2.memory.transfers.Event`."""

    def __init__(self, stream: "LateStream", number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        """Say whether everything before it has acted."""
        return self._stream.num_done >= self._number

    def synchronize(self) -> None:
        """Let everything before it act."""
        self._stream.run_to(self._number)


_IMMEDIATE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
_SIZED_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEXING = ("aten::index", "aten::index_put_", "aten::index_put")


class LateStream(TorchDispatchMode):
    """The queue; entered as a context, in which torch queues instead of acting.

    Args:
        schedule: How late it runs.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_done = 0
        self.counts: Counter[tuple[Kind, str]] = Counter()
        """What was queued, by kind and name."""
        self.most_behind = 0
        """The longest that the queue ever was."""
        self._schedule = schedule
        self._queue: deque[Queued] = deque()
        self._num_queued = 0
        self._step = 0
        self._acting = False
        self._shapes: dict[object, Any] = {}

    def __enter__(self) -> "LateStream":
        """Queue from here on."""
        call = TwinOp.__call__

        def queue_op(op: TwinOp[...], *args: Any, **kwargs: Any) -> None:
            if self._acting:
                call(op, *args, **kwargs)
            else:
                self.queue("op", op.name, lambda: call(op, *args, **kwargs))

        self._op_patch = patch.object(TwinOp, "__call__", queue_op)
        self._op_patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Act at once from here on; what is queued stays queued."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._op_patch.stop()

    def queue(self, kind: Kind, name: str, run: Callable[[], object]) -> None:
        """Queue one operation, and let the device advance as far as the schedule permits.

        What an operation that acts queues is a part of it, and acts with it.
        """
        if self._acting:
            run()
            return
        self.counts[kind, name] += 1
        self._queue.append(
            Queued(number=self._num_queued, step=self._step, kind=kind, name=name, run=run)
        )
        self._num_queued += 1
        self._advance()
        self.most_behind = max(self.most_behind, len(self._queue))

    def copy(self, kind: Kind, destination: Tensor, source: Tensor) -> None:
        """Queue a copy that reads `source` when it acts."""
        self.queue(kind, "copy", lambda: queue_copy(destination, source))

    def record(self) -> LateEvent:
        """Return an event behind everything queued so far."""
        return LateEvent(self, self._num_queued)

    def begin_step(self) -> None:
        """Note that the host is in its next step."""
        self._step += 1
        self._advance()

    def run_to(self, number: int) -> None:
        """Let everything act that was queued before operation `number`, whatever the schedule."""
        while self.num_done < number:
            self._act()

    def drain(self) -> None:
        """Let everything act that is queued."""
        self.run_to(self._num_queued)

    def settle(self) -> None:
        """Let everything act, and count anew from here."""
        self.drain()
        self.counts.clear()
        self.most_behind = 0

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Be the device: what is done in this context acts at once."""
        before, self._acting = self._acting, True
        try:
            yield
        finally:
            self._acting = before

    def _advance(self) -> None:
        while self._queue and self._schedule.may_run(self._queue[0], self._step):
            self._act()

    def _act(self) -> None:
        queued = self._queue.popleft()
        with self.acting():
            queued.run()
        self.num_done += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Queue one of torch's operations and return the tensors that it will fill."""
        kwargs = kwargs or {}
        schema = func._schema
        tensors = [value for value in _flat((*args, *kwargs.values())) if _is_tensor(value)]
        if self._acting:
            return func(*args, **kwargs)
        _refuse_wait(func, args, kwargs)
        if not tensors or schema.name in _IMMEDIATE or _is_view(schema):
            made = func(*args, **kwargs)
            return poison(made) if schema.name in _IMMEDIATE else made
        if schema.is_mutable:
            self.queue("torch", schema.name, lambda: func(*args, **kwargs))
            return _written(schema, args, kwargs)
        outputs = self._unfilled(func, args, kwargs)
        self.queue("torch", schema.name, lambda: _fill(outputs, func(*args, **kwargs)))
        return outputs

    def _unfilled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return tensors of the shapes that an operation's results will have, full of poison."""
        if func._schema.name == "aten::repeat_interleave":
            return poison(torch.empty(kwargs["output_size"], dtype=torch.int64))
        key = (func, _signature(args), _signature(tuple(sorted(kwargs.items()))))
        if key not in self._shapes:
            on_meta = tree_map_only(Tensor, _on_meta, (args, {**kwargs}))
            if "device" in kwargs:
                on_meta[1]["device"] = "meta"
            self._shapes[key] = func(*on_meta[0], **on_meta[1])
        return tree_map_only(
            Tensor,
            lambda like: poison(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)),
            self._shapes[key],
        )


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor with what no step computes, and return it: NaN, or integers below zero."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(-77)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _is_view(schema: Any) -> bool:
    return any(ret.alias_info and not ret.alias_info.is_write for ret in schema.returns)


def _refuse_wait(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise for what would make the host wait on a GPU."""
    name = func._schema.name
    if name in _INDEXING:
        waits = any(_is_tensor(v) and v.dtype in (torch.bool, torch.uint8) for v in _flat(args[1]))
    elif name == "aten::repeat_interleave":
        waits = kwargs.get("output_size") is None
    else:
        waits = any(tag in func.tags for tag in _SIZED_BY_VALUES)
    if waits:
        raise HostSync(f"{name} needs values of the device while a step is queued")


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an operation returns once it has written them."""
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    written = [
        given[argument.name]
        for argument in schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    ]
    if len(schema.returns) not in (0, len(written)):
        raise TypeError(
            f"{schema.name} writes some of its results and makes others; a late stream knows "
            "operations that do one or the other: use such a one in a step"
        )
    return written[0] if len(schema.returns) == 1 else tuple(written) or None


def _fill(outputs: Any, values: Any) -> None:
    for output, value in zip(_flat((outputs,)), _flat((values,)), strict=True):
        output.copy_(value)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _signature(values: object) -> object:
    """Return what the shapes of an operation's results depend on."""
    if isinstance(values, Tensor):
        return values.shape, values.stride(), values.dtype
    if isinstance(values, list | tuple):
        return tuple(_signature(value) for value in values)
    return type(values), values


class LateTransfers(Transfers):
    """Copies that a late stream carries, with its events.

    Args:
        stream: Carries them.
    """

    def __init__(self, stream: LateStream) -> None:
        super().__init__(torch.device("cpu"), self._upload, stream.record)
        self._stream = stream
        self._kind: Kind = "upload"

    def begin_step(self) -> None:
        """Move to a free staging buffer, in the host's next step."""
        super().begin_step()
        self._stream.begin_step()

    def download(self, values: Tensor) -> Tensor:
        """Queue a copy to the host, under its own kind."""
        self._kind = "download"
        try:
            return super().download(values)
        finally:
            self._kind = "upload"

    def _upload(self, destination: Tensor, source: Tensor) -> None:
        self._stream.copy(self._kind, destination, source)


class LateModel(AttentionPlanner):
    """A model whose calls are queued whole: three operations a step in place of a hundred.

    Args:
        model: Does the work when it is due.
        stream: Carries the calls.
    """

    def __init__(self, model: HashLM, stream: LateStream) -> None:
        self._model, self._stream = model, stream

    def plan(self, batch: InputBatch) -> "LatePlan":
        """Return what `forward` needs to plan when it acts: the device's lengths are late, too."""
        return LatePlan(batch)

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Queue the attention metadata and the forward; return the hidden states to come."""
        late = inputs.attention
        assert late is None or isinstance(late, LatePlan)
        hidden = torch.empty((len(inputs.input_ids), 1), dtype=torch.int64)

        def run() -> None:
            attention = None if late is None else self._model.plan(late.batch)
            output = self._model.forward(replace(inputs, attention=attention))
            hidden.copy_(output.hidden)

        self._stream.queue("model", "forward", run)
        return ForwardOutput(hidden=hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Queue the logits; return those to come."""
        logits = torch.empty((len(hidden), self._model.vocab_size), dtype=torch.float32)
        self._stream.queue(
            "model", "logits", lambda: logits.copy_(self._model.compute_logits(hidden))
        )
        return logits


@dataclass(frozen=True, slots=True)
class LatePlan:
    """Attention metadata that is made when the forward acts."""

    batch: InputBatch


@dataclass(frozen=True, slots=True)
class LateGraph:
    """A graph whose replay is one operation of a late stream."""

    name: str
    graph: Graph
    stream: LateStream

    def replay(self) -> None:
        """Queue the replay: whatever the graph writes, the ring of results too, it writes then."""
        self.stream.queue("graph", self.name, self.graph.replay)


class LateGraphMaker:
    """Captures as a prompt device would, and replays late.

    Args:
        stream: Carries the replays.
    """

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._maker = PlayedGraphMaker()

    def capture(self, name: str, work: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
        """Let the device catch up, then run the work once and remember it."""
        self._stream.drain()
        with self._stream.acting():
            graph, results = self._maker.capture(name, work)
        return LateGraph(name, graph, self._stream), results

    def release(self) -> None:
        """Mark every graph as gone."""
        self._maker.release()
