"""Masks and biases against the installed vLLM's own code, bit for bit, on random requests."""

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.allowed_tokens import AllowedTokens
from mrv2.sampling.columns import DrawColumns
from mrv2.sampling.logit_bias import LogitBias
from mrv2.sampling.min_tokens import MinTokens
from mrv2.sampling.stage import LogitsStage, LogitsView, StageFactory, StageResources
from mrv2.sampling.stages import STAGES
from mrv2.state.requests import RequestColumns

pytestmark = pytest.mark.vllm

PROMPT = [1, 2, 3]
VOCAB_SIZES = (33, 101, 1000)
KINDS: tuple[StageFactory, ...] = (AllowedTokens, MinTokens, LogitBias)


class Request:
    """What one request asks for, and how many tokens it has put out."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        def some(low: int, high: int) -> list[int]:
            return rng.sample(range(vocab_size), rng.randint(low, high))

        self.num_outputs = rng.randint(0, 4)
        self.allowed = some(1, vocab_size) if rng.random() < 0.5 else None
        self.min_tokens = rng.randint(0, 5)
        self.stops = some(0, 6)
        self.structured = rng.random() < 0.5
        ids = some(0, 8)
        self.bias = {token: rng.uniform(-100.0, 100.0) for token in ids}
        # What a finished grammar leaves: stop tokens alone.
        self.finished = bool(self.stops) and rng.random() < 0.4

    def of_vllm(self) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        return SamplingParams(
            min_tokens=self.min_tokens,
            max_tokens=99,
            stop_token_ids=self.stops,
            logit_bias=self.bias,
            structured_outputs=StructuredOutputsParams(regex="a") if self.structured else None,
        )

    def of_ours(self) -> Sampling:
        return Sampling(
            allowed_token_ids=None if self.allowed is None else tuple(self.allowed),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(sorted(self.stops)),
            is_structured=self.structured,
            logit_bias=self.bias,
        )


def v1_processed(logits: Tensor, requests: list[Request]) -> Tensor:
    """What V1's sampler makes of the logits with its own processors."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinTokensLogitsProcessor,
    )
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.sampler import Sampler

    cpu = torch.device("cpu")
    processors = [
        MinTokensLogitsProcessor(cast("Any", None), cpu, False),
        LogitBiasLogitsProcessor(None, cpu, False),
    ]
    added = [
        (index, request.of_vllm(), PROMPT, [5] * request.num_outputs)
        for index, request in enumerate(requests)
    ]
    for processor in processors:
        processor.update_state(BatchUpdate(len(requests), removed=[], added=added, moved=[]))
    forbidden = torch.zeros_like(logits, dtype=torch.bool)
    for row, request in zip(forbidden, requests, strict=True):
        if request.allowed is not None:
            row.fill_(True)
            row[request.allowed] = False
    metadata = SimpleNamespace(
        bad_words_token_ids={},
        no_penalties=True,
        output_token_ids=[],
        allowed_token_ids_mask=forbidden,
        logitsprocs=LogitsProcessors(processors),
        thinking_budget_state_holder=None,
    )
    processed: Tensor = Sampler().apply_logits_processors(logits, cast("Any", metadata), False)
    return processed


def ours_processed(logits: Tensor, requests: list[Request], rows: list[int]) -> Tensor:
    """What our stages make of them, the requests in rows of no order."""
    arena = Arena(Transfers(torch.device("cpu")))
    resources = StageResources(
        num_rows=16,
        vocab_size=logits.shape[1],
        arena=arena,
        columns=DrawColumns(16, arena),
        requests=RequestColumns(16, 32, arena),
        thinking=None,
    )
    stages = [cast("LogitsStage", kind(resources)) for kind in STAGES if kind in KINDS]
    assert len(stages) == len(KINDS)
    rows_np = np.array(rows, dtype=np.int32)
    view = LogitsView(
        logit_rows=torch.from_numpy(rows_np),
        positions=torch.tensor([len(PROMPT) + request.num_outputs for request in requests]),
        rows_np=rows_np,
    )
    for stage in stages:
        for row, request in zip(rows, requests, strict=True):
            arrival = Arrival(
                req_id=f"r{row}",
                token_ids=PROMPT,
                prompt_len=len(PROMPT),
                num_computed_tokens=0,
                block_ids=(),
                sampling=request.of_ours(),
            )
            stage.admit(row, arrival)
        stage.flush()
        arena.flush()
        if stage.wants(rows_np):
            stage.apply(logits, view)
    return logits


@pytest.mark.parametrize("seed", range(40))
def test_masks_and_biases_equal_v1s_in_v1s_order(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice(VOCAB_SIZES)
    requests = [Request(rng, vocab_size) for _ in range(9)]
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(seed)) * 8
    for row, request in zip(logits, requests, strict=True):
        if request.finished:
            kept = row[request.stops].clone()
            row.fill_(-torch.inf)
            row[request.stops] = kept
    theirs = v1_processed(logits.clone(), requests)
    ours = ours_processed(logits.clone(), requests, rng.sample(range(16), 9))
    assert not torch.equal(theirs, logits)
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:The bitmask covers only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_grammar_masks_equal_v1s(seed: int, dtype: torch.dtype) -> None:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.structured_output.utils import apply_grammar_bitmask

    from mrv2_compat.vllm_v1.step.grammar_in import grammar_mask

    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice(VOCAB_SIZES))
    req_ids = [f"r{number}" for number in rng.permutation(8)]
    # One named request is not in the step; all others are there, some without a grammar.
    named = ["elsewhere", *rng.permutation(req_ids)[: rng.integers(1, 8)].tolist()]
    rng.shuffle(named)
    width = -(-vocab_size // 32) + int(rng.integers(-1, 2))
    bitmask = rng.integers(-(2**31), 2**31, (len(named), width), dtype=np.int32)
    output = GrammarOutput(named, bitmask)
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    theirs = logits.clone()
    apply_grammar_bitmask(
        cast("Any", SimpleNamespace(scheduled_spec_decode_tokens={})),
        output,
        cast("Any", SimpleNamespace(req_ids=req_ids)),
        theirs,
    )
    mask = grammar_mask(output, req_ids, np.arange(9, dtype=np.int32), vocab_size)
    assert mask is not None
    mask.apply(logits, Transfers(torch.device("cpu")))
    assert bool(theirs.isneginf().any())
    assert torch.equal(logits, theirs)
