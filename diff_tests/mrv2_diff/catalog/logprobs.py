"""Log probabilities of drawn tokens and of the likeliest ones."""

from dataclasses import replace

from mrv2_diff.case import Abort, Add, Case, Departure, Event
from mrv2_diff.catalog.prompts import CACHED, CHUNKED, ROOMY, TIGHT, prompt
from mrv2_diff.verdict import Verdict


def _greedy_logprobs() -> tuple[Event, ...]:
    counts = (0, 1, 5, 20, -1, None, 3)
    return tuple(
        Add(
            step=index,
            req_id=f"logprobs-{index}",
            prompt=prompt(400 + index, 10 + index),
            max_tokens=20,
            logprobs=count,
        )
        for index, count in enumerate(counts)
    )


def _random_logprobs() -> tuple[Event, ...]:
    return tuple(
        Add(
            step=index,
            req_id=f"drawn-{index}",
            prompt=prompt(420 + index, 14),
            max_tokens=20,
            temperature=1.5 if index % 2 else 0.0,
            seed=index,
            logprobs=4,
        )
        for index in range(6)
    )


def _given_tokens() -> tuple[Event, ...]:
    """Each request names its own tokens, its count of them another."""
    lists = ((3,), (250, 0, 7), tuple(range(40, 80)), (9, 9, 1), (255, 254))
    return tuple(
        Add(
            step=index,
            req_id=f"given-{index}",
            prompt=prompt(440 + index, 10 + index),
            max_tokens=16,
            temperature=0.9 if index % 2 else 0.0,
            options=(("logprob_token_ids", tokens),),
        )
        for index, tokens in enumerate(lists)
    )


def _given_beside_likeliest() -> tuple[Event, ...]:
    """Requests that name their tokens, beside others that ask for the likeliest."""
    kinds: tuple[tuple[int | None, tuple[int, ...] | None], ...] = (
        (5, None),
        (None, (3, 250, 9)),
        (0, None),
        (None, (7,)),
        (12, None),
    )
    return tuple(
        Add(
            step=index,
            req_id=f"mixed-{index}",
            prompt=prompt(540 + index, 12),
            max_tokens=14,
            logprobs=count,
            options=() if tokens is None else (("logprob_token_ids", tokens),),
        )
        for index, (count, tokens) in enumerate(kinds)
    )


def _of_prompts() -> tuple[Event, ...]:
    """Prompts around the budget of a step, one of them given up, one of a single token."""
    kinds = ((1, 2), (47, 0), (48, 3), (49, 1), (120, 5), (97, -1), (30, None), (160, 2))
    events: list[Event] = [
        Add(
            step=index,
            req_id=f"scored-{index}",
            prompt=prompt(460 + index, length),
            max_tokens=1 if index == 2 else 12,
            temperature=0.8 if index % 3 == 1 else 0.0,
            logprobs=2 if index % 2 else None,
            options=() if count is None else (("prompt_logprobs", count),),
        )
        for index, (length, count) in enumerate(kinds)
    ]
    return (*events, Abort(step=9, req_id="scored-7"))


def _scored_and_preempted() -> tuple[Event, ...]:
    return tuple(
        Add(
            step=index // 2,
            req_id=f"preempted-{index}",
            prompt=prompt(480 + index, 70 + 11 * index),
            max_tokens=60,
            options=(("prompt_logprobs", index % 3),) if index != 3 else (),
        )
        for index in range(6)
    )


def _scored_from_the_cache() -> tuple[Event, ...]:
    """One prompt many times: those that are scored run all of it, whatever is cached."""
    return tuple(
        Add(
            step=3 * index,
            req_id=f"again-{index}",
            prompt=(*prompt(500, 96), index),
            max_tokens=6,
            options=(("prompt_logprobs", 2),) if index % 2 else (),
        )
        for index in range(5)
    )


def _of_processed_logits() -> tuple[Event, ...]:
    """Greedy rows with and without what changes logits, beside random ones that are cut."""
    kinds: tuple[tuple[float, tuple[tuple[str, object], ...]], ...] = (
        (0.0, ()),
        (0.0, (("logit_bias", ((7, 2.5), (9, -3.0))),)),
        (0.7, (("repetition_penalty", 1.3),)),
        (1.4, ()),
        (0.9, (("presence_penalty", 0.6), ("allowed_token_ids", tuple(range(0, 256, 3))))),
    )
    return tuple(
        Add(
            step=index,
            req_id=f"processed-{index}",
            prompt=prompt(520 + index, 20),
            max_tokens=16,
            temperature=temperature,
            seed=index,
            logprobs=(3, 0, 6, -1, 2)[index],
            options=(*options, ("prompt_logprobs", 1)),
        )
        for index, (temperature, options) in enumerate(kinds)
    )


CASES = (
    Case(
        id="logprobs.counts",
        area="logprobs",
        feature="logprobs",
        title="0, n, all and no logprobs in one batch",
        engine=ROOMY,
        workload=_greedy_logprobs,
    ),
    Case(
        id="logprobs.of_random_draws",
        area="logprobs",
        feature="logprobs",
        title="Logprobs are those of the raw logits, whatever the temperature",
        engine=ROOMY,
        workload=_random_logprobs,
    ),
    Case(
        id="logprobs.given_tokens",
        area="logprobs",
        feature="logprobs",
        title="Logprobs of tokens that each request names",
        engine=ROOMY,
        workload=_given_tokens,
    ),
    Case(
        id="logprobs.given_beside_likeliest",
        area="logprobs",
        feature="logprobs",
        title="Each request gets its own tokens or its likeliest ones, whatever its neighbours ask",
        engine=ROOMY,
        workload=_given_beside_likeliest,
        departure=Departure(
            value="logprobs",
            verdict=Verdict.REFERENCE_WRONG,
            why="beside a request that names its tokens, V1 returns no likeliest ones (0017)",
        ),
    ),
    Case(
        id="logprobs.of_prompts",
        area="logprobs",
        feature="prompt logprobs",
        title="Prompts of all lengths, cut into chunks, one given up",
        engine=CHUNKED,
        workload=_of_prompts,
        expects=frozenset({"chunks", "aborts"}),
    ),
    Case(
        id="logprobs.of_preempted_prompts",
        area="logprobs",
        feature="prompt logprobs",
        title="Prompts that are scored while requests are preempted and resumed",
        engine=replace(TIGHT, max_num_batched_tokens=48),
        workload=_scored_and_preempted,
        expects=frozenset({"preemptions"}),
    ),
    Case(
        id="logprobs.of_cached_prompts",
        area="logprobs",
        feature="prompt logprobs",
        title="A prompt that is cached is scored whole",
        engine=CACHED,
        workload=_scored_from_the_cache,
        expects=frozenset({"cache_hits"}),
    ),
    *(
        Case(
            id=f"logprobs.{mode}",
            area="logprobs",
            feature="logprobs modes",
            title=f"{mode} of greedy and random requests, some of them changed",
            engine=replace(ROOMY, logprobs_mode=mode),
            workload=_of_processed_logits,
        )
        for mode in ("raw_logits", "processed_logprobs", "processed_logits")
    ),
)
