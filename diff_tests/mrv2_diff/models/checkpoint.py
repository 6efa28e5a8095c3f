"""Writes a tiny checkpoint whose logits are spread like a trained model's.

A random model's logits are often near ties, in which any rounding changes the token, or ignore
the context, in which case a runner could mix up requests unseen. The scales below avoid both.
Measured with transformers in float32, 64 greedy tokens after each of 8 prompts, seeds 0 to 3:
the likeliest token leads the next by 0.79 to 0.91 (median; 5 % of the steps lead by less than
0.06), the entropy is 2.4 to 2.5 nats (median; 0.05 to 3.9), no two prompts continue alike, a
continuation has 48 different tokens (median), and another first token moves a logit 31 tokens
later by 1.8 to 4.0. Four layers, and layers that alternate, differ little from that.

Every tensor is drawn from a generator of its own, seeded by the spec's seed and the tensor's
name, so that adding a layer leaves the others as they were.
"""

import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mrv2_diff.models.spec import MAX_POSITIONS, ModelSpec
from mrv2_diff.models.tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

HIDDEN = 128
INTERMEDIATE = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32

EMBEDDING_SCALE = 0.5
"""Below the unit output of a branch, so that context counts for more than the last token."""
QUERY_GAIN = 2.0
"""Standard deviation of attention scores: heads attend to a few tokens, not to all alike."""
HEAD_SCALE = 0.3
"""Times sqrt(HIDDEN), the standard deviation of the logits: 3.4."""

MARKER = "mrv2_model.json"
"""Says which spec made the folder; a folder without it is not overwritten."""

FILES = (
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", MARKER,
)  # fmt: skip

Array = npt.NDArray[np.float32]


def make_model(directory: Path, spec: ModelSpec) -> None:
    """Write the checkpoint of `spec` into `directory`, replacing only one that was made here.

    Raises:
        FileExistsError: The folder holds something else. Names it and the remedy.
        OSError: The folder cannot be written.
    """
    _refuse_foreign(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".mrv2-model-", dir=directory.parent) as made:
        _write(Path(made), spec)
        directory.mkdir(exist_ok=True)
        for name in FILES:
            os.replace(Path(made, name), directory / name)


def cached_model(spec: ModelSpec, root: Path | None = None) -> Path:
    """Return a folder with the checkpoint of `spec`, made at most once under `root`.

    Several processes may ask at the same time: each makes its own and the first rename wins.

    Args:
        spec: The checkpoint.
        root: Folder of all checkpoints. None: `mrv2/models` in the user's cache folder.
    """
    root = root if root is not None else _cache_root()
    directory = root / spec.key
    if directory.is_dir():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
    try:
        _write(made, spec)
        made.chmod(0o755)
        made.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return directory


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mrv2" / "models"


def _refuse_foreign(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file; name a new or empty folder")
    if not directory.is_dir() or (directory / MARKER).is_file():
        return
    foreign = sorted(entry.name for entry in directory.iterdir())
    if foreign:
        raise FileExistsError(
            f"{directory} holds {foreign[0]!r} and was not made by this command; "
            f"name a new or empty folder"
        )


def _write(directory: Path, spec: ModelSpec) -> None:
    from safetensors.numpy import save  # loads a native library

    _write_json(directory / "config.json", _config(spec))
    weights = save(_weights(spec), metadata={"format": "pt"})
    (directory / "model.safetensors").write_bytes(weights)
    write_tokenizer(directory, MAX_POSITIONS)
    _write_json(directory / MARKER, {"key": spec.key, "seed": spec.seed})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _config(spec: ModelSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "layer_types": spec.layer_types,
        "sliding_window": spec.sliding_window,
    }
    if _alternates(spec):
        return {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", **config}
    windowed = spec.sliding_window is not None
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **config,
        "use_sliding_window": windowed,
        "max_window_layers": 0 if windowed else spec.layers,
    }


def _alternates(spec: ModelSpec) -> bool:
    return len(set(spec.layer_types)) > 1


def _weights(spec: ModelSpec) -> dict[str, Array]:
    weights = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN, EMBEDDING_SCALE),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN, HEAD_SCALE),
    }
    norms = {"model.norm.weight": (HIDDEN, 1.0)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        weights |= {prefix + name: shape for name, shape in _layer_matrices().items()}
        norms |= {prefix + name: shape for name, shape in _layer_norms(spec).items()}
    drawn = {
        name: _draw(spec.seed, name, rows, columns, scale)
        for name, (rows, columns, scale) in weights.items()
    }
    return drawn | {
        name: np.full(size, value, dtype=np.float32) for name, (size, value) in norms.items()
    }


def _layer_matrices() -> dict[str, tuple[int, int, float]]:
    """Rows, columns and scale of a layer's matrices: each gives unit output from unit input."""
    into = HIDDEN**-0.5
    return {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN, into),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN, into),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN, into),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM, into),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN, into),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN, into),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE, INTERMEDIATE**-0.5),
    }


def _layer_norms(spec: ModelSpec) -> dict[str, tuple[int, float]]:
    """Size and value of a layer's norms. EXAONE 4 normalises what leaves a branch."""
    if _alternates(spec):
        around = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    else:
        around = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return dict.fromkeys(around, (HIDDEN, 1.0)) | {
        "self_attn.q_norm.weight": (HEAD_DIM, QUERY_GAIN),
        "self_attn.k_norm.weight": (HEAD_DIM, 1.0),
    }


def _draw(seed: int, name: str, rows: int, columns: int, scale: float) -> Array:
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)
