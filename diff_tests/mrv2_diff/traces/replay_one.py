"""The program of a replay in one runner: reads a job, plays the trace, writes what was drawn.

usage: python -m mrv2_diff.traces.replay_one ANSWERS, with a `Job` in JSON on standard input

ANSWERS gets one msgpack value after another, each behind its length: `Drawn` for each step, or
`Refused` before the first.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from mrv2_diff.traces.events import Head
from mrv2_diff.traces.format import Step, Trace, open_trace


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to play."""

    trace: str
    model: str
    runner: str
    forced: bool
    salvage: bool


class Token(msgspec.Struct, frozen=True, array_like=True):
    """What one request drew in one step."""

    req_id: str
    token_id: int
    lead: float | None
    """Of its processed logit over that of the recorded token, where they differ."""
    spacings: float | None
    """The same in spacings of the model's dtype at the larger logit's magnitude."""


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    """One step."""

    step: int
    tokens: list[Token]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """There is no replay, and why."""

    reasons: list[str]


Answer = Drawn | Refused


def read_answers(path: Path) -> Iterator[Answer]:
    """Yield whole answers of a file; an end that is torn is left out."""
    decoder = msgspec.msgpack.Decoder(Answer)
    with path.open("rb") as file:
        while len(length := file.read(4)) == 4:
            data = file.read(int.from_bytes(length, "little"))
            if len(data) < int.from_bytes(length, "little"):
                return
            yield decoder.decode(data)


def _write(file: IO[bytes], answer: Answer) -> None:
    data = msgspec.msgpack.encode(answer)
    file.write(len(data).to_bytes(4, "little") + data)
    file.flush()


def engine_arguments(head: Head) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM` for an engine as the recorded one, without its model."""
    arguments = msgspec.structs.asdict(head.engine)
    start = arguments.pop("reasoning_start_str")
    end = arguments.pop("reasoning_end_str")
    reasoning = start is not None or end is not None
    if reasoning:
        arguments["reasoning_config"] = {
            "reasoning_start_str": start or "",
            "reasoning_end_str": end or "",
        }
    return {
        **arguments,
        "num_gpu_blocks_override": head.kv.num_blocks,
        "skip_tokenizer_init": not reasoning,  # markers are text
        "async_scheduling": False,  # a step's tokens are compared before the next one
        "enforce_eager": True,
        "use_tqdm_on_load": False,
    }


def _play(job: Job, answers: IO[bytes]) -> None:
    import torch

    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        torch.set_num_threads(1)
    from vllm import LLM, EngineArgs

    from mrv2.errors import UnsupportedByRunner
    from mrv2_diff.traces import replay_worker
    from mrv2_diff.traces.facts import differences, engine_facts

    trace = open_trace(Path(job.trace), salvage=job.salvage)
    arguments = {
        "model": job.model,
        **engine_arguments(trace.head),
        "worker_cls": replay_worker.worker_name(job.runner),
    }
    try:
        without = {name: value for name, value in arguments.items() if name != "use_tqdm_on_load"}
        try:
            config = EngineArgs(**without).create_engine_config()
        except (ValueError, TypeError) as error:  # pydantic's are ValueErrors
            _write(answers, Refused([f"vLLM does not take the recorded configuration: {error}"]))
            return
        found = differences(trace.head.engine, engine_facts(config))
        if found:
            _write(answers, Refused([f"the engine's configuration differs: {it}" for it in found]))
            return
        replay_worker.EXPECTED[:] = [trace.head.kv]
        llm = LLM(**arguments)  # kept: an engine that nobody holds shuts its worker down
    except UnsupportedByRunner as error:
        _write(answers, Refused([str(error)]))
        return
    except replay_worker.KVCacheDiffersError as error:
        _write(answers, Refused([f"the KV cache differs: {error}"]))
        return
    with torch.inference_mode():
        _play_steps(job, trace, llm.llm_engine.model_executor.driver_worker.worker, answers)


def _play_steps(job: Job, trace: Trace, worker: Any, answers: IO[bytes]) -> None:
    from mrv2_diff.traces.saying import grammar_output, scheduler_output

    subject = worker.subject
    subject.observe(True)
    for step in trace.steps():
        recorded = _recorded(step)
        returned = subject.execute(scheduler_output(step.executed))
        tokens: list[Token] = []
        if returned is None:
            forced = recorded if job.forced and step.output is not None else None
            subject.sample(forced, grammar_output(step.sampled))
            tokens = _tokens(subject.observation(), recorded, trace.head.engine.dtype)
        _write(answers, Drawn(step.number, tokens))


def _recorded(step: Step) -> dict[str, int]:
    """Return the recorded tokens of a step by request."""
    if step.output is None:
        return {}
    drawn = zip(step.output.req_ids, step.output.token_ids, strict=True)
    return {req_id: tokens[0] for req_id, tokens in drawn if tokens}


def _tokens(seen: Any, recorded: dict[str, int], dtype: str) -> list[Token]:
    import torch

    tokens = []
    for row, (req_id, token) in enumerate(zip(seen.draw_ids, seen.drawn.tolist(), strict=True)):
        theirs = recorded.get(req_id)
        lead = spacings = None
        if theirs is not None and theirs != token:
            mine, other = (float(seen.processed_logits[row, it]) for it in (token, theirs))
            lead = mine - other
            largest = max(abs(mine), abs(other), torch.finfo(getattr(torch, dtype)).tiny)
            spacings = lead / (torch.finfo(getattr(torch, dtype)).eps * 2.0 ** _exponent(largest))
        tokens.append(Token(req_id, token, lead, spacings))
    return tokens


def _exponent(value: float) -> int:
    import math

    return math.frexp(value)[1] - 1 if math.isfinite(value) else 0


def main() -> None:
    """Play the job on standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    with open(sys.argv[1], "wb") as answers:
        _play(job, answers)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM's teardown can hang, and there is nothing left to keep


if __name__ == "__main__":
    main()
