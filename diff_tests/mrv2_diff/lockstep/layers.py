"""Copies of the hidden states behind each layer of a model, by forward hooks on its layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mrv2.errors import ConfigError


class LayerCopies:
    """Keeps what each layer of a model gave in the last forward.

    Args:
        model: One of vLLM's. Its layers are its longest list of modules.

    Raises:
        ConfigError: The model has no such list.
    """

    def __init__(self, model: nn.Module) -> None:
        self._states: list[Tensor] = []
        self._handles: list[RemovableHandle] = []
        for number, layer in enumerate(layers_of(model)):
            self._handles.append(layer.register_forward_hook(self._keeper(number)))

    def take(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Return the states of a forward's first tokens, and forget them.

        Returns:
            [num_tokens, hidden_size] float32 for each layer.
        """
        taken = tuple(state[:num_tokens] for state in self._states)
        self._states = []
        return taken

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keeper(self, number: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if number == 0:
                self._states = []
            self._states.append(_stream(output))

        return keep


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return a model's layers.

    Raises:
        ConfigError: It has none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of layers to look at; run without --layers"
        )
    return max(lists, key=len)


def _stream(output: Any) -> Tensor:
    """Return a copy of the residual stream, which some layers return in two parts to be added."""
    parts = output if isinstance(output, tuple) else (output,)
    kept = [part.detach().float() for part in parts[:2] if isinstance(part, Tensor)]
    return torch.stack(kept).sum(0).cpu()
