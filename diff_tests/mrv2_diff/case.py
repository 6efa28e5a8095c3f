"""What is run, as data: a case, the engine that it needs, and the requests that arrive at it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.verdict import Verdict

_MAPPINGS = frozenset({"logit_bias", "extra_args", "structured_outputs"})
"""Options whose value is a mapping, written as pairs."""

GRAPHS = ("none", "FULL_DECODE_ONLY")
"""How steps may reach a device: operation by operation, or decodes as CUDA graphs."""
CAPTURE_SIZES = (1, 2, 4, 8, 16)
"""Requests of the decodes that are captured, beside as many as an engine takes. The others are
padded."""

DEVICES = frozenset({"cpu", "cuda"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The part of vLLM's configuration that a case chooses.

    Cases with equal specs share an engine.
    """

    model: ModelSpec
    max_model_len: int = 256
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    num_blocks: int = 160
    """KV blocks; few of them force preemptions. One is vLLM's null block."""
    block_size: int = 32
    """Tokens in a block. vLLM's CPU attention takes multiples of 32, and so do the others."""
    prefix_caching: bool = False
    dtype: str = "float32"
    """Of weights and KV cache.

    The tightest floor shows the most; vLLM's own choice would be bfloat16.
    """
    logprobs_mode: str = "raw_logprobs"
    """What is returned as logprobs: of raw or processed logits, normalised or as they are."""
    tokenizer: bool = False
    """Whether the engine has its tokenizer, which grammars and thinking markers need."""
    reasoning: tuple[str, str] | None = None
    """Text that opens and closes a thinking section."""

    def arguments(self, device: str = "cpu", graphs: str = "none") -> dict[str, Any]:
        """Return the arguments of vLLM's `LLM`, without the model.

        Args:
            device: `cpu` or `cuda`.
            graphs: One of `GRAPHS`; a CPU has none.
        """
        start, end = self.reasoning or ("", "")
        reasoning = {"reasoning_start_str": start, "reasoning_end_str": end}
        return {
            "skip_tokenizer_init": not self.tokenizer,
            "reasoning_config": reasoning if self.reasoning else None,
            "async_scheduling": False,  # one step at a time, so that two runners can run it
            "seed": 0,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_blocks,
            "enable_prefix_caching": self.prefix_caching,
            "max_logprobs": -1,
            "logprobs_mode": self.logprobs_mode,
            "use_tqdm_on_load": False,
            **_of_device(device, self.dtype),
            **_of_graphs(graphs, self.max_num_seqs),
        }


def _of_device(device: str, dtype: str) -> dict[str, Any]:
    """Return the arguments of an engine that may share a CUDA device with others."""
    if device == "cpu":
        return {}
    return {
        # FlashAttention does not take float32.
        "attention_backend": "TRITON_ATTN" if dtype == "float32" else "FLASH_ATTN",
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 30,  # in place of a measurement; the blocks are counted
        "kernel_config": {"enable_jit_warmup": False},  # half a minute, and nothing is timed
    }


