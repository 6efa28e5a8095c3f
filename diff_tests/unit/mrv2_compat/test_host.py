"""What the ports over vLLM ask of vLLM's objects, with fakes of those."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrv2.ports import AttentionPlanner, Captures, ForwardInputs

pytestmark = pytest.mark.vllm


# The model.


class Module(torch.nn.Module):
    """Returns what it was told to, and keeps what it was given."""

    def __init__(self, returns: Any) -> None:
        super().__init__()
        self.returns, self.given = returns, {}  # type: ignore[var-annotated]

    def forward(self, **given: Any) -> Any:
        self.given = given
        return self.returns


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each forward context that is entered."""
    from mrv2_compat.vllm_v1.host import model

    entered = []

    @contextmanager
    def entering(metadata: Any, _config: Any, **options: Any) -> Iterator[None]:
        entered.append({"metadata": metadata, **options})
        yield

    monkeypatch.setattr(model, "set_forward_context", entering)
    return entered


def run(returns: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
    from mrv2_compat.vllm_v1.host.model import VllmModel

    module = Module(returns)
    given = {
        "input_ids": torch.arange(4, dtype=torch.int32),
        "positions": torch.arange(4),
        "attention": None,
        **inputs,
    }
    config: Any = None
    return VllmModel(module, config).forward(ForwardInputs(**given)), module.given


def test_a_plain_model_is_given_tokens_and_positions(contexts: list[dict[str, Any]]) -> None:
    hidden = torch.ones(4, 2)
    output, given = run(hidden)
    assert output.hidden is hidden
    assert (output.auxiliary, dict(output.intermediate)) == ((), {})
    assert set(given) == {"input_ids", "positions", "intermediate_tensors", "inputs_embeds"}
    assert given["intermediate_tensors"] is given["inputs_embeds"] is None
    assert contexts[0]["num_tokens"] == 4
    assert contexts[0]["metadata"] is contexts[0]["slot_mapping"] is None


def test_embeddings_take_the_place_of_tokens(contexts: list[dict[str, Any]]) -> None:
    embeddings = torch.ones(4, 2)
    _, given = run(torch.ones(4, 2), inputs_embeds=embeddings)
    assert given["inputs_embeds"] is embeddings
    assert given["input_ids"] is None


def test_positions_of_several_dimensions_count_tokens(contexts: list[dict[str, Any]]) -> None:
    positions = torch.zeros(3, 4, dtype=torch.int64)
    _, given = run(torch.ones(4, 2), positions=positions)
    assert given["positions"] is positions
    assert contexts[0]["num_tokens"] == 4


def test_further_inputs_have_the_models_own_names(contexts: list[dict[str, Any]]) -> None:
    mapping = torch.zeros(4)
    _, given = run(torch.ones(4, 2), further={"adapter_mapping": mapping})
    assert given["adapter_mapping"] is mapping


def test_a_model_that_also_returns_hidden_states_of_layers(contexts: list[dict[str, Any]]) -> None:
    hidden, layers = torch.ones(4, 2), [torch.zeros(4, 2), torch.full((4, 2), 2.0)]
    output, _ = run((hidden, layers))
    assert output.hidden is hidden
    assert all(a is b for a, b in zip(output.auxiliary, layers, strict=True))


def test_a_part_of_a_model_takes_and_returns_intermediate_tensors(
    contexts: list[dict[str, Any]],
) -> None:
    from vllm.sequence import IntermediateTensors

    made = {"hidden_states": torch.ones(4, 2), "residual": torch.zeros(4, 2)}
    before = {"hidden_states": torch.zeros(4, 2), "residual": torch.ones(4, 2)}
    output, given = run(IntermediateTensors(made), intermediate=before)
    assert isinstance(given["intermediate_tensors"], IntermediateTensors)
    assert given["intermediate_tensors"].tensors == before
    assert output.hidden is made["hidden_states"]
    assert dict(output.intermediate) == made


# Attention.


def group(name: str, support: str = "ALWAYS", threshold: int | None = None) -> Any:
    """An attention group of a backend with this name."""
    from vllm.v1.attention.backend import AttentionCGSupport

    builder = SimpleNamespace(reorder_batch_threshold=threshold)
    builder_cls = SimpleNamespace(
        get_cudagraph_support=lambda _config, _spec: AttentionCGSupport[support]
    )
    return SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: name, get_builder_cls=lambda: builder_cls),
        kv_cache_spec=None,
        get_metadata_builder=lambda: builder,
    )


def planner(*groups: Any) -> AttentionPlanner:
    from mrv2_compat.vllm_v1.host.attention import VllmAttentionPlanner

    config: Any = SimpleNamespace(kv_cache_groups=[])
    return VllmAttentionPlanner([groups], config, None)


def test_the_backends_of_today_keep_the_hosts_order_and_are_captured_whole() -> None:
    for name in ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"):
        made = planner(group(name, threshold=1))
        assert made.decode_threshold is None
        assert made.captures is Captures.WHOLE
        assert not made.plans_replays


def test_a_backend_that_wants_decodes_first_says_up_to_which_length() -> None:
    assert planner(group("OTHER", threshold=4), group("FLASH_ATTN")).decode_threshold == 4
    wanting = (group("OTHER", threshold=4), group("MORE", threshold=1), group("NONE"))
    assert planner(*wanting).decode_threshold == 1
    assert planner(group("OTHER")).decode_threshold is None


@pytest.mark.parametrize(
    ("support", "captures"),
    [
        ("ALWAYS", Captures.WHOLE),
        ("UNIFORM_BATCH", Captures.WHOLE),
        ("UNIFORM_SINGLE_TOKEN_DECODE", Captures.WHOLE),
        ("NEVER", Captures.FORWARD),
    ],
)
def test_what_may_be_captured_is_the_least_that_a_builder_supports(
    support: str, captures: Captures
) -> None:
    assert planner(group("FLASH_ATTN"), group("OTHER", support)).captures is captures


@pytest.mark.parametrize("name", ["CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"])
def test_no_builder_of_today_states_an_order(name: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    try:
        backend = AttentionBackendEnum[name].get_class()
    except ImportError as error:
        pytest.skip(f"{name} needs what is not installed here: {error}")
    assert backend.get_builder_cls().reorder_batch_threshold is None
