"""Plays a trace in runners, each in a process of its own, and compares what they draw.

What makes a replay impossible is found before any process starts, or before it allocates: another
vLLM, another model, steps that contradict themselves, and more memory than the machine has.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mrv2_diff.drivers.one_engine import job_environment
from mrv2_diff.harness import ReplayOutcome, TraceReplay
from mrv2_diff.traces.check import Contents, check_steps
from mrv2_diff.traces.events import Head, Params
from mrv2_diff.traces.facts import differences, model_facts, spec_of, vllm_version
from mrv2_diff.traces.format import Step, Trace, open_trace
from mrv2_diff.traces.replay_one import Drawn, Job, Refused, Token, read_answers
from mrv2_diff.verdict import Divergence, Verdict

START_LIMIT_S = 240.0
STEP_LIMIT_S = 5.0
"""For each step. A replay that takes longer in all hangs."""


class ReplayRefusedError(ValueError):
    """A trace cannot be played here. Says each thing that differs."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("the trace cannot be played here:\n  " + "\n  ".join(reasons))
        self.reasons = reasons


@dataclass(slots=True)
class ReplayResult:
    """How a replay came out."""

    verdict: Verdict
    contents: Contents
    compared: int = 0
    differing: int = 0
    left_out: int = 0
    """Tokens that nothing says must be equal: drawn at random, by another generator."""
    divergence: Divergence | None = None
    error: str | None = None
    head: Head | None = None


def replay(asked: TraceReplay) -> ReplayResult:
    """Play a trace and compare.

    Raises:
        TraceError: The file is no trace, is damaged, or contradicts itself.
        ReplayRefusedError: It cannot be played here.
        OSError: It cannot be read.
    """
    trace = open_trace(asked.trace, salvage=asked.salvage)
    contents = check_steps(trace.head, trace.steps())
    model = _model(trace.head, asked.model)
    _require(trace.head, model)
    against = asked.against
    if trace.head.is_private and against is None:
        against = "v1" if asked.runner == "mrv2" else "mrv2"
    with tempfile.TemporaryDirectory(prefix="mrv2-replay-") as folder:
        answers = Path(folder, "asked")
        error = _run(asked, asked.runner, trace, model, answers)
        if against is None:
            result = _compared(trace, asked, answers, None)
        else:
            reference = Path(folder, "reference")
            fault = _run(asked, against, trace, model, reference)
            if fault is not None:
                return ReplayResult(Verdict.INCONCLUSIVE, contents, error=fault, head=trace.head)
            result = _compared(trace, asked, answers, (against, reference))
    result.contents, result.head = contents, trace.head
    if error is not None and result.divergence is None:
        result.verdict, result.error = Verdict.CRASHED, error
    return result


def _model(head: Head, folder: Path | None) -> Path:
    """Return the folder of the model; never one that the file names."""
    from mrv2_diff.models import cached_model, check_model_folder

    if folder is not None:
        check_model_folder(folder)
        return folder
    if head.model.tiny is None:
        raise ReplayRefusedError(
            [f"it was recorded of the model {head.model.name!r}: name its folder with --model"]
        )
    try:
        return cached_model(spec_of(head.model.tiny))
    except ValueError as error:
        raise ReplayRefusedError([f"the recorded tiny model cannot be made: {error}"]) from error


def _require(head: Head, model: Path) -> None:
    """Refuse what differs, all of it at once.

    Raises:
        ReplayRefusedError: Says each value.
    """
    reasons = []
    if head.vllm != vllm_version():
        reasons.append(f"vLLM: recorded {head.vllm!r}, here {vllm_version()!r}")
    if head.runner_class.startswith("mrv2") != (head.runner == "mrv2"):
        reasons.append(f"runner: {head.runner!r} and {head.runner_class!r} contradict each other")
    here = model_facts(model, head.model.vocab_size)
    if head.model.config_sha256 is None:
        reasons.append(f"model: {head.model.name!r} was no folder, so nothing says it is the same")
    elif found := _model_differences(head, here):
        reasons += [f"model{line}" for line in found]
    reasons += _memory(head, model)
    if reasons:
        raise ReplayRefusedError(reasons)


