"""Custom logits processors of V1's protocol, for engines that tests start.

A request says what it wants in `extra_args`: `climbs` forces the token after the last output, round
the vocabulary; `raises` lets the processor fail for it, "added", "apply" or "late" (at its third
token); `keeps` leaves only the so many likeliest tokens.
"""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

NAMES = tuple(f"{__name__}:{name}" for name in ("Climbs", "ClimbsEach", "Keeps"))
"""As `--logits-processors` takes them."""


def climbed(prompt: list[int], outputs: list[int], vocab_size: int) -> int:
    """Return the token that follows the last one, round the vocabulary."""
    return ((outputs or prompt)[-1] + 1) % vocab_size


class Climbs(LogitsProcessor):
    """Over the whole batch at once."""

    argument = "climbs"

    def __init__(self, *_: Any) -> None:
        self.batch: dict[int, tuple[str, list[int], list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse one argument."""
        if (sampling_params.extra_args or {}).get("climbs") == "down":
            raise ValueError("climbs is 'down'; it must be true")

    def is_argmax_invariant(self) -> bool:
        """Forcing a token is anything but."""
        return False

    def _added(self, params: Any, prompt: Any, outputs: Any) -> Any:
        asked = params.extra_args or {}
        if asked.get("raises") == "added":
            raise KeyError("raises is 'added'")
        if not asked.get(self.argument):
            return None
        return str(asked.get("raises")), prompt, outputs

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch."""
        process_dict_updates(self.batch, batch_update, self._added)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Force the tokens, and fail where it was asked for."""
        for index, (raises, prompt, outputs) in self.batch.items():
            logits[index] = 0.0
            if raises == "apply" or (raises == "late" and len(outputs) == 2):
                raise RuntimeError(f"raises is {raises!r}")
            logits[index, climbed(prompt, outputs, logits.shape[1])] = 100.0
        return logits


class ClimbsEach(AdapterLogitsProcessor):
    """The same by vLLM's adapter for one request, with an argument of its own."""

    def is_argmax_invariant(self) -> bool:
        """Forcing a token is anything but."""
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        """Return what acts on the request; None where it asks for nothing."""
        asked = params.extra_args or {}
        if not asked.get("climbs_each"):
            return None

        def process(prompt: list[int], outputs: list[int], row: torch.Tensor) -> torch.Tensor:
            if asked.get("raises") == "late" and len(outputs) == 2:
                raise RuntimeError("raises is 'late'")
            forced = torch.zeros_like(row)
            forced[climbed(prompt, outputs, len(row))] = 100.0
            return forced

        return process


class Keeps(Climbs):
    """Leaves the likeliest token what it is."""

    argument = "keeps"

    def is_argmax_invariant(self) -> bool:
        """The likeliest token is among those that are kept."""
        return True

    def _added(self, params: Any, prompt: Any, outputs: Any) -> Any:
        return (params.extra_args or {}).get("keeps")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave the likeliest tokens, as many as each request wants."""
        for index, count in self.batch.items():
            threshold = logits[index].topk(int(count)).values[-1]  # type: ignore[call-overload]
            logits[index].masked_fill_(logits[index] < threshold, float("-inf"))
        return logits
