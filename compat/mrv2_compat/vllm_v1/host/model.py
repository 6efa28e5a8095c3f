"""The Model port over a vLLM module and its forward context."""

from typing import Any

from torch import Tensor, nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors

from mrv2.ports import ForwardInputs, ForwardOutput
from mrv2_compat.vllm_v1.host.attention import VllmAttention

_HIDDEN = "hidden_states"
"""Name of the hidden states among vLLM's intermediate tensors."""


class VllmModel:
    """Runs a vLLM model, compiled where vLLM compiled it.

    The pieces of a model that was compiled in pieces replay their CUDA graphs where the inputs say
    so, and capture them at the first such call for a number of tokens.

    Args:
        module: The loaded model.
        vllm_config: The config that the model was built with; its forward context finds the layers
            by it.
    """

    def __init__(self, module: nn.Module, vllm_config: VllmConfig) -> None:
        self.module: Any = module
        self._vllm_config = vllm_config

    def forward(self, inputs: ForwardInputs) -> ForwardOutput:
        """Run the model with the step's attention metadata in vLLM's forward context.

        Where embeddings are given, the model is given no token ids.
        """
        attention = inputs.attention or VllmAttention(None, None)
        assert isinstance(attention, VllmAttention)
        mode = CUDAGraphMode.PIECEWISE if inputs.replays else CUDAGraphMode.NONE
        with set_forward_context(
            attention.metadata,
            self._vllm_config,
            num_tokens=inputs.positions.shape[-1],
            cudagraph_runtime_mode=mode,
            slot_mapping=attention.slots,
        ):
            made = self.module(
                input_ids=inputs.input_ids if inputs.inputs_embeds is None else None,
                positions=inputs.positions,
                intermediate_tensors=(
                    IntermediateTensors(dict(inputs.intermediate)) if inputs.intermediate else None
                ),
                inputs_embeds=inputs.inputs_embeds,
                **inputs.further,
            )
        return _output(made)

    def forward_without_kv(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the model with attention left out, and return its hidden states.

        For compiling it, or finding its peak memory, before there is a KV cache.
        """
        return self.forward(
            ForwardInputs(
                input_ids=input_ids, positions=positions, attention=VllmAttention(None, None)
            )
        ).hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return [num_logits, vocab_size] logits in the model's dtype."""
        logits: Tensor = self.module.compute_logits(hidden)
        return logits


def _output(made: Any) -> ForwardOutput:
    """Return what a module returned: hidden states, those with others behind them, or a part's."""
    if isinstance(made, IntermediateTensors):
        return ForwardOutput(hidden=made.tensors[_HIDDEN], intermediate=made.tensors)
    if isinstance(made, tuple):
        hidden, auxiliary = made
        return ForwardOutput(hidden=hidden, auxiliary=tuple(auxiliary))
    return ForwardOutput(hidden=made)