def _model_differences(head: Head, here: msgspec.Struct) -> list[str]:
    return [
        line
        for line in differences(head.model, here)
        if not line.startswith(("['name']", "['tiny']"))
    ]


def _memory(head: Head, model: Path) -> list[str]:
    """Return why the machine is too small, in words; empty where it is not, or nobody knows."""
    engine = head.engine
    weights = sum(
        path.stat().st_size for kind in ("*.safetensors", "*.bin") for path in model.glob(kind)
    )
    # A runner's tables: token ids of every request, and a few rows of logits each.
    tables = engine.max_num_seqs * (8 * engine.max_model_len + 16 * head.model.vocab_size)
    needed = head.kv.num_bytes + 2 * weights + tables
    available = available_bytes()
    if available is None or needed <= available:
        return []
    return [
        f"memory: {engine.max_num_seqs} requests of {engine.max_model_len} tokens and "
        f"{head.kv.num_blocks} KV blocks need about {needed >> 20} MiB, and "
        f"{available >> 20} MiB are free"
    ]


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes of host memory that are free; None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _run(asked: TraceReplay, runner: str, trace: Trace, model: Path, answers: Path) -> str | None:
    """Play the trace in one runner; return how the process failed, or None.

    Raises:
        ReplayRefusedError: The runner or the engine refuses.
    """
    job = Job(
        trace=str(asked.trace.resolve()),
        model=str(model),
        runner=runner,
        forced=asked.forced,
        salvage=asked.salvage,
    )
    space = max(1, -(-trace.head.kv.num_bytes >> 30) + 1)
    environ = {"MRV2_RUNNER": runner, "VLLM_CPU_KVCACHE_SPACE": str(space)}
    answers.touch()
    limit = START_LIMIT_S + STEP_LIMIT_S * max(1, trace.whole_steps)
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "mrv2_diff.traces.replay_one", str(answers)],
                input=msgspec.json.encode(job),
                env=job_environment(environ),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            )
            failure = f"{runner} ended with {done.returncode}" if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"{runner} did not end within {limit:.0f} s"
        output.seek(0, 2)
        output.seek(max(0, output.tell() - 4000))
        said = output.read().decode(errors="replace")
    for answer in read_answers(answers):
        if isinstance(answer, Refused):
            raise ReplayRefusedError([f"{runner}: {reason}" for reason in answer.reasons])
        break
    return None if failure is None else f"{failure}:\n{said}"


