"""A worker whose V1 runner drives the engine while a candidate runs the same steps beside it.

The candidate has its own deep copy of the config (so its layers register apart), its own KV cache,
and the reference's weights. It is given a deep copy of every SchedulerOutput, in the form that the
pass's schedule makes of it. The engine never sees its output.
"""

import copy
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from mrv2.errors import UnsupportedByRunner
from mrv2_compat.vllm_v1.versions import copy_settled
from mrv2_diff.lockstep import device
from mrv2_diff.lockstep.layers import LayerCopies
from mrv2_diff.lockstep.schedules import SCHEDULES, Schedule
from mrv2_diff.lockstep.subjects import SUBJECTS, Subject, V1Subject, initialize, load
from mrv2_diff.observation import Observation, merge

_COPIED_FROM_CACHE_CONFIG = (
    "num_gpu_blocks",
    "block_size",
    "kv_cache_layout",
    "hash_block_size",
    "cache_hit_alignment_tokens",
)
"""What the engine settles after a worker was built, and a candidate's copy of the config lacks."""


AGAIN = " again"
"""Ends the name of a second instance of a runner."""


class HarnessError(RuntimeError):
    """The harness itself failed while it looked at a step; neither runner is to blame."""


@dataclass(slots=True)
class StepReport:
    """One step of both runners."""

    number: int
    scheduler_output: SchedulerOutput
    driver: Observation | None
    """V1's, whose tokens the engine goes on with."""
    reference: Observation | None
    """The same, unless the candidate is compared with another runner than V1."""
    candidate: Observation | None
    candidate_ran: bool
    """False if the candidate crashed in this step or before."""
    ledgers: tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]] | None
    beside: Observation | None = None
    """Of the runner that the pass names, if it names one."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By `reference` and `candidate`.

    Time in execute, then in sample, for each part of the step.
    """


Wrap = Callable[[str, int, str, Callable[[], Any]], Any]
"""`wrap(side, step, phase, call)` runs one runner's part of a step, `execute` or `sample`; a pass
that measures puts its instruments around it."""

WrapStart = Callable[[str, Callable[[], Any]], Any]
"""`wrap(phase, call)` runs one phase of a runner's start."""


@dataclass(slots=True, kw_only=True)
class Pass:
    """How the engine's next steps are run."""

    candidate: str
    reference: str = "v1"
    """Any but V1 runs beside V1, which drives the engine; its failure is the pass's."""
    forced: bool
    """Commit V1's tokens in the others."""
    schedule: "str | Schedule" = "same"
    """In which form the candidate is given each step; a name is one of `SCHEDULES`."""
    beside: str | None = None
    """Another instance of a runner that is given the steps as they are, in a forced pass: so a
    candidate is compared with itself. The ledgers are then its own and the candidate's."""
    observe: bool = True
    alternate: bool = False
    """Let the candidate go first in every other step, for fair timing; only without forcing
    and without grammars, whose masks come with the step's second half."""
    layers: bool = False
    """Whether observations have the hidden states behind each layer; only for eager steps."""
    wrap: Wrap | None = None
    listener: Callable[[StepReport], None]


_Worker: Any = device.worker_class()


