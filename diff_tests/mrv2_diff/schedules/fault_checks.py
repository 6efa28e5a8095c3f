"""The checks that find `schedule_faults`, by name, over the toy model: no vLLM."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import torch

from mrv2 import GraphSizes, KVGroup, Mrv2Error, RunnerConfig, Sampling
from mrv2_diff.invariants import InvariantError, check_device, check_invariants
from mrv2_diff.late_play import Played, live_requests, play_late
from mrv2_diff.models.hashlm import HashLM
from mrv2_diff.played_graphs import PlayedGraphMaker
from mrv2_diff.race_lane import LastMoment
from mrv2_diff.schedule_faults import ScheduleFault
from mrv2_diff.seams.draft_stories import (
    DraftingHost,
    DraftStory,
    Life,
    drafting_toy,
    undrafted_lives,
)
from mrv2_diff.seams.extensions import (
    BakingGraphMaker,
    SaltedHashLM,
    TellingHost,
    Unshared,
    salt_of,
)
from mrv2_diff.seams.planners import HostPlanned
from mrv2_diff.toy_host import Toy, ToyHost
from mrv2_diff.toy_stories import RandomStory, mixed_sampling

CONFIG = RunnerConfig(
    device=torch.device("cpu"),
    max_num_reqs=5,
    max_num_tokens=40,
    max_model_len=48,
    vocab_size=97,
    kv_groups=(KVGroup(block_size=4, max_blocks=12), KVGroup(block_size=8, max_blocks=6)),
)
REPLAYED = replace(CONFIG, graphs=GraphSizes(decodes=(4,), forwards=(16,)))
"""Whatever is replayed is padded, but for four requests."""
WINDOWS = (None, 6)
LAG = 2
QUIET_STEPS = 90
"""Long enough for more requests to leave than a container may have entries."""
ENDS_BADLY = (Mrv2Error, RuntimeError, IndexError)
"""A wrong layout or a wrong row may end a story, since torch checks shapes and bounds on a CPU."""


def found_by(fault: ScheduleFault) -> str | None:
    """Return the name of the check that finds a fault, of those that its own name may stand for.

    The fault is put in by the caller, once `prepare` was called without it.
    """
    config = config_of(fault)
    return _CHECKS.get(fault.found_by, found_by_invariants)(config)


def config_of(fault: ScheduleFault) -> RunnerConfig:
    """Return the runner's sizes for a fault."""
    return REPLAYED if fault.replays else CONFIG


def prepare() -> None:
    """Play what a right runner leaves, which the checks compare with; no fault may be in."""
    right(CONFIG)
    right(REPLAYED)
    right_eagerly()
    lives()


def false_finds() -> list[str]:
    """Return the checks that find something; call it where there is no fault."""
    found = [
        check(config)
        for config in (CONFIG, REPLAYED)
        for check in (
            found_late,
            found_by_invariants,
            found_by_oracle,
            found_alone,
            found_undrafted,
        )
    ]
    found += [found_replayed(REPLAYED), found_by_variants(REPLAYED)]
    return [name for name in found if name is not None]


def mixed(config: RunnerConfig, late: bool) -> Played:
    """Play requests of all kinds, on a device that is late or on a prompt one."""
    sampling = scored_sampling if config is REPLAYED else mixed_sampling
    story = RandomStory(2, CONFIG, sampling=sampling)
    schedule = LastMoment() if late else None
    return play_late(config, story, 30, lag=LAG, schedule=schedule, windows=WINDOWS)


def scored_sampling(rng: Random, config: RunnerConfig) -> Sampling:
    """Leave most draws to the graphs; ask for logprobs or for a penalty now and then."""
    return Sampling(
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.getrandbits(64),
        num_logprobs=2 if rng.random() < 0.2 else None,
        presence_penalty=1.5 if rng.random() < 0.1 else 0.0,
    )


@cache
def right(config: RunnerConfig) -> Played:
    """What the story leaves where nothing is wrong and nothing is late."""
    return mixed(config, late=False)


@cache
def right_eagerly() -> Played:
    """The same as the one of `REPLAYED`, in eager steps."""
    story = RandomStory(2, CONFIG, sampling=scored_sampling)
    return play_late(CONFIG, story, 30, lag=LAG, windows=WINDOWS)


def found_late(config: RunnerConfig) -> str | None:
    """Say whether a fault shows on a late device, and on that alone."""
    right_before = right(config)
    if mixed(config, late=False).differences(right_before):
        return "shows on a prompt device, too"
    try:
        return "late" if mixed(config, late=True).differences(right_before) else None
    except ENDS_BADLY:
        return "late"


def found_replayed(config: RunnerConfig) -> str | None:
    """Say whether a fault changes what comes of replayed steps, on a prompt device."""
    try:
        played = mixed(config, late=False)
    except ENDS_BADLY:
        return "replayed"
    return "replayed" if played.results != right_eagerly().results else None


