"""HashLM and its oracle: what a token depends on, and that no two logits are close."""

from collections.abc import Sequence

import torch

from mrv2 import KVGroup, RunnerConfig
from mrv2_diff.models.hashlm import SPACING, HashLM, hashlm_tokens
from mrv2_diff.toy_host import Toy

VOCAB = 97


def config(num_groups: int = 1) -> RunnerConfig:
    return RunnerConfig(
        device=torch.device("cpu"),
        max_num_reqs=2,
        max_num_tokens=32,
        max_model_len=32,
        vocab_size=VOCAB,
        kv_groups=(KVGroup(block_size=4, max_blocks=8),) * num_groups,
    )


def last(prompt: Sequence[int], windows: Sequence[int | None] = (None,)) -> list[int]:
    """Return a fingerprint of the prompt's context: a few tokens that follow it."""
    return hashlm_tokens(prompt, 4, VOCAB, windows)


def test_every_token_and_its_place_matter() -> None:
    prompt = list(range(10, 22))
    contexts = [prompt]
    for index in range(len(prompt)):
        contexts.append([*prompt[:index], 50, *prompt[index + 1 :]])
    for index in range(len(prompt) - 1):
        swapped = list(prompt)
        swapped[index : index + 2] = reversed(swapped[index : index + 2])
        contexts.append(swapped)
    contexts.append(prompt[1:])
    contexts.append(prompt[:-1])
    assert len({tuple(last(context)) for context in contexts}) == len(contexts)


def test_a_window_forgets_what_is_behind_it() -> None:
    prompt = list(range(10, 22))
    other = [50, *prompt[1:]]
    assert last(prompt, (6,)) == last(other, (6,))
    assert last(prompt, (6, None)) != last(other, (6, None))
    assert last(prompt, (12,))[:1] != last(other, (12,))[:1]


def test_a_continuation_goes_on_where_a_shorter_one_ends() -> None:
    tokens = hashlm_tokens([1, 2, 3], 20, VOCAB)
    assert tokens[:7] == hashlm_tokens([1, 2, 3], 7, VOCAB)
    assert tokens[7:] == hashlm_tokens([1, 2, 3, *tokens[:7]], 13, VOCAB)
    assert hashlm_tokens([1, 2, 3], 0, VOCAB) == []
    assert len(set(tokens)) > 10
    assert all(0 <= token < VOCAB for token in tokens)


def test_logits_are_evenly_spaced() -> None:
    model = HashLM(config(), 8)
    hidden = torch.randint(-(2**62), 2**62, (50, 1), generator=torch.Generator().manual_seed(3))
    logits = model.compute_logits(hidden)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.sort(dim=1).values, (SPACING * torch.arange(VOCAB)).expand(50, VOCAB))
    assert len(set(logits.argmax(dim=1).tolist())) > 20


def test_the_model_and_the_oracle_agree() -> None:
    windows = (None, 3, 7)
    toy = Toy(config(num_groups=3), num_blocks=20, windows=windows)
    toy.host.add("a", [4, 5, 6, 7, 8])
    toy.run({"a": 2})
    toy.run({"a": 3})
    for _ in range(15):
        toy.run({"a": 1})
    assert toy.outputs() == [("a", hashlm_tokens([4, 5, 6, 7, 8], 16, VOCAB, windows))]
    assert toy.outputs() == toy.expected()
