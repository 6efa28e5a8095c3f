"""Random lives of requests with drafts, beside what the same requests draw without any."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from mrv2 import (
    EXTENSIONS,
    PROMPT_LOGPROBS,
    GraphMaker,
    GraphSizes,
    KVGroup,
    Logprobs,
    RunnerConfig,
    RunnerOutput,
    Sampling,
    StepPlan,
)
from mrv2_diff.late_play import CountingHost, Feature
from mrv2_diff.seams.drafts import DeviceDrafts, DraftTokens, ScriptedHead
from mrv2_diff.toy_host import Toy, ToyHost, ToyRequest, Work
from mrv2_diff.toy_stories import RandomStory

Scores = tuple[bytes, bytes, int]
"""The token ids, values and rank of one row of logprobs, as many as its request asked for."""
MakeSampling = Callable[[random.Random, RunnerConfig], Sampling]


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """A request, and what it draws without drafts until its row is full."""

    prompt: list[int]
    sampling: Sampling
    donor: "Life | None" = None
    """Whose prompt and tokens the prompt begins with."""
    num_shared: int = 0
    """How many of them: whole blocks."""
    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    """Of each token, where the request asks for logprobs."""
    of_prompt: list[Scores] = field(default_factory=list)


class ScoringHost(CountingHost):
    """A host that keeps the logprobs of each request's tokens."""

    def __init__(self, groups: Sequence[KVGroup], num_blocks: int) -> None:
        super().__init__(groups, num_blocks)
        self.scores: dict[ToyRequest, list[Scores]] = {}
        self.of_prompts: dict[ToyRequest, list[Scores]] = {}

    def take(self, output: RunnerOutput) -> None:
        """Take the output, and the rows of those tokens that the host takes."""
        before = {request: len(request.outputs) for request, _, _ in self._draws[0]}
        super().take(output)
        of_prompts = cast(Mapping[str, Logprobs], output.extras.get(PROMPT_LOGPROBS, {}))
        for request, num_before in before.items():
            if request.req_id in of_prompts:
                scores = of_prompts[request.req_id]
                wanted = request.sampling.num_prompt_logprobs
                self.of_prompts[request] = [
                    _scores(scores, place, wanted) for place in range(len(scores.ranks))
                ]
            num_taken = len(request.outputs) - num_before
            if not num_taken or output.logprobs is None or not _wants(request.sampling):
                continue
            first = int(output.cu_num_sampled[output.req_ids.index(request.req_id)])
            listed = request.sampling.logprob_token_ids
            count = request.sampling.num_logprobs if listed is None else len(listed)
            self.scores.setdefault(request, []).extend(
                _scores(output.logprobs, place, count) for place in range(first, first + num_taken)
            )


def _wants(sampling: Sampling) -> bool:
    return sampling.num_logprobs is not None or sampling.logprob_token_ids is not None


def _scores(logprobs: Logprobs, place: int, count: int | None) -> Scores:
    end = 1 + (count or 0)
    return (
        logprobs.token_ids[place, :end].tobytes(),
        logprobs.values[place, :end].tobytes(),
        int(logprobs.ranks[place]),
    )


class DraftingHost(ScoringHost):
    """A host that has drafts for its requests: right ones, wrong ones, or both.

    Args:
        config: Of the runner.
        num_blocks: Blocks of each KV group.
    """

    def __init__(self, config: RunnerConfig, num_blocks: int) -> None:
        super().__init__(config.kv_groups, num_blocks)
        self.max_drafts = config.max_drafts
        self.lives: dict[ToyRequest, Life] = {}
        self.accepted: Counter[tuple[int, int]] = Counter()
        """How often so many drafts were run, and so many of them accepted."""
        self.num_unseen = 0
        """Requests that ran drafts in a step whose tokens before them the host had not seen."""
        self._vocab_size = config.vocab_size
        self._drafts: dict[str, list[int]] = {}

    def draft(self, req_id: str, num_drafts: int) -> None:
        """Say which drafts a request runs in the next step; its output was taken."""
        request = self.requests[req_id]
        assert not request.num_in_flight
        self._drafts[req_id] = self._proposals(request)[request.num_known :][:num_drafts]

    def rewind(self, req_id: str, num_tokens: int) -> None:
        """Take progress back, but not while it is in doubt: no scheduler does that."""
        if not self.requests[req_id].num_drafts_in_flight:
            super().rewind(req_id, num_tokens)

    def plan(self, work: Work) -> StepPlan:
        """Return the plan with its drafts, and with proposals for those that arrive."""
        drafts, self._drafts = self._drafts, {}
        made = super().plan(work)
        arrivals = tuple(
            replace(each, extras={"proposals": self._proposals(self.requests[each.req_id])})
            for each in made.arrivals
        )
        return replace(made, arrivals=arrivals, extras={"drafts": drafts} if drafts else {})

    def take(self, output: RunnerOutput) -> None:
        """Take the output, and count how many drafts were accepted."""
        sampled = dict(zip(output.req_ids, output.token_ids, strict=True))
        for request, _, num_drafts in self._draws[0]:
            self.accepted[num_drafts, len(sampled[request.req_id]) - 1] += 1
        super().take(output)

    def _proposals(self, request: ToyRequest) -> list[int]:
        """Return a token for each position, every second or third of them wrong, or none."""
        life = self.lives[request]
        period = (2, 3, 100)[len(life.prompt) % 3]
        return [*life.prompt] + [
            (token_id + (place % period == period - 1)) % self._vocab_size
            for place, token_id in enumerate(life.tokens)
        ]


