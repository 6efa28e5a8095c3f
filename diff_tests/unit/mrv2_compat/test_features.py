"""What a feature can do in the adapter, shown by toys, and what two of them may not do at once."""

from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from mrv2 import Arrival, ConfigError, Sampling, Step, StepExtension, StepPlan
from mrv2_compat.vllm_v1 import surface
from mrv2_compat.vllm_v1.features.active import NO_FEATURES, ActiveFeatures
from mrv2_compat.vllm_v1.features.feature import (
    ActiveFeature,
    CoreParts,
    Feature,
    FeatureContext,
)
from mrv2_compat.vllm_v1.features.registry import FEATURES
from mrv2_compat.vllm_v1.requests import refusals

CONTEXT = FeatureContext(vllm_config=SimpleNamespace(asked="for"), device=torch.device("cpu"))


class Toy(ActiveFeature):
    """Serves a name of vLLM's surface that is a no-op without it, and one that is refused."""

    name = "toy"
    serves: Mapping[str, Any] = {"take_draft_token_ids": lambda: [[7]], "add_lora": lambda _: True}


class ToyFeature(Feature):
    """Lifts the refusal of LoRA where a configuration asks for it by one name."""

    name = "toy"

    def lifts(self, vllm_config: Any) -> Collection[str]:
        return {"lora_config", "prompt_logprob_start"} if vllm_config.asked == "for" else ()

    def load(self, context: FeatureContext) -> ActiveFeature | None:
        return Toy() if context.vllm_config.asked == "for" else None


def test_the_null_feature_does_nothing() -> None:
    null = ActiveFeature()
    assert Feature().load(CONTEXT) is None
    assert Feature().lifts(CONTEXT.vllm_config) == ()
    assert null.parts() == CoreParts()
    anything: Any = object()
    assert null.arrival_extra(anything) is null.plan_extra(anything) is None
    assert null.sampling(anything, goes_on=True) is anything
    assert null.add_to(anything, None) is anything
    null.profile(anything, anything)
    null.after_sample()


def test_features_that_are_not_active_cost_nothing() -> None:
    features = ActiveFeatures([ActiveFeature()])
    anything: Any = object()
    assert features.plan_extras(anything) is NO_FEATURES.plan_extras(anything)
    assert features.arrival_extras(anything) == {}
    assert features.add_to(anything, {}) is anything
    assert (features.max_drafts, features.served, features.lifted) == (0, {}, frozenset())


def test_a_feature_is_active_where_its_configuration_says_so() -> None:
    active = ActiveFeatures.load([ToyFeature(), Feature()], CONTEXT)
    assert set(active.served) == {"take_draft_token_ids", "add_lora"}
    assert active.lifted == {"lora_config", "prompt_logprob_start"}
    other = FeatureContext(vllm_config=SimpleNamespace(asked="not"), device=CONTEXT.device)
    assert ActiveFeatures.load([ToyFeature()], other).served == {}


# Rules.


def refused(config: Any, features: list[Feature]) -> set[str]:
    return {refusal.feature for refusal in refusals.config_refusals(config, features)}


def test_a_rule_that_a_feature_lifts_is_not_refused() -> None:
    config = MagicMock(asked="for")  # every rule that looks for something finds it
    without, lifted = refused(config, []), refused(config, [ToyFeature()])
    assert without - lifted == {"LoRA"}
    assert lifted < without
    assert refused(MagicMock(asked="not"), [ToyFeature()]) == without


def test_a_rule_of_requests_is_lifted_too() -> None:
    params = SimpleNamespace(
        temperature=1.0,
        prompt_logprob_token_ids=None,
        prompt_logprob_start=3,
        watermarking=True,
        routed_experts_prompt_start=0,
        trace_decode_token_ids=None,
    )
    lifted = refusals.lifted_rules(CONTEXT.vllm_config, [ToyFeature()])
    values = [refusal.value for refusal in refusals.request_refusals(params, lifted=lifted)]
    assert values == ["watermarking=True"]
    assert len(refusals.request_refusals(params)) == 2


def test_an_input_of_a_type_is_lifted_by_its_path() -> None:
    params: Any = SimpleNamespace(temperature=1.0)
    lifted = {rule.path for rule in refusals.REQUEST_RULES}
    for kind in ("multimodal", "embeds"):
        asked = refusals.request_refusals(params, {"type": kind}, lifted | {"engine_input.embeds"})
        assert bool(asked) == (kind == "multimodal")


def test_every_path_that_a_feature_lifts_is_one_of_a_rule() -> None:
    paths = {rule.path for rule in (*refusals.CONFIG_RULES, *refusals.REQUEST_RULES)}
    paths |= {f"engine_input.{kind}" for kind in refusals._INPUT_REFUSALS}
    for feature in FEATURES:
        assert set(feature.lifts(MagicMock())) <= paths


# Parts.


class Heads(ActiveFeature):
    def __init__(self, name: str, head: Any) -> None:
        self.name, self._head = name, head

    def parts(self) -> CoreParts:
        brought: Any = (self.name,)
        return CoreParts(
            reshaping=brought, narrowing=brought * 2, extensions=brought, head=self._head
        )


def test_parts_of_all_features_come_in_their_order() -> None:
    head: Any = object()
    parts: Any = ActiveFeatures([Heads("one", None), Heads("two", head)]).parts()
    assert parts.reshaping == parts.extensions == ("one", "two")
    assert parts.narrowing == ("one", "one", "two", "two")
    assert parts.head is head


def test_two_heads_are_refused_by_name() -> None:
    features = ActiveFeatures([Heads("pool", object()), Heads("drafts", object())])
    with pytest.raises(ConfigError, match=r"\['drafts', 'pool'\] decide each"):
        features.parts()


