"""What a trace says, as typed values: a head, then the events of steps in the order of the calls.

Decoding checks every type and bound, so that a value that was read is of this shape. What a value
means beside the others is checked in `check`. Nothing here imports vLLM.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

MAX_ID = 2**31 - 1

Text = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=MAX_ID)]
Size = Annotated[int, Meta(ge=1, le=MAX_ID)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
RunnerName = Literal["v1", "mrv2"]


class Mask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array of bits as it lies in memory."""

    dtype: Literal["int32"]
    shape: tuple[Count, Count]
    data: bytes
    """Little-endian, row by row."""

    @classmethod
    def of(cls, array: npt.NDArray[np.int32]) -> "Mask":
        """Return a copy of a grammar's bitmask, int32, [requests, words]."""
        rows, words = array.shape
        return cls("int32", (int(rows), int(words)), array.astype("<i4", copy=False).tobytes())

    def array(self) -> npt.NDArray[np.int32]:
        """Return the bits, int32, [requests, words].

        Raises:
            ValueError: There are more or fewer bytes than the shape says.
        """
        rows, words = self.shape
        if 4 * rows * words != len(self.data):
            raise ValueError(
                f"a mask of shape {self.shape} and dtype {self.dtype} has {len(self.data)} bytes, "
                f"not {4 * rows * words}"
            )
        return np.frombuffer(self.data, "<i4").reshape(rows, words).astype(np.int32)


class Params(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The parameters of a request that a runner reads, by vLLM's names. Text is left out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_ID)] = 0
    min_p: float = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: Count | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_ID)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_ID)] | None = None
    logprob_token_ids: list[Count] | None = None
    logit_bias: dict[Count, float] | None = None
    allowed_token_ids: list[Count] | None = None
    stop_token_ids: list[Count] | None = None
    thinking_token_budget: Count | None = None
    eos_token_id: Count | None = None
    all_stop_token_ids: list[Count] = []
    bad_words_token_ids: list[list[Count]] | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken; vLLM's bound."""
        return self.temperature < 1e-5


class NewRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request that a runner is told of for the first time."""

    req_id: Text
    prompt: list[Count]
    params: Params
    block_ids: list[list[Count]]
    """By KV group."""
    num_computed_tokens: Count


class Known(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Requests that it knows, one place each in every list."""

    req_ids: list[Text]
    resumed_req_ids: list[Text]
    all_token_ids: dict[Text, list[Count]]
    new_block_ids: list[list[list[Count]] | None]
    num_computed_tokens: list[Count]
    num_output_tokens: list[Count]


class Executed(
    msgspec.Struct, frozen=True, array_like=True, tag="execute", forbid_unknown_fields=True
):
    """A SchedulerOutput, in the form that vLLM sends to V1's runner."""

    new: list[NewRequest]
    known: Known
    num_scheduled_tokens: dict[Text, Size]
    finished_req_ids: list[Text]
    preempted_req_ids: list[Text] | None
    new_block_ids_to_zero: list[Count] | None
    kv_cache_block_copies: list[tuple[Count, Count]] | None
    has_structured_output_requests: bool
    pending_structured_output_tokens: bool


class Sampled(
    msgspec.Struct, frozen=True, array_like=True, tag="sample", forbid_unknown_fields=True
):
    """The GrammarOutput of a step; where grammars constrain nothing there is none."""

    step: Count
    req_ids: list[Text]
    mask: Mask


class Output(
    msgspec.Struct, frozen=True, array_like=True, tag="output", forbid_unknown_fields=True
):
    """What a step returned; later than the next step's call where steps are queued ahead."""

    step: Count
    req_ids: list[Text]
    token_ids: list[list[Count]]
    """For each request its new tokens; none where its prompt goes on."""


Event = Executed | Sampled | Output


class Tiny(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The spec of a tiny checkpoint, from which a replay makes it again."""

    seed: Count
    layers: Annotated[int, Meta(ge=1, le=64)]
    sliding_window: Size | None
    sliding_layers: Literal["all", "alternate"]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model it was. No path: a name in a file must not decide what is opened."""

    name: Text
    """For people."""
    config_sha256: Hash | None
    """Of config.json; None where the model was no folder."""
    weights_sha256: Hash | None
    """Of the names, sizes, beginnings and ends of the weight files."""
    vocab_size: Size
    tiny: Tiny | None = None


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration, as far as a replay must have the same, by the names of vLLM's `LLM`."""

    dtype: Literal["float32", "float16", "bfloat16"]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    max_model_len: Size
    max_num_seqs: Size
    max_num_batched_tokens: Size
    block_size: Size
    kv_cache_dtype: Text
    enable_prefix_caching: bool
    logprobs_mode: Text
    max_logprobs: Annotated[int, Meta(ge=-1, le=MAX_ID)]
    reasoning_start_str: Text | None = None
    reasoning_end_str: Text | None = None


class HowItRan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replay may do in another way."""

    async_scheduling: bool
    enforce_eager: bool
    cudagraph_mode: Text


class KVGroupFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One KV group."""

    spec: Text
    """Its class."""
    values: dict[Text, Text]
    layers: list[Text]


class KVFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV cache."""

    num_blocks: Size
    num_bytes: Bytes
    groups: Annotated[list[KVGroupFacts], Meta(min_length=1, max_length=64)]


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trace was recorded from."""

    runner: RunnerName
    runner_class: Text
    is_private: bool
    device: Literal["cpu", "cuda"]
    environment: dict[Text, Text]
    vllm: Text
    model: ModelFacts
    engine: EngineFacts
    how: HowItRan
    kv: KVFacts


class End(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands at the end of a whole file."""

    steps: Count
    sha256: bytes
    """Of all bytes before."""
    why: Annotated[str, Meta(max_length=2000)]
    """Why recording ended, for people."""
