"""What custom logits processors do in a step, and the batch that they are shown.

Such a processor keeps its own state of a dense batch and is told what changed: who was removed, who
was added at which index, who moved. The runner has permanent rows and no such batch, so one is kept
here: the requests that draw in a step, in the order of their logits. From one step's batch to the
next's the changes follow; a request that does not draw is removed and added again later, as it is
in V1 where it is not scheduled.

An added request comes with the list of its outputs, which grows: it holds every output before the
token that is being drawn. Under async scheduling the last one is still on its way when the next
step is queued, so a step with custom processors waits for it, and no other step does.

A processor is somebody's code. If it raises, the requests that it fails for are found by running a
new instance of it for each of them alone, which the protocol allows: it must be able to start at
any output. They finish with an error, the processor is built again for the others, and these go on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    AdapterLogitsProcessor,
    LogitsProcessor,
    build_logitsprocs,
)

from mrv2 import (
    Arrival,
    BatchLayout,
    LogitsStage,
    LogitsView,
    PendingOutput,
    ProtocolError,
    StageFactory,
    StageResources,
    Step,
    StepExtension,
    StepPlan,
)
from mrv2_compat.vllm_v1.features.custom_processors import NAME
from mrv2_compat.vllm_v1.features.dense_batch import Member, batch_update

logger = init_logger(f"vllm.{__name__}")  # a child of vLLM's: no other has a handler


@dataclass(slots=True, kw_only=True)
class _Processor:
    """A processor and the batch that it was told of."""

    make: Callable[[], LogitsProcessor]
    instance: LogitsProcessor
    batch: list[Member] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{type(self.instance).__module__}.{type(self.instance).__qualname__}"


class CustomProcessors(StepExtension):
    """All custom processors of an engine, and the requests of the step that they act on.

    As an extension of the core they learn which request is in which row, and what each step
    commits; as stages they rewrite logits. An arrival's extra is the request's SamplingParams.

    Args:
        processors: New instances, in the order in which they act.
        make: Makes another instance of a processor's class.
    """

    name = NAME
    takes_extras = True

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        make: Callable[[type[LogitsProcessor]], LogitsProcessor],
    ) -> None:
        self._reshaping: list[_Processor] = []
        self._narrowing: list[_Processor] = []
        for instance in processors:
            group = self._narrowing if instance.is_argmax_invariant() else self._reshaping
            group.append(_Processor(make=_maker(make, type(instance)), instance=instance))
        self._members: dict[int, Member] = {}
        self._step: list[Member] = []
        self._view: LogitsView | None = None
        self._drawn: list[tuple[list[Member], PendingOutput]] = []
        self._failures: dict[str, str] = {}
        self.last_failures: Mapping[str, str] = {}
        """Why requests failed in the step that was sampled last, by id."""

    @property
    def reshaping(self) -> tuple[StageFactory, ...]:
        """The stages of processors that may change the likeliest token: one, or none."""
        return self._stages(self._reshaping)

    @property
    def narrowing(self) -> tuple[StageFactory, ...]:
        """The stages of processors that never do: one, or none."""
        return self._stages(self._narrowing)

    # What the core calls.

    def check(self, plan: StepPlan) -> None:
        """Refuse a request of which nobody said what processors are to be shown.

        Raises:
            ProtocolError: An arrival has no extra.
        """
        for arrival in plan.arrivals:
            if NAME not in arrival.extras:
                raise ProtocolError(
                    f"request {arrival.req_id!r} arrives without its SamplingParams in "
                    f"extras[{NAME!r}], which logits processors are shown"
                )

    def admit(self, row: int, arrival: Arrival) -> None:
        """Take a request into a row, with the outputs that it brings."""
        self._members[row] = Member(
            req_id=arrival.req_id,
            params=arrival.extras[NAME],
            prompt=arrival.token_ids[: arrival.prompt_len],
            outputs=arrival.token_ids[arrival.prompt_len :],
        )

    def evict(self, row: int) -> None:
        """Forget a row. Processors are told when the next step is sampled."""
        self._members.pop(row, None)

    def outputs(self, step: Step) -> Callable[[], object]:
        """Return what gives the failures of the step, by id: they are known once it was sampled."""
        failures = self._failures
        return lambda: failures

    def after_sample(self, step: Step, pending: PendingOutput) -> None:
        """Take note of the output: the next step's processors are shown what this one commits."""
        self.last_failures, self._failures = self._failures, {}
        drawing, self._step, self._view = self._step, [], None
        if drawing:
            self._drawn.append((drawing, pending))

    def give_up(self, layout: BatchLayout) -> None:
        """Forget which requests a step drew for: it draws them anew."""
        self._step, self._view = [], None

    # What the stages call.

    def apply(self, processors: Sequence[_Processor], logits: Tensor, view: LogitsView) -> None:
        """Let processors rewrite the logits, [num_logits, vocab_size] float32, in place."""
        self._begin(view)
        for processor in processors:
            rows = [index for index, member in enumerate(self._step) if member.failure is None]
            self._catch_up(processor)
            if len(rows) == len(self._step):
                self._apply_one(processor, logits)
            elif rows:  # the logits of requests that failed are left alone
                index = torch.tensor(rows, device=logits.device)
                shown = logits[index]
                self._apply_one(processor, shown)
                logits[index] = shown

    def _stages(self, group: list[_Processor]) -> tuple[StageFactory, ...]:
        if not group:
            return ()

        def stage(resources: StageResources) -> CustomStage:
            return CustomStage(self, group)

        return (stage,)

    def _begin(self, view: LogitsView) -> None:
        """Bring outputs and processors up to a step, the first time that it is seen."""
        if view is self._view:
            return
        self._view = view
        while self._drawn:  # one by one: what was shown is not shown again, should one raise
            drawing, pending = self._drawn[0]
            committed = list(chain.from_iterable(pending.committed()))
            del self._drawn[0]
            for member, token_id in zip(drawing, committed, strict=True):
                member.outputs.append(token_id)
        self._step = [self._members[row] for row in view.rows_np.tolist()]
        if len(set(map(id, self._step))) != len(self._step):
            raise ProtocolError(
                "a request has several logits in one step; custom logits processors know one each"
            )
        for processor in (*self._narrowing, *self._reshaping):
            self._follow(processor)

    def _healthy(self) -> list[Member]:
        return [member for member in self._step if member.failure is None]

    def _catch_up(self, processor: _Processor) -> None:
        """Tell a processor of requests that another one failed after this one was told."""
        if len(processor.batch) != len(self._healthy()):
            self._follow(processor)

    def _follow(self, processor: _Processor) -> None:
        """Tell a processor what changed since it was last told."""
        update = batch_update(processor.batch, self._healthy())
        try:
            processor.instance.update_state(update)
        except Exception as error:
            logger.exception("%s raised in update_state", processor.name)
            self._start_over(processor, error, None)

    def _apply_one(self, processor: _Processor, logits: Tensor) -> None:
        """Apply a processor to the logits of its batch, in place."""
        if type(processor.instance).apply is AdapterLogitsProcessor.apply:
            self._apply_by_request(processor, logits)
            return
        before = logits.clone()
        try:
            _apply(processor.instance, logits)
        except Exception as error:
            logger.exception("%s raised in apply", processor.name)
            logits.copy_(before)
            self._start_over(processor, error, logits)

    def _apply_by_request(self, processor: _Processor, logits: Tensor) -> None:
        """Do what `AdapterLogitsProcessor.apply` does, and know whom an error belongs to."""
        for index, process in processor.instance.req_info.items():
            row = logits[index]
            try:
                processed = process(row)
                if processed is not row:
                    row.copy_(processed)
            except Exception as error:
                logger.exception("%s raised for a request", processor.name)
                self._fail(processor, processor.batch[index], error)

    def _start_over(self, processor: _Processor, error: Exception, logits: Tensor | None) -> None:
        """Fail the requests that a processor cannot serve, and build it again for the others.

        Args:
            processor: One that raised; what it holds may be half changed.
            error: What it raised.
            logits: Of its batch, as they were before it acted; then it is applied again. None if
                it raised before.
        """
        for index, member in enumerate(processor.batch):
            own = None if logits is None else logits[index : index + 1].clone()
            try:
                _run(processor.make(), [], [member], own)
            except Exception as own_error:  # noqa: BLE001 - somebody's code may raise anything
                self._fail(processor, member, own_error)
        rows = [index for index, member in enumerate(processor.batch) if member.failure is None]
        others = [processor.batch[index] for index in rows]
        processor.instance, processor.batch = processor.make(), []
        shown = None if logits is None else logits[rows]
        try:
            _run(processor.instance, processor.batch, others, shown)
        except Exception:  # noqa: BLE001
            # Each of them works alone and all together do not: there is no better answer.
            for member in others:
                self._fail(processor, member, error)
            processor.instance, processor.batch = processor.make(), []
            return
        if logits is not None and shown is not None:
            logits[rows] = shown

    def _fail(self, processor: _Processor, member: Member, error: Exception) -> None:
        member.failure = (
            f"the logits processor {processor.name} raised {type(error).__name__}: {error}"
        )
        self._failures[member.req_id] = member.failure
        logger.error("request %s: %s", member.req_id, member.failure)


