"""Requests that come, wait, are pushed out, come back and leave."""

import random
from dataclasses import replace

from mrv2_diff.case import Abort, Add, Case, Event
from mrv2_diff.catalog.prompts import CACHED, CHUNKED, ROOMY, TIGHT, prompt


def _chunked_prefill() -> tuple[Event, ...]:
    lengths = (23, 47, 48, 49, 96, 97, 150, 31)
    return tuple(
        Add(step=2 * index, req_id=f"chunk-{index}", prompt=prompt(index, length), max_tokens=12)
        for index, length in enumerate(lengths)
    )


def _prefix_cache() -> tuple[Event, ...]:
    shared = prompt(7, 128)
    first = Add(step=0, req_id="cold", prompt=(*shared, *prompt(1, 9)), max_tokens=8)
    hits = tuple(
        Add(
            step=12 + index,
            req_id=f"hit-{index}",
            prompt=(*shared, *prompt(20 + index, 5 + 11 * index)),
            max_tokens=16,
        )
        for index in range(6)
    )
    whole = Add(step=20, req_id="whole-prompt", prompt=shared, max_tokens=12)
    return (first, *hits, whole)


def _preemption() -> tuple[Event, ...]:
    return tuple(
        Add(
            step=index // 2,
            req_id=f"tight-{index}",
            prompt=prompt(40 + index, 28 + index),
            max_tokens=90,
        )
        for index in range(8)
    )


def _preemption_of_chunks() -> tuple[Event, ...]:
    return tuple(
        Add(
            step=index,
            req_id=f"long-{index}",
            prompt=prompt(60 + index, 60 + 15 * index),
            max_tokens=70,
        )
        for index in range(6)
    )


def _abort_and_reuse() -> tuple[Event, ...]:
    events: list[Event] = []
    for index in range(4):
        events.append(
            Add(step=0, req_id=f"kept-{index}", prompt=prompt(80 + index, 20), max_tokens=40)
        )
    for turn in range(4):
        events.append(
            Add(
                step=4 + 8 * turn,
                req_id="reused",
                prompt=prompt(90 + turn, 18 + 7 * turn),
                max_tokens=30,
            )
        )
        events.append(Abort(step=9 + 8 * turn, req_id="reused"))
    events.append(Abort(step=15, req_id="kept-1"))
    return tuple(sorted(events, key=lambda event: event.step))


def _mixed() -> tuple[Event, ...]:
    return tuple(
        Add(
            step=3 * index,
            req_id=f"mixed-{index}",
            prompt=prompt(100 + index, 5 + 13 * (index % 7)),
            max_tokens=24,
        )
        for index in range(14)
    )


def _greedy() -> tuple[Event, ...]:
    return tuple(
        Add(step=0, req_id=f"greedy-{index}", prompt=prompt(index, 3 + 5 * index), max_tokens=32)
        for index in range(8)
    )


def _churn() -> tuple[Event, ...]:
    """64 requests that arrive at random over 290 steps and run from 8 to 80 tokens each."""
    source = random.Random(11)
    events: list[Event] = []
    for index in range(64):
        step = source.randrange(290) if index >= 12 else 0
        length, max_tokens = source.randrange(4, 90), source.randrange(8, 80)
        events.append(
            Add(
                step=step,
                req_id=f"churn-{index}",
                prompt=prompt(200 + index, length),
                max_tokens=max_tokens,
            )
        )
        if index % 16 == 5:
            events.append(Abort(step=step + 11, req_id=f"churn-{index}"))
    return tuple(sorted(events, key=lambda event: event.step))


CASES = (
    Case(
        id="lifecycle.greedy",
        area="lifecycle",
        feature="greedy",
        title="Eight greedy requests of different lengths",
        engine=ROOMY,
        workload=_greedy,
    ),
    Case(
        id="lifecycle.mixed",
        area="lifecycle",
        feature="mixed prefill and decode",
        title="Prompts arrive while others decode",
        engine=ROOMY,
        workload=_mixed,
    ),
    Case(
        id="lifecycle.chunked_prefill",
        area="lifecycle",
        feature="chunked prefill",
        title="Prompts around and beyond the token budget of 48",
        engine=CHUNKED,
        workload=_chunked_prefill,
        expects=frozenset({"chunks"}),
    ),
    Case(
        id="lifecycle.prefix_cache",
        area="lifecycle",
        feature="prefix caching",
        title="A shared prefix of four blocks, and a prompt that is cached whole",
        engine=CACHED,
        workload=_prefix_cache,
        expects=frozenset({"cache_hits"}),
    ),
    Case(
        id="lifecycle.preemption",
        area="lifecycle",
        feature="preemption and resume",
        title="Eight requests on 13 blocks",
        engine=TIGHT,
        workload=_preemption,
        expects=frozenset({"preemptions", "resumes"}),
    ),
    Case(
        id="lifecycle.preemption_chunked_cached",
        area="lifecycle",
        feature="preemption and resume",
        title="Preempted requests come back in chunks and with cached prefixes",
        engine=replace(TIGHT, max_num_batched_tokens=48, prefix_caching=True),
        workload=_preemption_of_chunks,
        expects=frozenset({"preemptions", "resumes", "chunks"}),
    ),
    Case(
        id="lifecycle.abort_reuse",
        area="lifecycle",
        feature="abort and id reuse",
        title="One id is aborted and used again four times",
        engine=ROOMY,
        workload=_abort_and_reuse,
        expects=frozenset({"aborts"}),
    ),
    Case(
        id="lifecycle.churn",
        area="lifecycle",
        feature="arrivals and departures",
        title="64 requests arrive and leave over 300 steps",
        engine=replace(ROOMY, max_num_seqs=24, num_blocks=120),
        workload=_churn,
    ),
)