class LockstepWorker(_Worker):
    """vLLM's worker for this device, with a candidate beside its V1 runner."""

    def init_device(self) -> None:
        """Build the reference; keep a copy of the config from before any model was built."""
        self._pristine = copy.deepcopy(self.vllm_config)
        super().init_device()
        self._reference = V1Subject(self.model_runner)
        self._candidates: dict[str, Subject] = {}
        self._kv_cache_config: KVCacheConfig | None = None
        self._pass: Pass | None = None
        self._steps: list[SchedulerOutput] = []
        self._steps_beside: list[SchedulerOutput] = []
        self._copy: SchedulerOutput | None = None
        """The step, for a reference that is not V1."""
        self._number = 0
        self._report: StepReport | None = None
        self._layers: dict[int, LayerCopies] = {}
        """Of the subjects of the pass, by their identity."""
        self.crash: str | None = None
        self.refusal: UnsupportedByRunner | None = None

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Keep the KV cache config for candidates."""
        self._kv_cache_config = copy.deepcopy(kv_cache_config)
        super().initialize_from_config(kv_cache_config)

    def begin(self, settings: Pass) -> None:
        """Start a pass: both runners empty, their KV caches poisoned."""
        self._pass, self._number, self.crash, self.refusal = settings, 0, None, None
        self._reference.reset()
        self._reference.observe(settings.observe)
        if settings.reference != "v1":
            beside = self.candidate(settings.reference)
            beside.reset()
            beside.observe(settings.observe)
        try:
            for name in filter(None, (settings.candidate, settings.beside)):
                subject = self.candidate(name)
                subject.reset()
                subject.observe(settings.observe)
        except UnsupportedByRunner:
            self._pass = None
            raise
        except Exception:  # noqa: BLE001 - as in `_contained`
            self._crashed()
        compared = {settings.reference, settings.candidate, settings.beside}
        names = compared if settings.layers else set()
        beside_v1 = [subject for name, subject in self._candidates.items() if name in names]
        self._watch_layers([self._reference, *beside_v1] if names else [])

    def end(self) -> None:
        """Leave the pass.

        The reference runs alone, and what a failed step left behind is dropped.
        """
        self._pass = self._report = None
        self._steps = self._steps_beside = []

    def forget_candidates(self) -> None:
        """Let go of every candidate with its KV cache and graphs."""
        self.end()
        self._candidates.clear()

    def candidate(self, name: str) -> Subject:
        """Return a candidate, building it at its first use; ` again` names another instance."""
        if name not in self._candidates:
            self._candidates[name] = self._build(name)
        return self._candidates[name]

    def start_another(self, name: str, wrap: WrapStart) -> None:
        """Start one more runner by its name, phase by phase, and let go of it.

        It loads weights of its own, as a runner does that is alone, and profiles as vLLM asks it
        to on a GPU, whichever device this is.

        Args:
            name: As in a pair.
            wrap: Runs `weights`, `profile`, `kv` and, with CUDA graphs, `graphs`.
        """
        config = self.candidate_config()

        def load_alone() -> Subject:
            subject: Subject = SUBJECTS[name](config, self.device)
            subject.runner.load_model()
            return subject

        with set_current_vllm_config(config):
            subject = wrap("weights", load_alone)
            subject.runner.get_kv_cache_spec()
            wrap("profile", subject.runner.profile_run)
            wrap("kv", lambda: initialize(subject, self.kv_cache_config()))
            if not config.model_config.enforce_eager:
                wrap("graphs", subject.runner.capture_model)

    def candidate_config(self) -> VllmConfig:
        """Return a copy of the engine's config in which no layer is registered."""
        config = copy.deepcopy(self._pristine)
        copy_settled(self.vllm_config.cache_config, config.cache_config, _COPIED_FROM_CACHE_CONFIG)
        return config

    def kv_cache_config(self) -> KVCacheConfig:
        """Return a copy of what the engine settled for the KV cache."""
        assert self._kv_cache_config is not None
        return copy.deepcopy(self._kv_cache_config)

    @property
    def reference(self) -> V1Subject:
        """The runner that drives the engine."""
        return self._reference

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's first half in both runners."""
        if self._pass is None:
            return self._reference.execute(scheduler_output)
        settings = self._pass
        schedule = settings.schedule
        play = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
        self._steps = [] if self.crash else play(copy.deepcopy(scheduler_output))
        has_beside = settings.beside is not None and not self.crash
        self._steps_beside = [copy.deepcopy(scheduler_output)] if has_beside else []
        self._copy = copy.deepcopy(scheduler_output) if settings.reference != "v1" else None
        self._report = StepReport(self._number, scheduler_output, None, None, None, False, None)
        self._number += 1
        if settings.alternate and self._number % 2:
            self._contained(lambda: self._run_candidate(None, None))
        output: ModelRunnerOutput | None = self._timed(
            "reference", "execute", lambda: self._reference.execute(scheduler_output)
        )
        if output is not None:
            self._finish_empty()
        return output

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Run the step's second half in the reference, then what remains of it in the candidate."""
        settings, report = self._pass, self._report
        if settings is None or report is None:
            return self._reference.sample(None, grammar_output)
        output: ModelRunnerOutput = self._timed(
            "reference", "sample", lambda: self._reference.sample(None, grammar_output)
        )
        if settings.observe:
            report.driver = report.reference = self._observed(self._reference)
        drawn = zip(output.req_ids, output.sampled_token_ids, strict=True)
        forced = (
            {req_id: tokens[0] for req_id, tokens in drawn if tokens} if settings.forced else None
        )
        if self._copy is not None:
            self._run_other_reference(self._copy, forced, grammar_output)
        if self._steps:
            self._contained(lambda: self._run_candidate(forced, grammar_output))
        self._tell()
        return output

    def _build(self, name: str) -> Subject:
        config = self.candidate_config()
        with set_current_vllm_config(config):
            subject: Subject = SUBJECTS[name.removesuffix(AGAIN)](config, self.device)
            load(subject, config, self._reference.runner.get_model())
            subject.runner.get_kv_cache_spec()
            initialize(subject, self.kv_cache_config())
            if not config.model_config.enforce_eager:
                subject.runner.capture_model()  # the worker does it for the reference alone
        return subject

    def _observed(self, subject: Subject) -> Observation:
        observation, copies = subject.observation(), self._layers.get(id(subject))
        if copies is None:
            return observation
        return replace(observation, layers=copies.take(len(observation.input_ids)))

    def _watch_layers(self, subjects: list[Subject]) -> None:
        """Copy hidden states by layer of these subjects, and of no others any more."""
        for copies in self._layers.values():
            copies.close()
        self._layers = {
            id(subject): LayerCopies(subject.runner.get_model()) for subject in subjects
        }

    def _run_other_reference(
        self, step: SchedulerOutput, forced: dict[str, int] | None, grammar: GrammarOutput | None
    ) -> None:
        """Run a step in the reference where that is not V1."""
        settings, report = self._pass, self._report
        assert settings is not None
        assert report is not None
        subject, state = self.candidate(settings.reference), device.random_state(self.device)
        report.reference = None
        if subject.execute(step) is None:
            subject.sample(forced, grammar)
            report.reference = self._observed(subject) if settings.observe else None
        device.restore_random_state(self.device, state)

    def _finish_empty(self) -> None:
        if self._copy is not None:
            self._run_other_reference(self._copy, None, None)
        self._contained(self._run_empty)
        self._tell()

    def _run_empty(self) -> None:
        assert self._pass is not None
        candidate = self.candidate(self._pass.candidate)
        played = [(candidate, step) for step in self._steps]
        if self._pass.beside is not None:
            beside = self.candidate(self._pass.beside)
            played += [(beside, step) for step in self._steps_beside]
        for subject, step in played:
            output = subject.execute(step)
            if output is None or any(output.sampled_token_ids):
                raise RuntimeError(f"a step without tokens gave {output}")

    def _contained(self, part: Callable[[], None]) -> None:
        """Run the candidate's part of a step.

        If it fails, the pass goes on without the candidate.
        """
        assert self._report is not None
        if self.crash is not None:
            return
        try:
            part()
            self._report.candidate_ran = True
        except UnsupportedByRunner as refusal:
            self.refusal = refusal
            self._crashed()
        except Exception:  # noqa: BLE001 - what the candidate does wrong is a finding
            self._crashed()
        self._steps = []

    def _crashed(self) -> None:
        """Keep the traceback, and drop the candidate: its requests would meet the next case's."""
        assert self._pass is not None
        self.crash = traceback.format_exc(limit=-6)
        self._candidates.pop(self._pass.candidate, None)
        self._candidates.pop(self._pass.beside or "", None)

    def _run_candidate(self, forced: dict[str, int] | None, grammar: GrammarOutput | None) -> None:
        """Run the candidate's whole step.

        V1 draws from the process's generator, which it must find as the reference did.
        """
        settings, report = self._pass, self._report
        assert settings is not None
        assert report is not None
        candidate = self.candidate(settings.candidate)
        state = device.random_state(self.device)
        if settings.beside is not None:
            report.beside = self._played_beside(self.candidate(settings.beside), forced, grammar)
            device.restore_random_state(self.device, state)
        parts = []
        for step in self._steps:
            output = self._timed("candidate", "execute", partial(candidate.execute, step))
            if output is not None:
                continue
            self._timed("candidate", "sample", lambda: candidate.sample(forced, grammar))
            if settings.observe:
                parts.append(self._observed(candidate))
        self._steps = []
        device.restore_random_state(self.device, state)
        if parts:
            report.candidate = merge(parts)

    def _played_beside(
        self, subject: Subject, forced: dict[str, int] | None, grammar: GrammarOutput | None
    ) -> Observation | None:
        """Run the step as it is in another instance of a runner; return what it did."""
        (step,), self._steps_beside = self._steps_beside, []
        if subject.execute(step) is not None:
            return None
        subject.sample(forced, grammar)
        return self._observed(subject)

    def _read_ledgers(self) -> None:
        assert self._pass is not None
        assert self._report is not None
        reference: Subject = (
            self._reference
            if self._pass.reference == "v1"
            else self.candidate(self._pass.reference)
        )
        candidate = self.candidate(self._pass.candidate)
        if self._pass.beside is not None:
            reference = self.candidate(self._pass.beside)
        self._report.ledgers = reference.ledger(), candidate.ledger()

    def _tell(self) -> None:
        settings, report = self._pass, self._report
        assert settings is not None
        assert report is not None
        if settings.observe and self.crash is None:
            self._contained(self._read_ledgers)
        self._report = None
        try:
            settings.listener(report)
        except Exception as error:
            raise HarnessError(f"step {report.number} could not be compared: {error}") from error

    def _timed(self, side: str, phase: str, call: Callable[[], Any]) -> Any:
        settings, report = self._pass, self._report
        assert settings is not None
        assert report is not None
        started = time.perf_counter()
        result = (
            call() if settings.wrap is None else settings.wrap(side, report.number, phase, call)
        )
        report.seconds.setdefault(side, []).append(time.perf_counter() - started)
        return result