def quiet(host: ToyHost, step: int) -> dict[str, int]:
    """One request lives long, is paused and rewound; others come and go beside it, one by one."""
    if step % 30 == 0:
        if "long" in host.requests:
            host.finish("long")
        host.add("long", [1, 2, 3, 4, 5], Sampling(temperature=0.7, presence_penalty=1.0))
    if step % 12 == 7:
        host.rewind("long", 1)
    name = f"short {step // 3}"
    if step % 3 == 0:
        host.add(name, [6, 7, 8], Sampling(temperature=0.9, min_tokens=2, num_logprobs=2))
    elif step % 3 == 2:
        host.finish(name)
    working = [name] * (step % 3 < 2) + ["long"] * (step % 5 != 4)
    return {name: host.requests[name].num_left for name in working}


def found_by_invariants(config: RunnerConfig) -> str | None:
    """Return the name of the first invariant that breaks."""
    try:
        play_late(config, quiet, QUIET_STEPS, lag=1, windows=WINDOWS, checked=True)
        _play_drafts_checked(config)
    except InvariantError as broken:
        return broken.name
    return None


def _play_drafts_checked(config: RunnerConfig) -> None:
    """Play drafts whose outcome is known after each step, and look at the rows then."""
    toy, host = _drafting(config, HashLM)
    story = DraftStory(2, toy.runner.config, lives())
    for number in range(40):
        work = story(host, number)
        toy.run(work)
        live = live_requests(host)
        check_invariants(toy.runner, live, flushed=bool(work))
        check_device(toy.runner, {req_id: live[req_id] for req_id in work})


def _drafting(config: RunnerConfig, kind: type[HashLM]) -> tuple[Toy, DraftingHost]:
    """Return a runner of some sizes that runs up to two drafts, replayed where others are."""
    replays = bool(config.graphs.decodes)
    graphs = replace(config.graphs, query_lens=(1, 3)) if replays else GraphSizes()
    config = replace(config, max_drafts=2, graphs=graphs)
    ports = kind(config, 400)
    maker = PlayedGraphMaker() if replays else None
    return drafting_toy(config, maker, around=lambda model: ports)


@cache
def lives() -> list[Life]:
    """What requests draw without drafts, whatever they ask for."""
    return undrafted_lives(1, CONFIG, 12, mixed_sampling)


def found_undrafted(config: RunnerConfig) -> str | None:
    """Say whether drafts change what requests draw, however the lengths of attention are made."""
    for kind, lag in ((HashLM, 1), (HostPlanned, 2)):
        toy, host = _drafting(config, kind)
        try:
            toy.play(DraftStory(6, toy.runner.config, lives()), 150, lag=lag)
        except ENDS_BADLY:
            return "undrafted"
        for request, life in host.lives.items():
            if request.outputs != life.tokens[: len(request.outputs)]:
                return "undrafted"
    return None


def found_by_variants(config: RunnerConfig) -> str | None:
    """Say whether steps that are replayed in variants give other tokens than eager ones."""
    return "variants" if _salted(config) != _salted(CONFIG) else None


def _salted(config: RunnerConfig) -> list[tuple[str, list[int]]]:
    maker = BakingGraphMaker()
    toy = Toy(
        config,
        around=lambda model: SaltedHashLM(config, 400),
        graph_maker=maker if config.graphs.decodes else None,
        extensions=(maker.make,),
    )
    toy.host = TellingHost(config, "salt", salt_of)
    toy.play(Unshared(4, config), 60)
    return toy.outputs()


def found_by_oracle(config: RunnerConfig) -> str | None:
    """Say whether a fault changes tokens, or makes the runner refuse a right plan."""
    try:
        played = play_late(config, RandomStory(3, CONFIG), 120, lag=1, windows=WINDOWS)
    except ENDS_BADLY:
        return "oracle"
    return "oracle" if played.outputs != played.expected else None


_SEEDED = {f"seeded {index}": [3 + index, 5, 7 * index + 1][: index + 1] for index in range(3)}
"""Requests at a random temperature with their prompts, each of another length."""


def found_alone(config: RunnerConfig) -> str | None:
    """Say whether requests that draw at random draw other tokens together than alone."""
    together = _drawn_by(config, list(_SEEDED))
    apart = [tokens for name in _SEEDED for tokens in _drawn_by(config, [name])]
    return "alone" if sorted(together) != sorted(apart) else None


def _drawn_by(config: RunnerConfig, names: list[str]) -> list[tuple[str, list[int]]]:
    def story(host: ToyHost, step: int) -> dict[str, int]:
        if step == 0:
            for name in names:
                seed = 1000 + list(_SEEDED).index(name)
                host.add(name, _SEEDED[name], Sampling(temperature=1.5, seed=seed))
        order = names if step == 0 else reversed(names)  # so that no place is its row
        return {name: host.requests[name].num_left for name in order}

    return play_late(config, story, 12, lag=0, windows=WINDOWS).outputs


_CHECKS: dict[str, Callable[[RunnerConfig], str | None]] = {
    "alone": found_alone,
    "late": found_late,
    "oracle": found_by_oracle,
    "replayed": found_replayed,
    "undrafted": found_undrafted,
    "variants": found_by_variants,
}
