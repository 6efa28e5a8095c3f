"""What a tiny checkpoint is like, as a value; its hash names the checkpoint in the cache.

Two architectures serve three arrangements of attention. Qwen3 in vLLM knows one window for all
layers, so full attention and sliding attention throughout are Qwen3. Layers that alternate, and
with them two KV cache groups, need an architecture in which both vLLM and transformers honour
`layer_types`; that is EXAONE 4, which like Qwen3 normalises queries and keys.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

LAYOUT_VERSION = 1
"""Raise it when the same spec starts to give other bytes; cached checkpoints are then made anew."""

MAX_POSITIONS = 2048

Arrangement = Literal["all", "alternate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A checkpoint that is made from a seed.

    Raises:
        ValueError: A field is out of its bounds. Names field, value, bound and remedy.
    """

    seed: int = 0
    layers: int = 2
    sliding_window: int | None = None
    """Tokens that a sliding layer sees, the current one included. None: full attention."""
    sliding_layers: Arrangement = "all"
    """`all`: one sliding KV group. `alternate`: even layers slide, odd ones see all; two groups."""

    def __post_init__(self) -> None:
        """Refuse what no checkpoint can be made of."""
        _check_bounds("seed", self.seed, 0, 2**32 - 1)
        _check_bounds("layers", self.layers, 1, 64)
        if self.sliding_window is not None:
            _check_bounds("sliding_window", self.sliding_window, 1, MAX_POSITIONS)
        if self.sliding_layers not in ("all", "alternate"):
            raise ValueError(
                f"sliding_layers is {self.sliding_layers!r}; choose 'all' or 'alternate'"
            )
        if self.sliding_layers == "alternate" and (self.sliding_window is None or self.layers < 2):
            raise ValueError(
                f"alternating sliding layers need a sliding window and at least 2 layers; got "
                f"sliding_window={self.sliding_window}, layers={self.layers}: set both, or "
                f"sliding_layers='all'"
            )

    @property
    def layer_types(self) -> list[str]:
        """Kind of attention of each layer, in the words of a Hugging Face config."""
        if self.sliding_window is None:
            return ["full_attention"] * self.layers
        if self.sliding_layers == "all":
            return ["sliding_attention"] * self.layers
        return [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(self.layers)
        ]

    @property
    def key(self) -> str:
        """Name of this spec that changes whenever the bytes of its checkpoint may change."""
        text = json.dumps({"layout": LAYOUT_VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_bounds(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; choose a whole number from {low} to {high}")