def _run(
    instance: LogitsProcessor, batch: list[Member], wanted: list[Member], logits: Tensor | None
) -> None:
    """Tell a new instance of its batch, and apply it to the logits if there are any."""
    update = batch_update(batch, wanted)
    if update is not None:
        instance.update_state(update)
        if logits is not None:
            _apply(instance, logits)


def _apply(instance: LogitsProcessor, logits: Tensor) -> None:
    """Apply a processor in place, although it may return another tensor.

    Raises:
        TypeError: It returned something else than logits of the same shape.
    """
    processed = instance.apply(logits)
    if processed is logits:
        return
    if not isinstance(processed, Tensor) or processed.shape != logits.shape:
        given = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed)
        raise TypeError(f"apply returned {given} for logits of shape {tuple(logits.shape)}")
    logits.copy_(processed)


class CustomStage(LogitsStage):
    """One group of custom processors as a stage of the runner.

    Args:
        processors: The engine's.
        group: Those that act here.
    """

    takes_plain = True

    def __init__(self, processors: CustomProcessors, group: Sequence[_Processor]) -> None:
        self._processors = processors
        self._group = group

    def admit(self, row: int, arrival: Arrival) -> None:
        """Nothing: the extension keeps the rows."""

    def evict(self, row: int) -> None:
        """Nothing: the extension keeps the rows."""

    def flush(self) -> None:
        """Nothing: the processors' state is theirs."""

    def wants(self, rows: npt.NDArray[np.int32]) -> bool:
        """Say yes: what a processor wants is known to itself only."""
        return len(rows) > 0

    def apply(self, logits: Tensor, view: LogitsView) -> None:
        """Let the processors rewrite the logits in place."""
        self._processors.apply(self._group, logits, view)


def load_custom_processors(
    vllm_config: VllmConfig, device: torch.device
) -> CustomProcessors | None:
    """Load the processors that V1 would load, but for its own three, which are stages here.

    Args:
        vllm_config: Its model_config names some; others are installed as plugins of vLLM.
        device: Handed to them.

    Returns:
        None if there are none.
    """
    named = tuple(vllm_config.model_config.logits_processors or ())
    loaded = build_logitsprocs(vllm_config, device, PIN_MEMORY, False, named)
    custom = [
        processor for processor in loaded.all if type(processor) not in BUILTIN_LOGITS_PROCESSORS
    ]
    if not custom:
        return None

    def make(kind: type[LogitsProcessor]) -> LogitsProcessor:
        return kind(vllm_config, device, PIN_MEMORY)

    return CustomProcessors(custom, make)


def _maker(
    make: Callable[[type[LogitsProcessor]], LogitsProcessor], kind: type[LogitsProcessor]
) -> Callable[[], LogitsProcessor]:
    return lambda: make(kind)