class DraftStory(RandomStory):
    """Lives like those of `RandomStory`, in which any request may run drafts in any step.

    Args:
        seed: Of everything random here.
        config: Of the runner; its limits are kept to.
        lives: What requests are made of.
    """

    def __init__(self, seed: int, config: RunnerConfig, lives: Sequence[Life]) -> None:
        super().__init__(seed, config)
        self._lives = lives
        self._has_proposals: dict[ToyRequest, int] = {}
        """Requests whose row was given a token, by their preemptions."""

    def _add(self, host: ToyHost, req_id: str | None = None) -> None:
        assert isinstance(host, DraftingHost)
        self._num_added += 1
        life = self._random.choice(self._lives)
        request = host.add(req_id or f"r{self._num_added}", life.prompt, life.sampling)
        host.lives[request] = life
        donors = [
            other
            for other in host.requests.values()
            if host.lives[other] is life.donor
            and other.num_computed - other.num_in_flight >= life.num_shared
        ]
        if donors and life.sampling.num_prompt_logprobs is None:
            host.share(self._random.choice(donors).req_id, request.req_id, life.num_shared)
        room = self._config.max_model_len - len(life.prompt)
        self._lengths[request] = min(self._random.choice((self._random.randint(1, 20), room)), room)

    def _work(self, host: ToyHost) -> dict[str, int]:
        assert isinstance(host, DraftingHost)
        work = super()._work(host)
        uniform = self._random.choice((None, None, 0, host.max_drafts, host.max_drafts))
        decodes = {req_id: 1 for req_id in work if host.requests[req_id].num_left == 1}
        if uniform is not None and decodes:
            work = decodes
        room = self._config.max_num_tokens - sum(work.values())
        for req_id in work:
            wanted = self._random.randint(0, host.max_drafts) if uniform is None else uniform
            num_drafts = self._draft(host, req_id, work[req_id], min(wanted, room))
            work[req_id] += num_drafts
            room -= num_drafts
        return work

    def _draft(self, host: DraftingHost, req_id: str, num_tokens: int, wanted: int) -> int:
        """Return how many drafts a request runs behind its tokens, of as many as are wanted."""
        request = host.requests[req_id]
        if num_tokens != request.num_left:
            return 0
        num_drafts = max(min(wanted, self._config.max_model_len - request.num_known), 0)
        is_proposed = self._has_proposals.get(request) == request.num_preemptions
        self._has_proposals[request] = request.num_preemptions
        if not request.num_in_flight and not (is_proposed and self._random.random() < 0.3):
            host.draft(req_id, num_drafts)
            return num_drafts
        host.num_unseen += num_drafts > 0 and request.num_in_flight > 0
        return num_drafts if is_proposed else 0


def undrafted_lives(
    seed: int, config: RunnerConfig, count: int, make_sampling: MakeSampling
) -> list[Life]:
    """Make lives; every other one begins with what another one has drawn.

    Args:
        seed: Of prompts and parameters.
        config: Of the runner with drafts.
        count: How many, twice.
        make_sampling: Makes each life's parameters.
    """
    rng = random.Random(seed)
    page = max(group.block_size for group in config.kv_groups)

    def prompt() -> list[int]:
        length = rng.randint(1, config.max_model_len // 4)
        return [rng.randrange(config.vocab_size) for _ in range(length)]

    donors = [Life(prompt=prompt(), sampling=make_sampling(rng, config)) for _ in range(count)]
    _live(donors, config)
    sharers = []
    for donor in donors:
        num_shared = page * rng.randint(1, config.max_model_len // 2 // page)
        shared = [*donor.prompt, *donor.tokens][:num_shared]
        sampling = make_sampling(rng, config)
        sharers.append(
            Life(prompt=[*shared, *prompt()], sampling=sampling, donor=donor, num_shared=num_shared)
        )
    _live(sharers, config)
    return donors + sharers


def _live(lives: Sequence[Life], config: RunnerConfig) -> None:
    """Let requests draw side by side until their rows are full, without drafts."""
    length = config.max_model_len
    groups = tuple(replace(group, num_blocks=length * len(lives)) for group in config.kv_groups)
    toy = Toy(
        replace(
            config,
            max_num_reqs=len(lives),
            max_num_tokens=len(lives) * length,
            kv_groups=groups,
            graphs=GraphSizes(),
            max_drafts=0,
        ),
        num_blocks=length * len(lives),
    )
    toy.host = host = ScoringHost(groups, length * len(lives))
    requests = [
        host.add(f"{place}", life.prompt, life.sampling) for place, life in enumerate(lives)
    ]
    while work := {
        request.req_id: request.num_left for request in requests if request.num_computed < length
    }:
        toy.run(work)
    for life, request in zip(lives, requests, strict=True):
        life.tokens = request.outputs
        life.scores = host.scores.get(request, [])
        life.of_prompt = host.of_prompts.get(request, [])


DRAFTS = Feature(
    make_host=DraftingHost,
    options={"head": ScriptedHead, "extensions": (*EXTENSIONS, DraftTokens, DeviceDrafts)},
)
"""Drafts of the host and of the device, and a head that verifies them."""


def drafting_toy(
    config: RunnerConfig, graph_maker: GraphMaker | None = None, **options: Any
) -> tuple[Toy, DraftingHost]:
    """Return a runner that verifies drafts, and the host that has some.

    Args:
        config: Of the runner.
        graph_maker: As for `Toy`.
        options: As for `Toy`.
    """
    toy = Toy(config, graph_maker=graph_maker, **{**DRAFTS.options, **options})
    toy.host = host = DraftingHost(config, toy.host.num_blocks)
    return toy, host
