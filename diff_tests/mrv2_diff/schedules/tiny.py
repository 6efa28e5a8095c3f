"""Schedules of a tiny checkpoint in our runner, in either order, against V1's own tokens.

V1 runs every request in an engine of its own: synchronous, all in one batch, nothing chunked,
cached or preempted. Ours runs the same requests through whatever a schedule does to them, and its
tokens must be V1's. Both are greedy, since the two runners draw from different generators.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from mrv2_diff.case import EngineSpec
from mrv2_diff.lockstep.engine import LockstepEngine
from mrv2_diff.lockstep.values import poison
from mrv2_diff.models.checkpoint import cached_model
from mrv2_diff.models.spec import ModelSpec
from mrv2_diff.models.tokenizer import EOS_ID, VOCAB_SIZE
from mrv2_diff.schedules import generator
from mrv2_diff.schedules.actions import (
    PREFIX_LEN,
    Action,
    Arrive,
    Model,
    Setup,
)
from mrv2_diff.schedules.driver import Driver
from mrv2_diff.schedules.engine import ScheduledEngine, settle
from mrv2_diff.schedules.expected import Expected, up_to
from mrv2_diff.schedules.params import sampling_params

# isort: split
import torch
from vllm.config import set_current_vllm_config
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from mrv2_compat.vllm_v1.runner import VllmRunner

_SMALL = Setup(
    num_blocks=7,
    block_size=32,
    max_num_reqs=5,
    max_num_tokens=16,
    max_model_len=128,
    vocab_size=VOCAB_SIZE,
)
SETUPS: tuple[Setup, ...] = tuple(
    replace(setup, is_async=is_async)
    for is_async in (False, True)
    for setup in (
        _SMALL,
        replace(_SMALL, by_priority=True),
        replace(_SMALL, num_blocks=6, max_num_reqs=3, max_num_tokens=9),
        replace(_SMALL, num_blocks=12, max_num_reqs=8, max_num_tokens=24),
        replace(_SMALL, prefix_caching=False),
    )
)
"""A request takes one to four blocks, so several do not fit; a prefix of 40 tokens fills one."""

_LONG_PREFIX = 17
"""From as many tokens on, a prefix is made long enough for a block."""
_LONGER = 4
_MARGIN = 1e-4
"""Two logits that are closer, relative to their size, may change places when rounded otherwise;
float32 resolves a thousandth of it."""
_MAX_KNOWN = 1500
"""Outputs that are kept."""


class V1Expectations:
    """What V1 returns, from prompts that it runs in one piece.

    A request is asked for no more tokens than come before the first near tie: behind it, either
    token is right.

    Args:
        engine: V1's, with room for everything.
    """

    def __init__(self, engine: LockstepEngine) -> None:
        self._engine = engine
        self._known: dict[tuple[object, ...], list[int]] = {}
        self.num_cut = 0
        """Outputs that a near tie made shorter."""

    def prepare(self, actions: Iterable[Action]) -> None:
        """Run the requests of a schedule in one batch. Turns of a session follow one by one."""
        arrivals = [action for action in actions if isinstance(action, Arrive)]
        self._run([(arrival.prompt(VOCAB_SIZE), arrival) for arrival in arrivals])

    def outputs(self, prompt: Sequence[int], request: Arrive) -> Expected:
        """Return the output of a request."""
        key = _key(prompt, request)
        if key not in self._known:
            self._run([(list(prompt), request)])
        tokens = up_to(self._known[key], request.stop)
        is_cut = len(tokens) < request.max_tokens and request.stop not in tokens[-1:]
        return Expected(tokens=tokens, max_tokens=len(tokens) if is_cut else request.max_tokens)

    def _run(self, requests: Sequence[tuple[list[int], Arrive]]) -> None:
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        missing = {_key(*request): request for request in requests}
        missing = {key: request for key, request in missing.items() if key not in self._known}
        outputs = self._engine.generate(
            [prompt for prompt, _ in missing.values()],
            [_with_gaps(request) for _, request in missing.values()],
        )
        for key, output in zip(missing, outputs, strict=True):
            tokens = _before_a_tie(output)
            self.num_cut += len(tokens) < len(output.token_ids)
            self._known[key] = tokens


class TinyBench:
    """V1 in an engine, and a runner of ours for each setup.

    Args:
        spec: Of the checkpoint.
    """

    model: Model = "tiny"
    setups = SETUPS

    def __init__(self, spec: ModelSpec | None = None) -> None:
        torch.set_num_threads(1)  # a tiny model's operations are too small to share
        self._v1 = LockstepEngine(_ROOMY, cached_model(spec or ModelSpec()))
        self.expectations = V1Expectations(self._v1)
        """What V1 returns."""
        self._runners: dict[Setup, VllmRunner] = {}

    def driver(self, setup: Setup) -> Driver:
        """Return a driver of a runner that has no request."""
        return Driver(setup, engine=self._engine(setup), expectations=self.expectations)

    def actions(self, seed: int, setup: Setup, count: int) -> Iterator[Action]:
        """Yield so many random actions; V1 runs their requests first."""
        drawn = [_adapted(action) for action in generator.actions(seed, setup, count)]
        self.expectations.prepare(drawn)
        return iter(drawn)

    def close(self) -> None:
        """Shut V1's engine down."""
        self._runners.clear()
        self._v1.close()

    def _engine(self, setup: Setup) -> "_TinyEngine":
        worker = self._v1.worker
        config = worker.candidate_config()
        settle(config, setup)
        if setup not in self._runners:
            with set_current_vllm_config(config):
                runner = VllmRunner(config, torch.device("cpu"))
                runner.load_model()
                runner.get_kv_cache_spec()
                runner.initialize_kv_cache(worker.kv_cache_config())
            self._runners[setup] = runner
        runner = self._runners[setup]
        runner.reset()
        poison(runner.kv_caches)
        blocks = dataclasses.replace(worker.kv_cache_config(), num_blocks=setup.num_blocks)
        return _TinyEngine(setup, config, blocks, runner)


