"""One vLLM engine in a process of its own: any requests go in, and what became of each comes out.

A refusal is an answer too. `one_engine.py` is for many greedy continuations, compared as figures;
here each request counts.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrv2_diff.drivers.one_engine import job_environment

TIME_LIMIT_S = 400
"""For one engine, its start included. It shares its cores with whatever else runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: a prompt and arguments of vLLM's SamplingParams.

    `structured_outputs` is a mapping of the arguments of StructuredOutputsParams.
    """

    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of one request."""

    error: str | None = None
    """Why it was refused where it entered, with the names of the error's types before."""
    token_ids: list[list[int]] = field(default_factory=list)
    """For each of its `n` sequences."""
    finish_reasons: list[str | None] = field(default_factory=list)
    stop_reasons: list[Any] = field(default_factory=list)
    logprobs: list[dict[str, float]] = field(default_factory=list)
    """Of the first sequence, for each token of it: logprobs by token id."""
    prompt_logprobs: list[dict[str, float] | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """What one engine did, and which runner it had."""

    runner_class: str
    groups: list[list[Reply]]


def ask_engine(
    model: Path, engine: dict[str, Any], groups: list[list[Ask]], runner: str
) -> Replies:
    """Start an engine under `MRV2_RUNNER=runner` and send it requests, group after group.

    Args:
        model: Folder of the checkpoint.
        engine: Arguments of vLLM's EngineArgs.
        groups: The requests of a group run together.
        runner: A value of `MRV2_RUNNER`.

    Raises:
        RuntimeError: The engine failed or took too long (status 124); with the end of its output.
    """
    job = {
        "engine": {"model": str(model), **engine},
        "groups": [[dataclasses.asdict(ask) for ask in group] for group in groups],
    }
    with tempfile.TemporaryDirectory(prefix="mrv2-asks-") as folder:
        answer = Path(folder) / "replies.json"
        command = [sys.executable, "-m", __name__, str(answer)]
        done = subprocess.run(
            ["timeout", "-k", "5", str(TIME_LIMIT_S), *command],
            input=json.dumps(job),
            env=job_environment({"MRV2_RUNNER": runner}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not answer.is_file():
            raise RuntimeError(f"{runner} ended with {done.returncode}:\n{done.stdout[-8000:]}")
        values = json.loads(answer.read_text())
    groups_of_replies = [[Reply(**reply) for reply in group] for group in values["groups"]]
    return Replies(runner_class=values["runner_class"], groups=groups_of_replies)


def _run_group(engine: Any, name: str, asks: list[dict[str, Any]]) -> list[Reply]:
    replies: dict[str, Reply] = {}
    for index, ask in enumerate(asks):
        req_id = f"{name}-{index}"
        prompt = {"prompt_token_ids": ask["prompt"]}
        try:
            engine.add_request(req_id, prompt, _params(ask["params"]))
        except Exception as error:  # noqa: BLE001 - whatever the entrance raises is the answer
            kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
            replies[req_id] = Reply(error=f"{kinds}: {error}")
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                replies[output.request_id] = _reply(output)
    return [replies[f"{name}-{index}"] for index in range(len(asks))]


def _params(asked: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    asked = {"output_kind": RequestOutputKind.FINAL_ONLY, **asked}
    if "structured_outputs" in asked:
        asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
    if "logit_bias" in asked:  # a job travels as JSON, whose keys are text
        asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
    private = {key: asked.pop(key) for key in list(asked) if key.startswith("_")}
    params = SamplingParams(**asked)
    for key, value in private.items():
        setattr(params, key, value)
    return params


def _reply(output: Any) -> Reply:
    sequences = sorted(output.outputs, key=lambda sequence: sequence.index)
    return Reply(
        token_ids=[list(sequence.token_ids) for sequence in sequences],
        finish_reasons=[sequence.finish_reason for sequence in sequences],
        stop_reasons=[sequence.stop_reason for sequence in sequences],
        logprobs=[_values(row) for row in sequences[0].logprobs or ()],
        prompt_logprobs=[
            None if row is None else _values(row) for row in output.prompt_logprobs or ()
        ],
    )


def _values(row: Any) -> dict[str, float]:
    return {str(token_id): entry.logprob for token_id, entry in row.items()}


def main() -> None:
    """Read a job from standard input and write the replies into the file that is named."""
    from vllm import EngineArgs, LLMEngine

    job = json.load(sys.stdin)
    engine = LLMEngine.from_engine_args(EngineArgs(**job["engine"]))
    runner = engine.model_executor.driver_worker.worker.model_runner
    groups = [_run_group(engine, f"g{i}", asks) for i, asks in enumerate(job["groups"])]
    replies = Replies(
        runner_class=f"{type(runner).__module__}.{type(runner).__qualname__}", groups=groups
    )
    Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(replies)))


if __name__ == "__main__":
    main()
