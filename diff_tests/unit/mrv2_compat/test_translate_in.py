"""What each event of vLLM's V1-mode scheduler becomes, without a model and without a runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mrv2 import ConfigError, Continuation, NextDecode, ProtocolError, Sampling, StepPlan
from mrv2.errors import UnsupportedByRunner
from mrv2_compat.vllm_v1.features.active import NO_FEATURES, ActiveFeatures
from mrv2_compat.vllm_v1.features.feature import ActiveFeature
from mrv2_compat.vllm_v1.step.ledger import RequestLedger

pytestmark = pytest.mark.vllm

Blocks = tuple[list[int], ...]

VOCAB_SIZE = 100


@dataclass(frozen=True)
class Cached:
    """A request that ran before, as the scheduler repeats it."""

    num_computed: int
    num_outputs: int
    new_blocks: Blocks | None = None
    resumed: bool = False
    all_token_ids: Sequence[int] | None = None


@dataclass
class Adapter:
    """Translates step after step with one ledger."""

    seed: int = 7
    ledger: RequestLedger = field(default_factory=RequestLedger)
    features: ActiveFeatures = NO_FEATURES

    def step(
        self,
        work: Mapping[str, int],
        *,
        new: Sequence[Any] = (),
        cached: Mapping[str, Cached] | None = None,
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
        drafts: Mapping[str, list[int]] | None = None,
    ) -> StepPlan:
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        from mrv2_compat.vllm_v1.step.translate_in import plan_step

        cached = cached or {}
        return plan_step(
            SchedulerOutput(
                scheduled_new_reqs=list(new),
                scheduled_cached_reqs=CachedRequestData(
                    req_ids=list(cached),
                    resumed_req_ids={name for name, known in cached.items() if known.resumed},
                    new_token_ids=[],
                    all_token_ids={
                        name: list(known.all_token_ids)
                        for name, known in cached.items()
                        if known.all_token_ids is not None
                    },
                    new_block_ids=[known.new_blocks for known in cached.values()],
                    num_computed_tokens=[known.num_computed for known in cached.values()],
                    num_output_tokens=[known.num_outputs for known in cached.values()],
                ),
                num_scheduled_tokens=dict(work),
                total_num_scheduled_tokens=sum(work.values()),
                scheduled_spec_decode_tokens=dict(drafts or {}),
                scheduled_encoder_inputs={},
                finished_req_ids=set(finished),
                free_encoder_mm_hashes=[],
                preempted_req_ids=set(preempted) or None,
            ),
            self.ledger,
            self.seed,
            VOCAB_SIZE,
            self.features,
        )


def new(
    req_id: str,
    prompt: list[int] | None,
    blocks: Blocks = ([1],),
    num_computed: int = 0,
    **params: Any,
) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        block_ids=blocks,
        num_computed_tokens=num_computed,
        lora_request=None,
    )


@pytest.fixture
def adapter() -> Adapter:
    return Adapter()


def rows(plan: StepPlan) -> list[tuple[str, int, int, int]]:
    """The scheduled requests: id, tokens, position of the first, known tokens."""
    work = plan.scheduled
    return list(
        zip(
            work.req_ids,
            work.num_tokens,
            work.num_computed_tokens,
            work.num_known_tokens,
            strict=True,
        )
    )


def test_a_new_request_with_a_cached_prefix_and_a_first_chunk(adapter: Adapter) -> None:
    request = new("a", [5, 6, 7, 8, 9], ([3, 4], [9]), 2, temperature=0.5, seed=11, logprobs=4)
    plan = adapter.step({"a": 2}, new=[request])
    (arrival,) = plan.arrivals
    assert arrival.req_id == "a"
    assert arrival.token_ids == [5, 6, 7, 8, 9]
    assert arrival.prompt_len == 5
    assert arrival.num_computed_tokens == 2
    assert arrival.block_ids == ([3, 4], [9])
    assert arrival.sampling == Sampling(temperature=0.5, seed=11, num_logprobs=4)
    assert (plan.departed, plan.continuations) == ((), ())
    assert rows(plan) == [("a", 2, 2, 5)]


def test_later_chunks_and_decodes_bring_only_new_blocks(adapter: Adapter) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6, 7, 8, 9])])
    plan = adapter.step({"a": 3}, cached={"a": Cached(2, 0, ([2], [8]))})
    assert plan.continuations == (Continuation(req_id="a", new_block_ids=([2], [8])),)
    assert rows(plan) == [("a", 3, 2, 5)]
    plan = adapter.step({"a": 1}, cached={"a": Cached(5, 1)})
    assert (plan.departed, plan.arrivals, plan.continuations) == ((), (), ())
    assert rows(plan) == [("a", 1, 5, 6)]


def test_requests_that_ran_before_stand_before_new_ones(adapter: Adapter) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6])])
    plan = adapter.step({"b": 3, "a": 1}, new=[new("b", [1, 2, 3])], cached={"a": Cached(2, 1)})
    assert rows(plan) == [("a", 1, 2, 3), ("b", 3, 0, 3)]


def test_a_request_that_was_not_scheduled_for_a_step_keeps_its_row(adapter: Adapter) -> None:
    adapter.step({"a": 2, "b": 1}, new=[new("a", [5, 6]), new("b", [4])])
    plan = adapter.step({"b": 1}, cached={"b": Cached(1, 1)})
    assert plan.departed == ()
    back = Cached(2, 1, None, all_token_ids=[5, 6, 40])
    plan = adapter.step({"a": 1}, cached={"a": back})
    assert (plan.departed, plan.arrivals, plan.continuations) == ((), (), ())
    assert rows(plan) == [("a", 1, 2, 3)]


def test_a_preempted_request_departs_and_stays_known(adapter: Adapter) -> None:
    adapter.step({"a": 2, "b": 1}, new=[new("a", [5, 6]), new("b", [4])])
    plan = adapter.step({"b": 1}, cached={"b": Cached(1, 1)}, preempted=["a"])
    assert plan.departed == ("a",)
    assert "a" in adapter.ledger


def test_a_resumed_request_arrives_with_its_outputs_and_its_first_parameters(
    adapter: Adapter,
) -> None:
    first = adapter.step({"a": 2}, new=[new("a", [5, 6], temperature=0.7, logprobs=2)])
    adapter.step({}, preempted=["a"])
    back = Cached(4, 3, ([7, 8],), resumed=True, all_token_ids=[5, 6, 40, 41, 42])
    plan = adapter.step({"a": 1}, cached={"a": back})
    (arrival,) = plan.arrivals
    assert arrival.token_ids == [5, 6, 40, 41, 42]
    assert arrival.prompt_len == 2
    assert arrival.num_computed_tokens == 4
    assert arrival.block_ids == ([7, 8],)
    assert arrival.sampling == first.arrivals[0].sampling
    assert plan.continuations == ()
    assert rows(plan) == [("a", 1, 4, 5)]


def test_a_request_preempted_and_resumed_in_one_step_departs_before_it_arrives(
    adapter: Adapter,
) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6])])
    back = Cached(0, 1, ([7],), resumed=True, all_token_ids=[5, 6, 40])
    plan = adapter.step({"a": 3}, cached={"a": back}, preempted=["a"])
    assert set(plan.departed) == {"a"}
    assert [arrival.token_ids for arrival in plan.arrivals] == [[5, 6, 40]]
    assert rows(plan) == [("a", 3, 0, 3)]


def test_a_resumed_request_departs_even_if_nobody_said_that_it_was_preempted(
    adapter: Adapter,
) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6])])
    back = Cached(0, 1, ([7],), resumed=True, all_token_ids=[5, 6, 40])
    assert adapter.step({"a": 3}, cached={"a": back}).departed == ("a",)


@pytest.mark.parametrize(
    "back",
    [
        Cached(0, 1, ([7],), resumed=True),
        Cached(0, 1, None, resumed=True, all_token_ids=[5, 6, 40]),
    ],
)
def test_a_resumed_request_without_tokens_or_blocks_is_refused(
    adapter: Adapter, back: Cached
) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6])])
    with pytest.raises(ProtocolError, match="'a' is resumed without its tokens or without its"):
        adapter.step({"a": 3}, cached={"a": back})


def test_an_id_that_finished_and_comes_back_new_in_one_step(adapter: Adapter) -> None:
    first = adapter.step({"a": 2}, new=[new("a", [5, 6], temperature=1.0)])
    request = new("a", [9, 9, 9], temperature=0.2)
    plan = adapter.step({"a": 3}, new=[request], finished=["a"])
    assert plan.departed == ("a",)
    (arrival,) = plan.arrivals
    assert (arrival.token_ids, arrival.prompt_len) == ([9, 9, 9], 3)
    assert arrival.sampling.temperature == 0.2
    assert arrival.sampling.seed != first.arrivals[0].sampling.seed
    assert rows(plan) == [("a", 3, 0, 3)]


def test_a_new_request_whose_id_is_live_replaces_it(adapter: Adapter) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6])])
    plan = adapter.step({"a": 2}, new=[new("a", [5, 6, 40, 3], num_computed=2)])
    assert plan.departed == ("a",)
    assert adapter.ledger.get("a").prompt_len == 4
    assert rows(plan) == [("a", 2, 2, 4)]


def test_prompt_logprobs_of_a_session_are_those_of_its_first_turn() -> None:
    from mrv2_compat.vllm_v1.features.prompt_logprobs import ActivePromptLogprobs

    adapter = Adapter(features=ActiveFeatures([ActivePromptLogprobs(VOCAB_SIZE)]))
    # The next turn begins behind tokens that are computed: their logprobs could not be had.
    first = adapter.step({"a": 2}, new=[new("a", [5, 6], prompt_logprobs=1, logprobs=2)])
    longer = new("a", [5, 6, 40, 3], num_computed=2, prompt_logprobs=1, logprobs=2)
    second = adapter.step({"a": 2}, new=[longer])
    assert first.arrivals[0].sampling.num_prompt_logprobs == 1
    assert second.arrivals[0].sampling.num_prompt_logprobs is None
    assert second.arrivals[0].sampling.num_logprobs == 2
    again = adapter.step({"a": 2}, new=[new("a", [5, 6], prompt_logprobs=1)], finished=["a"])
    assert again.arrivals[0].sampling.num_prompt_logprobs == 1, "another request of that id"


def test_finished_requests_are_forgotten_and_unknown_ids_are_skipped(adapter: Adapter) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6])])
    plan = adapter.step({}, finished=["a", "never-ran"])
    assert set(plan.departed) == {"a", "never-ran"}
    assert len(adapter.ledger) == 0
    assert plan.scheduled.req_ids == []


def test_a_request_that_was_never_announced_is_refused(adapter: Adapter) -> None:
    with pytest.raises(ProtocolError, match="'x', which it never announced or has finished"):
        adapter.step({"x": 1}, cached={"x": Cached(3, 1)})


def test_progress_that_went_down_is_passed_on(adapter: Adapter) -> None:
    adapter.step({"a": 4}, new=[new("a", [5, 6, 7, 8])])
    plan = adapter.step({"a": 3}, cached={"a": Cached(2, 1)})
    assert rows(plan) == [("a", 3, 2, 5)]


def test_a_request_without_token_ids_or_sampling_parameters_is_refused(adapter: Adapter) -> None:
    message = "'a' has no prompt token ids or no sampling parameters"
    with pytest.raises(ProtocolError, match=message):
        adapter.step({"a": 1}, new=[new("a", None)])
    with pytest.raises(ProtocolError, match=message):
        adapter.step({"a": 1}, new=[replace(new("a", [1]), sampling_params=None)])


def test_seeds_are_the_requests_own_or_made_from_the_engine_and_the_arrival() -> None:
    def seeds(engine_seed: int) -> list[int]:
        adapter = Adapter(engine_seed)
        requests = [new("a", [1]), new("b", [1]), new("c", [1], seed=-3), new("d", [1])]
        plan = adapter.step(dict.fromkeys("abcd", 1), new=requests)
        again = adapter.step({"a": 1}, new=[new("a", [1])], finished=["a"])
        return [arrival.sampling.seed for arrival in (*plan.arrivals, *again.arrivals)]

    assert seeds(0) == seeds(0)
    assert seeds(0)[2] == -3
    assert len({*seeds(0), *seeds(1)}) == 9
    assert all(0 <= seed < 2**64 for seed in seeds(5) if seed != -3)


def test_what_the_scheduler_sent_is_not_changed(adapter: Adapter) -> None:
    request = new("a", [5, 6], ([3],))
    plan = adapter.step({"a": 2}, new=[request])
    assert (request.prompt_token_ids, request.block_ids) == ([5, 6], ([3],))
    assert plan.arrivals[0].token_ids is request.prompt_token_ids, "no copy of a long prompt"


def test_an_unsupported_request_that_was_not_checked_is_refused_and_never_ignored(
    adapter: Adapter,
) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6])])
    slipped = new("b", [1, 2], watermarking=True, trace_decode_token_ids=[4])
    with pytest.raises(UnsupportedByRunner) as raised:
        adapter.step({"c": 1, "b": 2}, new=[new("c", [3]), slipped], finished=["a"])
    assert "request 'b': watermarking (watermarking=True)" in str(raised.value)
    assert "request 'b': trace replay (trace_decode_token_ids=[4])" in str(raised.value)
    assert [req_id for req_id, _ in adapter.ledger.known()] == ["a"]
    assert adapter.ledger.num_announced == 1


def translated(**asked: Any) -> Sampling:
    """Translate the parameters of one request; `stop` stands for what the engine adds."""
    from vllm import SamplingParams

    from mrv2_compat.vllm_v1.step.translate_in import sampling_of

    bad_words, stop = asked.pop("bad_words", None), asked.pop("stop", ())
    params = SamplingParams(**asked)
    params._bad_words_token_ids = bad_words
    params._all_stop_token_ids.update(stop)
    return sampling_of(params, 0, 0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"seed": 8}, {"seed": 8}),
        ({"top_k": 3}, {"top_k": 3}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 10**6}, {"top_k": 10**6}),
        ({"top_p": 0.25}, {"top_p": 0.25}),
        ({"min_p": 0.25}, {"min_p": 0.25}),
        ({"presence_penalty": -0.5}, {"presence_penalty": -0.5}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {7: -2.0}}, {"logit_bias": {7: -2.0}}),
        ({"logit_bias": {}}, {"logit_bias": {}}),
        ({"allowed_token_ids": [9, 3]}, {"allowed_token_ids": (9, 3)}),
        ({"bad_words": [[1], [2, 3]]}, {"bad_words": ((1,), (2, 3))}),
        ({"min_tokens": 2, "stop_token_ids": [9, 4]}, {"min_tokens": 2, "stop_token_ids": (4, 9)}),
        ({"min_tokens": 2, "stop": [7]}, {"min_tokens": 2, "stop_token_ids": (7,)}),
        ({"stop_token_ids": [9, 4]}, {"stop_token_ids": ()}),
        ({"thinking_token_budget": 0}, {"thinking_budget": 0}),
        ({"thinking_token_budget": -1}, {"thinking_budget": None}),
        ({"logprobs": -1}, {"num_logprobs": -1}),
        ({"logprob_token_ids": [5, 2]}, {"logprob_token_ids": (5, 2)}),
        ({"prompt_logprobs": 0}, {"num_prompt_logprobs": 0}),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5}, {"temperature": 0.0}),
    ],
)
def test_each_parameter_reaches_its_field_and_no_other(
    asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    plain = translated(temperature=1.0, seed=3)
    assert translated(**{"temperature": 1.0, "seed": 3, **asked}) == replace(plain, **expected)


def test_a_grammar_is_only_a_mark() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    assert not translated().is_structured
    assert translated(structured_outputs=StructuredOutputsParams(regex="a")).is_structured


def test_bad_words_and_stop_tokens_without_logits_forbid_nothing() -> None:
    words = [[VOCAB_SIZE], [1, VOCAB_SIZE + 3], [VOCAB_SIZE - 1, 1], [VOCAB_SIZE, 1]]
    assert translated(bad_words=words).bad_words == ((VOCAB_SIZE - 1, 1),)
    stop = [VOCAB_SIZE, VOCAB_SIZE - 1]
    assert translated(min_tokens=1, stop=stop).stop_token_ids == (VOCAB_SIZE - 1,)


def test_a_seed_that_is_too_long_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"seed is .*; it must be an integer of 64 bits"):
        translated(seed=2**64)


def decode(step: int, *, a: Mapping[str, Any] | None = None) -> dict[str, Cached]:
    """Two requests after so many decodes; with other facts of the first."""
    first = Cached(num_computed=3 + step, num_outputs=1 + step)
    return {
        "a": replace(first, **(a or {})),
        "b": Cached(num_computed=2 + step, num_outputs=1 + step),
    }


@pytest.fixture
def decoding(adapter: Adapter) -> Adapter:
    """Two requests that have decoded once, which the next decode can follow."""
    adapter.step({"a": 3, "b": 2}, new=[new("a", [1, 2, 3]), new("b", [4, 5])])
    assert not isinstance(adapter.step(WORK, cached=decode(0)).scheduled, NextDecode)
    return adapter


WORK = {"a": 1, "b": 1}


def test_a_decode_that_only_goes_on_says_so_and_has_the_same_lists(decoding: Adapter) -> None:
    for step in range(1, 4):
        plan = decoding.step(WORK, cached=decode(step, a={"new_blocks": ([7],)}))
        assert isinstance(plan.scheduled, NextDecode)
        assert rows(plan) == [("a", 1, 3 + step, 4 + step), ("b", 1, 2 + step, 3 + step)]
        assert plan.continuations == (Continuation(req_id="a", new_block_ids=([7],)),)
        assert not plan.departed
        assert not plan.arrivals


def test_a_chain_of_decodes_keeps_one_base(decoding: Adapter) -> None:
    first = decoding.step(WORK, cached=decode(1)).scheduled
    second = decoding.step(WORK, cached=decode(2)).scheduled
    assert isinstance(first, NextDecode)
    assert isinstance(second, NextDecode)
    assert second.follows(first)
    assert second.base is first.base


OTHER_STEPS: dict[str, dict[str, Any]] = {
    "one arrives": {
        "work": {**WORK, "c": 1},
        "cached": decode(1),
        "new": [("c", [6])],
    },
    "one of them is replaced": {
        "work": {"b": 1, "a": 1},
        "cached": {"b": decode(1)["b"]},
        "new": [("a", [6])],
    },
    "another one finishes": {"work": WORK, "cached": decode(1), "finished": ("z",)},
    "another one is preempted": {"work": WORK, "cached": decode(1), "preempted": ("z",)},
    "one pauses": {"work": {"a": 1}, "cached": {"a": decode(1)["a"]}},
    "one is resumed": {
        "work": WORK,
        "cached": decode(
            1, a={"resumed": True, "all_token_ids": [1, 2, 3, 9, 9], "new_blocks": ([5],)}
        ),
    },
    "another order": {"work": WORK, "cached": dict(reversed(decode(1).items()))},
    "one runs again": {"work": WORK, "cached": decode(1, a={"num_computed": 2})},
    "one runs several": {"work": {"a": 3, "b": 1}, "cached": decode(1, a={"num_computed": 2})},
}


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_any_other_step_has_its_lists(decoding: Adapter, name: str) -> None:
    step = dict(OTHER_STEPS[name])
    arriving = [new(req_id, prompt) for req_id, prompt in step.pop("new", ())]
    plan = decoding.step(**step, new=arriving)
    assert not isinstance(plan.scheduled, NextDecode)


def test_nothing_goes_on_from_a_step_in_which_one_did_not_draw(adapter: Adapter) -> None:
    adapter.step({"a": 1, "b": 2}, new=[new("a", [1, 2, 3]), new("b", [4, 5])])
    middle = {"a": Cached(1, 0), "b": Cached(2, 1)}
    adapter.step(WORK, cached=middle)
    plan = adapter.step(WORK, cached={"a": Cached(2, 0), "b": Cached(3, 2)})
    assert not isinstance(plan.scheduled, NextDecode)
    assert rows(plan) == [("a", 1, 2, 3), ("b", 1, 3, 4)]
    plan = adapter.step(WORK, cached={"a": Cached(3, 1), "b": Cached(4, 3)})
    assert isinstance(plan.scheduled, NextDecode)


def test_a_step_taken_back_is_followed_by_what_followed_before(decoding: Adapter) -> None:
    decoding.step(WORK, cached=decode(1))
    decoding.ledger.take_back_step()
    again = decoding.step(WORK, cached=decode(1)).scheduled
    assert isinstance(again, NextDecode)
    assert again.num_steps == 1
    with pytest.raises(ProtocolError):
        decoding.step({"x": 1}, cached={"x": Cached(1, 1)})
    plan = decoding.step(WORK, cached=decode(2))
    assert isinstance(plan.scheduled, NextDecode)
    assert plan.scheduled.follows(again)


def test_an_empty_step_ends_a_chain(decoding: Adapter) -> None:
    decoding.step({}, cached={})
    assert not isinstance(decoding.step(WORK, cached=decode(1)).scheduled, NextDecode)


# What features say of a step, and drafts.


class Drafts(ActiveFeature):
    """Takes up to two drafts."""

    name = "drafts"
    max_drafts = 2

    def plan_extra(self, scheduler_output: Any) -> object | None:
        return scheduler_output.scheduled_spec_decode_tokens or None


class Adapters(ActiveFeature):
    """Tells of each request's adapter, and of each step's number."""

    name = "adapters"

    def __init__(self) -> None:
        self.num_steps = 0

    def arrival_extra(self, request: Any) -> object | None:
        return (request.sampling_params.extra_args or {}).get("adapter")

    def plan_extra(self, scheduler_output: Any) -> object | None:
        self.num_steps += 1
        return self.num_steps


@pytest.fixture
def drafting() -> Adapter:
    """An adapter whose requests "a" and "b" have drawn a token."""
    adapter = Adapter(features=ActiveFeatures([Drafts()]))
    adapter.step({"a": 2, "b": 3}, new=[new("a", [5, 6]), new("b", [5, 6, 7])])
    return adapter


def test_drafts_that_no_feature_takes_are_refused_by_name(adapter: Adapter) -> None:
    adapter.step({"a": 2}, new=[new("a", [5, 6])])
    last = adapter.ledger.last_decode
    with pytest.raises(ProtocolError, match=r"drafts of \['a'\], and no feature .* takes drafts"):
        adapter.step({"a": 3}, cached={"a": Cached(2, 1)}, drafts={"a": [8, 9]})
    assert adapter.ledger.last_decode is last
    assert rows(adapter.step({"a": 1}, cached={"a": Cached(2, 1)})) == [("a", 1, 2, 3)]


def test_drafts_run_behind_the_known_tokens_and_are_none_of_them(drafting: Adapter) -> None:
    cached = {"a": Cached(2, 1), "b": Cached(3, 1)}
    plan = drafting.step({"a": 3, "b": 1}, cached=cached, drafts={"a": [8, 9]})
    assert rows(plan) == [("a", 3, 2, 3), ("b", 1, 3, 4)]
    assert plan.extras == {"drafts": {"a": [8, 9]}}


def test_no_step_goes_on_from_one_with_drafts_or_to_one(drafting: Adapter) -> None:
    def step(computed: tuple[int, int], outputs: tuple[int, int], num_drafts: int) -> StepPlan:
        cached = {
            name: Cached(*both)
            for name, both in zip("ab", zip(computed, outputs, strict=True), strict=True)
        }
        drafts = {"a": [8, 9][:num_drafts]} if num_drafts else {}
        return drafting.step({"a": 1 + num_drafts, "b": 1}, cached=cached, drafts=drafts)

    assert not isinstance(step((2, 3), (1, 1), 0).scheduled, NextDecode)
    assert isinstance(step((3, 4), (2, 2), 0).scheduled, NextDecode)
    assert not isinstance(step((4, 5), (3, 3), 2).scheduled, NextDecode)
    assert drafting.ledger.last_decode is None
    # One of two drafts was accepted: two tokens came of the step.
    assert not isinstance(step((6, 6), (5, 4), 0).scheduled, NextDecode)
    assert isinstance(step((7, 7), (6, 5), 0).scheduled, NextDecode)


def test_drafts_that_are_not_what_their_request_runs_are_refused(drafting: Adapter) -> None:
    cached = {"a": Cached(2, 1), "b": Cached(3, 1)}
    with pytest.raises(ProtocolError, match=r"'a' runs 1 tokens behind .* schedules 2 drafts"):
        drafting.step({"a": 2, "b": 1}, cached=cached, drafts={"a": [8, 9]})
    with pytest.raises(ProtocolError, match=r"'b' runs 1 tokens behind .* schedules 0 drafts"):
        drafting.step({"a": 3, "b": 2}, cached=cached, drafts={"a": [8, 9]})


def test_extras_of_a_request_come_with_each_arrival_and_of_a_step_with_each_step() -> None:
    adapter = Adapter(features=ActiveFeatures([Adapters()]))
    told = new("a", [5, 6], extra_args={"adapter": "x"})
    first = adapter.step({"a": 2, "b": 1}, new=[told, new("b", [5])])
    assert [arrival.extras for arrival in first.arrivals] == [{"adapters": "x"}, {}]
    cached = {"a": Cached(2, 1), "b": Cached(1, 1)}
    second = adapter.step({"a": 1, "b": 1}, cached=cached)
    third = adapter.step({"a": 1, "b": 1}, cached={"a": Cached(3, 2), "b": Cached(2, 2)})
    assert isinstance(third.scheduled, NextDecode)
    assert [plan.extras for plan in (first, second, third)] == [
        {"adapters": number} for number in (1, 2, 3)
    ]
    resumed = {"a": Cached(0, 3, ([4],), resumed=True, all_token_ids=[5, 6, 40, 41, 42])}
    fourth = adapter.step({"a": 5}, cached=resumed, preempted=["a"])
    assert [arrival.extras for arrival in fourth.arrivals] == [{"adapters": "x"}]


def test_without_features_nobody_is_told_anything(adapter: Adapter) -> None:
    plan = adapter.step({"a": 2}, new=[new("a", [5, 6])])
    assert plan.extras == plan.arrivals[0].extras == {}
