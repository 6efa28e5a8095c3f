"""Tiny checkpoints: deterministic, spread like a trained model's, and refusing what is foreign."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2_diff.models import (
    ModelFolderError,
    ModelSpec,
    cached_model,
    check_model_folder,
    make_model,
)
from mrv2_diff.models.tokenizer import VOCAB_SIZE

PROMPTS = (
    "The quick brown fox jumps",
    "Once upon a time, in a land",
    "def f(x):\n    return x + 1",
    "1, 2, 3, 4, 5, 6, 7, 8",
    "Water boils at one hundred",
    "aaaaaaaaaaaaaaaa",
    "zyxwvutsrqponmlk",
    "It was the best of times",
)
PROMPT_TOKENS = 8
ALTERNATING = ModelSpec(layers=4, sliding_window=16, sliding_layers="alternate")
NEW_TOKENS = 64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: these models are too small to share out among several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def _load(directory: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)


def test_same_seed_same_bytes_other_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        make_model(tmp_path / name, ModelSpec(seed=seed))
    assert _files(tmp_path / "a") == _files(tmp_path / "b")
    first, other = _files(tmp_path / "a"), _files(tmp_path / "c")
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["config.json"] == other["config.json"]


def test_another_layer_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    make_model(tmp_path / "two", ModelSpec(layers=2))
    make_model(tmp_path / "three", ModelSpec(layers=3))
    two = load_file(tmp_path / "two" / "model.safetensors")
    three = load_file(tmp_path / "three" / "model.safetensors")
    assert set(two) < set(three)
    assert all((two[name] == three[name]).all() for name in two)


@pytest.mark.parametrize("spec", [ModelSpec(), ModelSpec(seed=1), ALTERNATING], ids=str)
def test_logits_are_spread_like_a_trained_models(tmp_path: Path, spec: ModelSpec) -> None:
    make_model(tmp_path / "model", spec)
    model, tokenizer = _load(tmp_path / "model")
    assert len(tokenizer) == model.config.vocab_size == VOCAB_SIZE
    prompts = torch.tensor([tokenizer(prompt).input_ids[:PROMPT_TOKENS] for prompt in PROMPTS])
    with torch.no_grad():
        ids = model.generate(
            prompts,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        logits = model(ids).logits[:, PROMPT_TOKENS - 1 : -1].double()
    continuations = {tuple(tokens) for tokens in ids[:, PROMPT_TOKENS:].tolist()}
    best = logits.topk(2).values
    assert (best[..., 0] - best[..., 1]).median() > 0.5
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    assert 1.0 < entropy.median() < 4.0
    assert len(continuations) == len(PROMPTS)
    assert min(len(set(tokens)) for tokens in continuations) > NEW_TOKENS // 4


@pytest.mark.parametrize(
    ("spec", "sees_the_first_token"),
    [
        (ModelSpec(), True),
        (ModelSpec(sliding_window=8), False),
        (ALTERNATING, True),
        (ModelSpec(layers=2, sliding_window=8, sliding_layers="alternate"), True),
    ],
    ids=str,
)
def test_the_first_token_counts_unless_every_layer_slides(
    tmp_path: Path, spec: ModelSpec, sees_the_first_token: bool
) -> None:
    make_model(tmp_path / "model", spec)
    model, _ = _load(tmp_path / "model")
    ids = torch.arange(5, 37)[None]
    other = ids.clone()
    other[0, 0] = 200
    with torch.no_grad():
        moved = (model(ids).logits[0, -1] - model(other).logits[0, -1]).abs().max().item()
    assert (moved > 0.5) == sees_the_first_token
    assert sees_the_first_token or moved == 0.0


def test_every_id_decodes_and_bytes_survive(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    make_model(tmp_path / "model", ModelSpec())
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert all(tokenizer.id_to_token(token_id) for token_id in range(VOCAB_SIZE))
    text = "Grüße, 世界 <bos> \x00\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text.replace(
        "<bos>", ""
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed is -1; choose a whole number from 0"),
        ({"layers": 0}, "layers is 0; choose a whole number from 1 to 64"),
        ({"sliding_window": 0}, "sliding_window is 0; choose"),
        ({"sliding_layers": "some"}, "sliding_layers is 'some'; choose 'all' or 'alternate'"),
        ({"sliding_layers": "alternate"}, "need a sliding window and at least 2 layers"),
    ],
)
def test_a_spec_out_of_bounds_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec(**values)


def test_a_folder_made_here_is_replaced_and_a_foreign_one_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model", ModelSpec(seed=1))
    make_model(tmp_path / "model", ModelSpec(seed=2))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    make_model(foreign, ModelSpec())
    (foreign / "mrv2_model.json").unlink()
    before = _files(foreign)
    with pytest.raises(FileExistsError, match="name a new or empty folder"):
        make_model(foreign, ModelSpec(seed=3))
    assert _files(foreign) == before
    with pytest.raises(FileExistsError, match="is a file"):
        make_model(foreign / "config.json", ModelSpec())


def test_the_cache_makes_each_spec_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    first = cached_model(ModelSpec(seed=1), tmp_path / "cache")
    made_at = (first / "config.json").stat().st_mtime_ns
    assert cached_model(ModelSpec(seed=1), tmp_path / "cache") == first
    assert (first / "config.json").stat().st_mtime_ns == made_at
    second = cached_model(ModelSpec(seed=2), tmp_path / "cache")
    assert sorted((tmp_path / "cache").iterdir()) == sorted([first, second])
    make_model(tmp_path / "plain", ModelSpec(seed=1))
    assert _files(first) == _files(tmp_path / "plain")


def test_a_checkpoint_passes_the_folder_check(tmp_path: Path) -> None:
    make_model(tmp_path, ModelSpec())
    check_model_folder(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_named_with_the_remedy(tmp_path: Path) -> None:
    config = tmp_path / "config.json"

    def refusal() -> str:
        with pytest.raises(ModelFolderError) as caught:
            check_model_folder(tmp_path)
        assert "mrv2-diff make-model DIR" in str(caught.value)
        return str(caught.value)

    assert "has no config.json" in refusal()
    config.write_text("{ broken")
    assert "is not JSON" in refusal()
    config.write_text("[]")
    assert "holds no JSON object" in refusal()
    config.write_text("{}")
    assert "names no 'architectures'" in refusal()
    config.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert "holds no weights" in refusal()
    (tmp_path / "model.safetensors").touch()
    assert "are an empty file" in refusal()
    with pytest.raises(ModelFolderError, match="does not exist"):
        check_model_folder(tmp_path / "nowhere")
