"""All features that an engine uses, as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mrv2 import ConfigError, Sampling
from mrv2.ports import Model
from mrv2_compat.vllm_v1.features.feature import (
    ActiveFeature,
    CoreParts,
    Feature,
    FeatureContext,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

NO_EXTRAS: Mapping[str, object] = MappingProxyType({})


class ActiveFeatures:
    """Calls each hook of those features that define it, in order.

    Args:
        members: At most one of a name, with a head, and for each name that is served.
        lifted: Paths of the rules that they lift.

    Raises:
        ConfigError: Two of them collide.
    """

    def __init__(self, members: Sequence[ActiveFeature] = (), lifted: Iterable[str] = ()) -> None:
        self._members = tuple(members)
        self.lifted = frozenset(lifted)
        """Rules that are not applied to a request."""
        self.max_drafts = max((member.max_drafts for member in members), default=0)
        """Tokens that a request may run in one step behind those that are known."""
        _require_distinct("name", ((member.name, member.name) for member in members))
        _require_distinct(
            "serve", ((name, member.name) for member in members for name in member.serves)
        )
        self.served: Mapping[str, Any] = {
            name: value for member in members for name, value in member.serves.items()
        }
        """Names of vLLM's surface that they serve."""
        self._telling_of_arrivals = self._defining("arrival_extra")
        self._sampling = self._defining("sampling")
        self._telling_of_steps = self._defining("plan_extra")
        self._looking = self._defining("after_sample")
        self._adding = self._defining("add_to")

    @classmethod
    def load(cls, features: Iterable[Feature], context: FeatureContext) -> "ActiveFeatures":
        """Load the features that an engine uses."""
        loaded = [(feature, feature.load(context)) for feature in features]
        return cls(
            [member for _, member in loaded if member is not None],
            chain.from_iterable(feature.lifts(context.vllm_config) for feature, _ in loaded),
        )

    def parts(self) -> CoreParts:
        """Return what all of them bring to a core runner.

        Raises:
            ConfigError: Two of them have a head.
        """
        parts = [(member.name, member.parts()) for member in self._members]
        heads = {name: brought.head for name, brought in parts if brought.head is not None}
        if len(heads) > 1:
            raise ConfigError(
                f"the features {sorted(heads)} decide each what a step gives; use one of them"
            )
        return CoreParts(
            reshaping=tuple(stage for _, brought in parts for stage in brought.reshaping),
            narrowing=tuple(stage for _, brought in parts for stage in brought.narrowing),
            extensions=tuple(each for _, brought in parts for each in brought.extensions),
            head=next(iter(heads.values()), None),
        )

    def profile(self, hidden: Tensor, model: Model) -> None:
        """Let each do what takes the most memory."""
        for member in self._members:
            member.profile(hidden, model)

    def arrival_extras(self, request: "NewRequestData") -> Mapping[str, object]:
        """Return what extensions are told of a request, by name."""
        return _told(self._telling_of_arrivals, lambda member: member.arrival_extra(request))

    def sampling(self, sampling: Sampling, *, goes_on: bool) -> Sampling:
        """Return what the core is to sample a request by."""
        for member in self._sampling:
            sampling = member.sampling(sampling, goes_on=goes_on)
        return sampling

    def plan_extras(self, scheduler_output: "SchedulerOutput") -> Mapping[str, object]:
        """Return what extensions are told of a step, by name."""
        if not self._telling_of_steps:
            return NO_EXTRAS
        return _told(self._telling_of_steps, lambda member: member.plan_extra(scheduler_output))

    def after_sample(self) -> None:
        """Let each look at a step whose sampling was queued."""
        for member in self._looking:
            member.after_sample()

    def add_to(
        self, output: "ModelRunnerOutput", extras: Mapping[str, object]
    ) -> "ModelRunnerOutput":
        """Return an output with what each has to say.

        Args:
            output: vLLM's form of a step's output.
            extras: What extensions gave, by name.
        """
        for member in self._adding:
            output = member.add_to(output, extras.get(member.name))
        return output

    def _defining(self, hook: str) -> tuple[ActiveFeature, ...]:
        null = getattr(ActiveFeature, hook)
        return tuple(member for member in self._members if getattr(type(member), hook) is not null)


def _told(
    members: Sequence[ActiveFeature], say: Callable[[ActiveFeature], object | None]
) -> Mapping[str, object]:
    if not members:
        return NO_EXTRAS
    said = ((member.name, say(member)) for member in members)
    return {name: extra for name, extra in said if extra is not None} or NO_EXTRAS


def _require_distinct(verb: str, claims: Iterable[tuple[str, str]]) -> None:
    """Refuse two features that claim one thing.

    Args:
        verb: What they do with it.
        claims: What each claims, with its name.
    """
    owners: dict[str, str] = {}
    for claimed, name in claims:
        if claimed in owners:
            raise ConfigError(
                f"the features {owners[claimed]!r} and {name!r} both {verb} {claimed!r}; "
                "use one of them"
            )
        owners[claimed] = name


NO_FEATURES = ActiveFeatures()
