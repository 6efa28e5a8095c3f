"""Sampling stages against the functions of the installed vLLM that they stand in for."""

import random

import pytest
import torch

from mrv2.sampling.penalties import penalise

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", range(20))
def test_penalties_equal_v1s_bit_for_bit(seed: int) -> None:
    from vllm.v1.sample.ops.penalties import apply_all_penalties

    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_logits, vocab_size = 6, rng.choice([7, 101, 1000])
    prompts = [rng.choices(range(vocab_size), k=rng.randint(1, 40)) for _ in range(num_logits)]
    outputs = [rng.choices(range(vocab_size), k=rng.randint(0, 40)) for _ in range(num_logits)]
    presence, frequency = (torch.randn(num_logits, generator=generator) for _ in range(2))
    repetition = torch.rand(num_logits, generator=generator) * 2 + 0.1
    presence[0], frequency[0], repetition[0] = 0.0, 0.0, 1.0
    logits = torch.randn(num_logits, vocab_size, generator=generator) * 5
    logits[1, ::3] = -torch.inf

    padded = torch.full((num_logits, 40), vocab_size)
    token_ids = torch.zeros(num_logits, 90, dtype=torch.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        padded[row, : len(prompt)] = torch.tensor(prompt)
        token_ids[row, : len(prompt) + len(output)] = torch.tensor(prompt + output)
    theirs = apply_all_penalties(logits.clone(), padded, presence, frequency, repetition, outputs)
    penalise(
        logits,
        torch.arange(num_logits, dtype=torch.int32),
        torch.tensor([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]),
        token_ids,
        torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32),
        presence,
        frequency,
        repetition,
        torch.zeros(4, vocab_size, dtype=torch.int32),
    )
    assert torch.equal(logits, theirs)