def _of_graphs(graphs: str, max_num_seqs: int) -> dict[str, Any]:
    if graphs == "none":
        return {"enforce_eager": True}
    return {
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": graphs,
            "cudagraph_capture_sizes": sorted({*CAPTURE_SIZES, max_num_seqs}),
        },
        "cudagraph_metrics": True,  # V1 says how each step ran
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """A request that arrives before a step."""

    step: int
    req_id: str
    prompt: tuple[int, ...]
    """Token ids; taken modulo the vocabulary of the model that is run."""
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    options: tuple[tuple[str, object], ...] = ()
    """Further sampling parameters by vLLM's name. A list is a tuple here, a mapping its pairs.

    `bad_words` are token ids, since the engine has no tokenizer.
    """

    @property
    def further(self) -> dict[str, object]:
        """The options with their mappings as mappings; lists remain tuples."""
        return {
            name: dict(value) if name in _MAPPINGS and isinstance(value, tuple) else value
            for name, value in self.options
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """A request that is given up before a step."""

    step: int
    req_id: str


Event = Add | Abort


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Where the reference is expected to leave what is right, and the candidate is not.

    It excuses nothing by itself: in each row the reference must be shown to differ from the right
    value, which is computed from its own logits, and the candidate to have it. A case in which that
    never happens does not pass.
    """

    value: Literal["processed_logits", "logprobs"]
    """The first value of the chain that differs; what follows from it in the row is not compared
    with the reference either."""
    verdict: Literal[Verdict.REFERENCE_WRONG, Verdict.KNOWN_DIFFERENCE]
    why: str
    """What the reference does, in a few words, or the decision record that says why we do not."""
    is_certain: bool = True
    """False where the case has too few requests left to be sure that it happens."""
    on: frozenset[str] = DEVICES
    """Devices on which the reference departs. On others the case is judged like any other."""
    elsewhere: str = ""
    """Why it does not on others, for the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine in a process of its own."""

    runner: Literal["v1", "mrv2"]
    engine: tuple[tuple[str, object], ...] = ()
    """Arguments of vLLM's `LLM` beyond those of the case's engine. A config's mapping is pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Three engines that run a case's requests apart, each in a process of its own.

    For a fault of the reference that would end a lockstep run, or of a feature that the candidate
    refuses. It excuses nothing by itself: the candidate's tokens must be the right ones, and the
    reference must be shown to crash or to be wrong. Where it is not, the case does not pass.
    """

    reference: Variant
    candidate: Variant
    right: Variant
    """The same work without what goes wrong."""
    raises: str | None = None
    """Part of the message with which the reference must fail; None where its tokens are wrong."""
    why: str
    """What goes wrong, in a few words."""
    on: frozenset[str] = DEVICES
    """Devices on which it does. On others the case runs in lockstep, like any other."""
    elsewhere: str = ""
    """Why it does not on others, for the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Most that a candidate may take of memory and time, over what the reference takes.

    A budget is what is wanted, not what is so: one that is not kept stays as it is.
    """

    memory: float = 1.02
    """Of the largest sum of tensor bytes in any phase of the start or of a step."""
    latency: float = 1.05
    """Of a step's time, on the host and on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that is compared."""

    id: str
    area: str
    feature: str
    title: str
    engine: EngineSpec
    workload: Callable[[], tuple[Event, ...]]
    """Makes the events, sorted by step; the same at every call."""
    expects: frozenset[str] = frozenset()
    """Kinds of lifecycle events that must happen, such as `preemptions`.

    A run without them proves nothing.
    """
    departure: Departure | None = None
    apart: Apart | None = None
    """None: the case runs in lockstep."""
    remark: str = ""
    """Said in the record behind its summary."""
    file: str | None = None
    """Name of the file that it was read from; None for a case of the catalog."""
    fault: str | None = None
    """Mutant that is put into the candidate as long as the case runs."""
    budget: Budget = Budget()

    def on(self, device: str) -> "Case":
        """Return the case as it is run on a device: without faults that V1 has not there."""
        here = self
        if here.departure is not None and device not in here.departure.on:
            here = replace(here, departure=None, remark=f"on {device} {here.departure.elsewhere}")
        if here.apart is not None and device not in here.apart.on:
            remark = f"in lockstep, since on {device} {here.apart.elsewhere}"
            here = replace(here, apart=None, remark=remark)
        return here

    @property
    def against_itself(self) -> bool:
        """Whether the reference can be compared with itself.

        Not where it is known to be wrong, nor with a thinking budget: V1 counts sections anew when
        a request misses a step, as it does beside other neighbours.
        """
        if self.departure is not None or self.apart is not None:
            return False
        adds = [event for event in self.workload() if isinstance(event, Add)]
        return not any("thinking_token_budget" in add.further for add in adds)

    @property
    def deterministic(self) -> bool:
        """Whether every request is greedy, so that runners may be compared free."""
        return all(event.temperature == 0.0 for event in self.workload() if isinstance(event, Add))