class _Comparison:
    """Goes through the steps of a trace beside what was drawn."""

    def __init__(self, head: Head, asked: TraceReplay, reference: str | None) -> None:
        self._forced = asked.forced
        self._same = (reference or head.runner) == asked.runner
        self._runner = asked.runner
        self._label = reference or "recorded"
        self._params: dict[str, Params] = {}
        self._index: dict[str, int] = {}
        self._apart: set[str] = set()
        """Requests that went their own way, in a free replay."""
        self.result = ReplayResult(Verdict.MISSING, Contents())

    def see(self, step: Step, expected: Mapping[str, int], drawn: Mapping[str, Token]) -> None:
        for new in step.executed.new:
            self._params[new.req_id] = new.params
            self._index[new.req_id] = 0
            self._apart.discard(new.req_id)
        for req_id in {**expected, **drawn}:
            if req_id not in self._apart:
                self._compare(step, req_id, expected.get(req_id), drawn.get(req_id))
            self._index[req_id] = self._index.get(req_id, 0) + 1

    def _compare(self, step: Step, req_id: str, expected: int | None, drawn: Token | None) -> None:
        result = self.result
        if expected is None or drawn is None:
            theirs = "no token" if expected is None else str(expected)
            ours = "no token" if drawn is None else str(drawn.token_id)
            self._differs(step, req_id, theirs, ours, "one side drew no token", Verdict.MISSING)
            return
        if not self._must_agree(self._params[req_id]):
            result.left_out += 1
            return
        result.compared += 1
        if expected == drawn.token_id:
            return
        policy = "tokens are equal"
        if drawn.lead is not None and drawn.spacings is not None:
            policy += (
                f"; its logit leads that of the recorded token by {drawn.lead:.4g}, which is "
                f"{drawn.spacings:.3g} spacings of the dtype"
            )
        ours = str(drawn.token_id)
        self._differs(step, req_id, str(expected), ours, policy, Verdict.WRONG_VALUE)

    def _must_agree(self, params: Params) -> bool:
        """Whether nothing random stands between two draws, or the same random numbers do."""
        seeded = params.seed is not None or self._runner == "mrv2"
        return params.is_greedy or (self._same and seeded)

    def _differs(
        self, step: Step, req_id: str, theirs: str, ours: str, policy: str, verdict: Verdict
    ) -> None:
        result = self.result
        result.differing += 1
        if not self._forced:
            self._apart.add(req_id)
        if result.divergence is None:
            result.verdict = verdict
            result.divergence = Divergence(
                mode="forced" if self._forced else "free",
                step=step.number,
                value="tokens",
                req_id=req_id,
                index=self._index.get(req_id, 0),
                reference=f"{self._label} {theirs}",
                candidate=f"{self._runner} {ours}",
                policy=policy,
            )

    def conclude(self) -> ReplayResult:
        """Return the verdict: a match only where something was compared."""
        result = self.result
        if result.divergence is None and result.compared:
            result.verdict = Verdict.MATCH
        return result


def _compared(
    trace: Trace, asked: TraceReplay, answers: Path, reference: tuple[str, Path] | None
) -> ReplayResult:
    comparison = _Comparison(trace.head, asked, None if reference is None else reference[0])
    drawn = _drawn(answers)
    other = None if reference is None else _drawn(reference[1])
    for step in trace.steps():
        mine = next(drawn, None)
        if mine is None:
            break  # the process ended; whoever asked is told why
        if other is not None:
            theirs = next(other, None)
            expected = {} if theirs is None else {name: it.token_id for name, it in theirs.items()}
        elif step.output is None:
            continue
        else:
            listed = zip(step.output.req_ids, step.output.token_ids, strict=True)
            expected = {req_id: tokens[0] for req_id, tokens in listed if tokens}
        comparison.see(step, expected, mine)
    return comparison.conclude()


def _drawn(path: Path) -> Iterator[dict[str, Token]]:
    for answer in read_answers(path):
        if isinstance(answer, Drawn):
            yield {token.req_id: token for token in answer.tokens}


def outcome(result: ReplayResult, asked: TraceReplay) -> ReplayOutcome:
    """Return what a replay gave, for people."""
    contents, head = result.contents, result.head
    told = []
    if head is not None:
        told.append(
            f"recorded from {head.runner} on {head.device}, vLLM {head.vllm}"
            f"{', private' if head.is_private else ''}: {contents.steps} steps, "
            f"{contents.requests} requests, {contents.tokens} tokens, {contents.masks} masks, "
            f"{contents.preemptions} preemptions, {contents.resumes} resumes"
        )
    if result.left_out:
        told.append(f"{result.left_out} tokens were drawn at random by another generator, and "
                    "are not compared")  # fmt: skip
    if result.divergence is not None:
        first = result.divergence
        told.append(
            f"first divergence: step {first.step}, request {first.req_id!r}, token {first.index}: "
            f"{first.reference}, {first.candidate} ({first.policy})"
        )
    if result.error is not None:
        told.append(result.error)
    mode = "forced" if asked.forced else "free"
    told.append(
        f"replay in {asked.runner}, {mode}: {result.verdict.value}, {result.compared} tokens "
        f"compared, {result.differing} differ"
    )
    return ReplayOutcome(text="\n".join(told), passes=result.verdict.passes)
