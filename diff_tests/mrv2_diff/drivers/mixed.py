"""One engine of a tiny checkpoint under a mixed load, as a program: a source of traces.

usage: python -m mrv2_diff.drivers.mixed MODEL

Greedy and random requests, grammars, penalties, chunked prompts, shared prefixes; blocks
for half of them, so that requests are preempted; and two that are given up while they run. None
has a seed: V1 cannot draw with one on a CPU while a prompt is in chunks.
"""

import sys
from typing import Any

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 32,
    "num_gpu_blocks_override": 12,
    "enable_prefix_caching": True,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
NUM_REQUESTS = 12
ABORTED = {5: "q2", 20: "q4"}
"""By step."""


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Return the prompts and their parameters."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 0.0, "logit_bias": {50: 3.5, 51: -100.0}},
        {"temperature": 1.0},
        {"temperature": 0.0, "structured_outputs": {"regex": "[a-z]{12,20}"}, "ignore_eos": False},
        {"temperature": 0.8, "structured_outputs": {"choice": ["yes", "perhaps"]},
         "ignore_eos": False},
        {"temperature": 0.0, "allowed_token_ids": [*range(40, 90)]},
        {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": [*range(0, 300, 2)]},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
    ]  # fmt: skip
    shared = [4 + 3 * place % 200 for place in range(40)]
    prompts = [
        (shared if index % 3 == 0 else [])
        + [4 + (7 * index + place * place) % 240 for place in range(20 + 3 * index)]
        for index in range(NUM_REQUESTS)
    ]
    return list(zip(prompts, asked, strict=True))


def main() -> None:
    """Run the load and say what came of it."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = LLM(model=sys.argv[1], **ENGINE).llm_engine
    for index, (prompt, asked) in enumerate(requests()):
        if "structured_outputs" in asked:
            asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
        params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **asked})
        engine.add_request(f"q{index}", {"prompt_token_ids": prompt}, params)
    step = ended = 0
    while engine.has_unfinished_requests():
        if step in ABORTED:
            engine.abort_request([ABORTED[step]])
        ended += sum(output.finished for output in engine.step())
        step += 1
    sys.stdout.write(f"{ended} of {NUM_REQUESTS} requests ended in {step} steps\n")


if __name__ == "__main__":
    main()
