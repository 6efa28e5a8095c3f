"""Hidden states behind each layer, as they were when the layer gave them."""

import pytest
import torch
from torch import Tensor, nn

from mrv2.errors import ConfigError
from mrv2_diff.lockstep.layers import LayerCopies


class Layer(nn.Module):
    """Adds 1 to its stream, and returns it in two parts, as vLLM's layers do."""

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        stream = hidden if residual is None else hidden + residual
        return torch.ones_like(stream), stream


class Model(nn.Module):
    """Three layers, beside a shorter list."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Identity()])
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        assert residual is not None
        normed: Tensor = residual.add_(hidden)  # in place, like a fused norm
        return normed


def test_each_layer_is_kept_as_it_was() -> None:
    model = Model()
    copies = LayerCopies(model)
    for start in (5.0, 7.0):  # the last forward counts
        model(torch.full((4, 2), start))
    taken = copies.take(3)
    assert [state.shape for state in taken] == [(3, 2)] * 3
    assert [float(state[0, 0]) for state in taken] == [8.0, 9.0, 10.0]
    assert copies.take(3) == ()


def test_a_layer_may_return_one_tensor_of_any_float() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2, dtype=torch.bfloat16)])
    copies = LayerCopies(model)
    model.layers[0](torch.ones(1, 2, dtype=torch.bfloat16))
    (state,) = copies.take(1)
    assert state.dtype is torch.float32


def test_closed_copies_keep_nothing() -> None:
    model = Model()
    copies = LayerCopies(model)
    copies.close()
    model(torch.ones(1, 2))
    assert copies.take(1) == ()


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="run without --layers"):
        LayerCopies(nn.Linear(2, 2))