def test_two_features_may_not_serve_one_name_nor_have_one() -> None:
    class Other(Toy):
        name = "other"

    with pytest.raises(ConfigError, match="'toy' and 'other' both serve 'take_draft_token_ids'"):
        ActiveFeatures([Toy(), Other()])
    with pytest.raises(ConfigError, match="'toy' and 'toy' both name 'toy'"):
        ActiveFeatures([Toy(), Toy()])


def test_the_most_drafts_of_any_feature_count() -> None:
    class Drafts(ActiveFeature):
        def __init__(self, name: str, count: int) -> None:
            self.name, self.max_drafts = name, count

    assert ActiveFeatures([Drafts("a", 2), Drafts("b", 5), Drafts("c", 0)]).max_drafts == 5


# The facade.


@pytest.mark.vllm
def test_the_facade_serves_what_a_feature_serves_and_refuses_the_rest() -> None:
    from mrv2_compat.vllm_v1.runner import VllmRunner

    config = MagicMock(asked="for")
    served, bare = (
        VllmRunner(config, CONTEXT.device, features=features) for features in ([ToyFeature()], [])
    )
    assert served.take_draft_token_ids() == [[7]]
    assert served.add_lora("x") is True
    assert bare.take_draft_token_ids() is None
    assert not hasattr(bare, "add_lora")
    assert not hasattr(served, "remove_lora")
    with pytest.raises(surface.RefusedName, match="add_lora: LoRA is not supported"):
        bare.add_lora("x")


@pytest.mark.vllm
def test_tokens_of_a_uniform_step_count_the_drafts() -> None:
    from mrv2_compat.vllm_v1.runner import VllmRunner

    class Drafts(Feature):
        def load(self, context: FeatureContext) -> ActiveFeature:
            active = ActiveFeature()
            active.max_drafts = 3
            return active

    for features, expected in (([Drafts()], 4), ([], 1)):
        runner = VllmRunner(MagicMock(), CONTEXT.device, features=features)
        assert runner.uniform_decode_query_len == expected


def test_prompt_logprobs_are_asked_for_once_in_a_session() -> None:
    from mrv2_compat.vllm_v1.features.prompt_logprobs import ActivePromptLogprobs

    features = ActiveFeatures([ActivePromptLogprobs(vocab_size=9)])
    asked = Sampling(num_prompt_logprobs=2, num_logprobs=1)
    assert features.sampling(asked, goes_on=False) is asked
    assert features.sampling(asked, goes_on=True) == Sampling(num_logprobs=1)


def test_modules_of_features_import_nothing_of_vllm() -> None:
    import subprocess
    import sys

    # They are asked for their rules while vLLM builds a configuration.
    code = (
        "import sys; from mrv2_compat.vllm_v1.features.registry import FEATURES;"
        "print(len(FEATURES), 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(FEATURES)), "False"]


# In a runner, with an extension of the core.


class Follows(StepExtension):
    """Keeps what it is told, and gives how many requests a step ran."""

    name = "follows"
    takes_extras = True

    def __init__(self) -> None:
        self.arrived: list[tuple[str, object]] = []
        self.steps: list[object] = []

    def check(self, plan: StepPlan) -> None:
        self.steps.append(plan.extras.get(self.name))

    def admit(self, row: int, arrival: Arrival) -> None:
        self.arrived.append((arrival.req_id, arrival.extras[self.name]))

    def outputs(self, step: Step) -> Callable[[], object]:
        num_reqs = step.layout.num_reqs
        return lambda: num_reqs


class Following(ActiveFeature):
    name = "follows"

    def __init__(self) -> None:
        self.extension = Follows()
        self.given: list[object] = []
        self.num_sampled = 0

    def parts(self) -> CoreParts:
        return CoreParts(extensions=(lambda _: self.extension,))

    def arrival_extra(self, request: Any) -> object | None:
        return len(request.prompt_token_ids)

    def plan_extra(self, scheduler_output: Any) -> Any:
        return scheduler_output.total_num_scheduled_tokens

    def after_sample(self) -> None:
        self.num_sampled += 1

    def add_to(self, output: Any, given: object | None) -> Any:
        self.given.append(given)
        assert given == len(output.req_ids)
        return output


@pytest.mark.vllm
@pytest.mark.parametrize("is_async", [False, True])
def test_a_feature_takes_part_in_every_step_of_a_runner(is_async: bool) -> None:
    from mrv2_diff.schedules.actions import Arrive, Setup
    from mrv2_diff.schedules.driver import Driver
    from mrv2_diff.schedules.engine import HashRunner

    loaded: list[Following] = []

    class FollowingFeature(Feature):
        def load(self, context: FeatureContext) -> ActiveFeature:
            loaded.append(Following())
            return loaded[-1]

    class WithFeature(HashRunner):
        def __init__(self, vllm_config: Any, windows: tuple[int | None, ...]) -> None:
            super().__init__(vllm_config, windows, [*FEATURES, FollowingFeature()])

    driver = Driver(Setup(is_async=is_async), WithFeature)
    for name, prefix_len in (("a", 10), ("b", 7), ("c", 3)):
        driver.do(Arrive(name=name, prefix_len=prefix_len, max_tokens=9))
    driver.drain()
    feature = loaded[-1]
    assert len(loaded) == 2, "one for the start, and one for the core"
    arrived = feature.extension.arrived
    assert [told for _, told in arrived] == [11, 8, 4]
    assert feature.num_sampled == len(feature.given) == driver.engine.runner.steps_executed
    assert len(feature.given) > 9
    assert all(isinstance(told, int) for told in feature.extension.steps)