class _TinyEngine(ScheduledEngine):
    """A scheduler of few blocks, and our runner of a checkpoint."""

    eos_token_id = EOS_ID

    def spoil(self, block: int, offset: int) -> None:
        """Keep the slot: vLLM packs the keys of a block for its CPU kernels, many slots in a word.

        HashLM's schedules overwrite what failed to load.
        """


def _adapted(action: Action) -> Action:
    """Return an action for a checkpoint: greedy, and a longer prefix fills a block, to be cached.

    Such a request goes on over more blocks, so that it is often preempted.
    """
    if not isinstance(action, Arrive):
        return action
    action = replace(action, temperature=0.0)
    if action.prefix_len < _LONG_PREFIX:
        return action
    return replace(action, prefix_len=PREFIX_LEN, max_tokens=_LONGER * action.max_tokens)


def _key(prompt: Sequence[int], request: Arrive) -> tuple[object, ...]:
    return (*prompt, repr(request.options), request.stop, request.max_tokens)


def _with_gaps(request: Arrive) -> SamplingParams:
    """Return a request's parameters, with the two largest of the logits that it is drawn from."""
    params = sampling_params(request)
    params.logprobs = 2
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _before_a_tie(output: CompletionOutput) -> list[int]:
    """Return the tokens before the first that rounding may change."""
    tokens: list[int] = []
    assert output.logprobs is not None
    for token, logits in zip(output.token_ids, output.logprobs, strict=True):
        first, second = sorted((entry.logprob for entry in logits.values()), reverse=True)[:2]
        if first - second <= _MARGIN * max(1.0, abs(first)):
            break
        tokens.append(token)
    return tokens


_ROOMY = EngineSpec(
    model=ModelSpec(),
    max_model_len=128,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    num_blocks=64 * 4 + 1,
    logprobs_mode="processed_logits",
)
