"""Sampling stages against the functions of the installed vLLM that they stand in for."""

import random

import pytest
import torch

from mrv2.sampling.bad_words import encode, mask_bad_words
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


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_equal_v1s(seed: int) -> None:
    from vllm.v1.sample.ops.bad_words import apply_bad_words

    rng = random.Random(seed)
    num_logits, vocab_size, prompt_len = 8, 4, 3
    outputs = [rng.choices(range(vocab_size), k=rng.randint(0, 7)) for _ in range(num_logits)]
    words = {
        row: [rng.choices(range(vocab_size), k=rng.randint(1, 4)) for _ in range(rng.randint(1, 9))]
        for row in range(0, num_logits, 2)
    }
    logits = torch.randn(num_logits, vocab_size, generator=torch.Generator().manual_seed(seed))
    theirs = logits.clone()
    apply_bad_words(theirs, words, outputs)

    lists = [encode(words.get(row, [])) for row in range(num_logits)]
    token_ids = torch.zeros(num_logits, 20, dtype=torch.int32)
    for row, output in enumerate(outputs):
        token_ids[row, prompt_len : prompt_len + len(output)] = torch.tensor(output)
    mask_bad_words(
        logits,
        torch.arange(num_logits, dtype=torch.int32),
        torch.tensor([prompt_len + len(output) for output in outputs]),
        token_ids,
        torch.full((num_logits,), prompt_len, dtype=torch.int32),
        torch.tensor([0, *(len(of_row) for of_row in lists)]).cumsum(0).int(),
        torch.tensor([word for of_row in lists for word in of_row], dtype=torch.int32),
    )
    assert torch.equal(logits, theirs)
