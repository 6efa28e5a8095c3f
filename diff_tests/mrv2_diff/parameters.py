"""The parameters of a request: one row for each, with the values at which the harness tries it.

The catalog, the random requests and the measurements read these rows. A parameter stands elsewhere
only in what is its own: its mutants, its op's samples, its formulas in `right_values` and `draws`,
its field in the format of traces, and cases of several parameters at chosen values.

Places and numbers of bundles are part of what a seed means: in another order the same seeds would
give other requests.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mrv2_compat.vllm_v1.requests import parameters as served
from mrv2_diff.kinds import Kind, Options, drawn, greedy, some_tokens
from mrv2_diff.models.tokenizer import VOCAB_SIZE

Group = Literal["masks", "penalties", "cuts"]
"""Parameters that do alike things to logits."""

Tokens = Callable[[int], Sequence[int]]
"""Draws so many different tokens of the vocabulary."""
Draw = Callable[[random.Random, Tokens], object]
"""Draws a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCase:
    """The case of the catalog in which requests have the parameter beside others without it."""

    id: str
    number: int
    """Its place among these cases, which chooses its prompts."""
    feature: str
    title: str
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a request."""

    name: str
    """vLLM's."""
    neutral: object = None
    """Asks for nothing."""
    group: Group | None = None
    own_case: OwnCase | None = None
    paired: tuple[object, ...] = ()
    """Values beside the neutral one in the cases of all pairs."""
    bounds: tuple[object, ...] = ()
    """Values at the ends of what matters, and beyond."""
    kernels: str | None = None
    """Pattern of the names of its kernels, for any runner."""
    counted: tuple[str, object] | None = None
    """A name and the value at which draws are counted against their exact distribution."""

    bundles: Mapping[int, object] = field(default_factory=dict)
    """Values in random schedules, by number of the bundle; a request asks for one bundle."""
    alike: Mapping[int, object] = field(default_factory=dict)
    """Values in cases without a fault, by place in the group; what shares a place is asked for
    together. Each shows in any request that asks."""
    invariance: Mapping[int, Draw] = field(default_factory=dict)
    """How a value is drawn where the same requests are scheduled in many ways, by place."""
    story: Draw | None = None
    """How a value is drawn in the toy host's stories."""

    attribute: str | None = None
    """Field of SamplingParams that has it in tokens, where `name` has text."""
    acts_alone: bool = True
    """Whether it asks for something by itself."""
    needs_markers: bool = False
    """Whether a runner serves it only if it was told how thinking begins and ends."""
    goes_with_grammars: bool = True
    """False if it may leave a grammar no token, or force one that it forbids."""

    @property
    def ours(self) -> str:
        """Name of the field of `Sampling`."""
        return _OURS[self.name]


def row_name(row: served.Parameter) -> str:
    """Return the name that the adapter's row of a parameter has here."""
    return next(iter(row.served), row.ours or row.theirs)


_OURS = {row_name(row): row.ours for row in served.PARAMETERS if row.ours is not None}

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        name="temperature",
        neutral=1.0,
        paired=(0.0, 0.7, 1.6),
        counted=("temperature", 0.7),
    ),
    Parameter(name="seed"),
    Parameter(
        name="top_k",
        neutral=0,
        group="cuts",
        own_case=OwnCase(
            id="top_k",
            number=8,
            feature="top-k",
            title="From one token to all but one",
            kinds=(
                drawn(top_k=5),
                drawn(top_k=1),
                greedy(top_k=3),
                drawn(top_k=330),
                drawn(top_k=60),
            ),
        ),
        paired=(5, 60),
        bounds=(-1, 0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**6),
        kernels="top_?k",
        counted=("top-k", 9),
        bundles={4: 5},
        alike={0: 5, 3: 30},
        invariance={0: lambda draw, _: draw.randint(1, 12)},
        story=lambda draw, _: draw.randint(1, 20),
    ),
    Parameter(
        name="top_p",
        neutral=1.0,
        group="cuts",
        own_case=OwnCase(
            id="top_p",
            number=9,
            feature="top-p",
            title="Small and large parts of the distribution",
            kinds=(
                drawn(top_p=0.9),
                drawn(top_p=0.3),
                greedy(top_p=0.5),
                drawn(top_p=0.999),
                drawn(top_p=0.6),
            ),
        ),
        paired=(0.9, 0.4),
        bounds=(1e-9, 0.999999, 1.0),
        kernels="top_?p",
        counted=("top-p", 0.85),
        bundles={4: 0.9},
        alike={1: 0.4},
        invariance={1: lambda draw, _: draw.uniform(0.3, 0.95)},
        story=lambda draw, _: draw.uniform(0.3, 1.0),
    ),
    Parameter(
        name="min_p",
        neutral=0.0,
        group="cuts",
        own_case=OwnCase(
            id="min_p",
            number=7,
            feature="min-p",
            title="Fractions of the likeliest token's probability",
            kinds=(
                drawn(min_p=0.05),
                drawn(min_p=0.5),
                greedy(min_p=0.3),
                drawn(min_p=0.9),
                drawn(min_p=0.001),
            ),
        ),
        paired=(0.05, 0.3),
        bounds=(0.0, 1e-9, 1.0),
        kernels="min_p",
        counted=("min-p", 0.06),
        bundles={4: 0.05},
        alike={2: 0.3},
        invariance={2: lambda draw, _: draw.uniform(0.01, 0.3)},
        story=lambda draw, _: draw.uniform(0.0, 0.3),
    ),
    Parameter(
        name="presence_penalty",
        neutral=0.0,
        group="penalties",
        own_case=OwnCase(
            id="presence_penalty",
            number=3,
            feature="penalties",
            title="Presence penalties of both signs",
            kinds=(
                greedy(presence_penalty=1.5),
                drawn(presence_penalty=-1.1),
                greedy(presence_penalty=-2.0),
                drawn(presence_penalty=2.0),
                greedy(presence_penalty=0.3),
            ),
        ),
        paired=(1.2, -0.8),
        bounds=(-2.0, 2.0),
        kernels="penalt",
        bundles={0: 0.7},
        alike={0: 1.2},
        invariance={3: lambda draw, _: draw.uniform(-1.5, 1.5)},
        story=lambda draw, _: draw.uniform(-1, 2),
    ),
    Parameter(
        name="frequency_penalty",
        neutral=0.0,
        group="penalties",
        own_case=OwnCase(
            id="frequency_penalty",
            number=4,
            feature="penalties",
            title="Frequency penalties of both signs",
            kinds=(
                greedy(frequency_penalty=-0.7),
                drawn(frequency_penalty=1.3),
                greedy(frequency_penalty=2.0),
                drawn(frequency_penalty=-2.0),
                greedy(frequency_penalty=0.1),
            ),
        ),
        paired=(0.6, -0.4),
        bounds=(-2.0, 2.0),
        kernels="penalt",
        bundles={0: 0.4},
        alike={1: -0.6},
        invariance={4: lambda draw, _: draw.uniform(-1.5, 1.5)},
        story=lambda draw, _: draw.uniform(-1, 2),
    ),
    Parameter(
        name="repetition_penalty",
        neutral=1.0,
        group="penalties",
        own_case=OwnCase(
            id="repetition_penalty",
            number=5,
            feature="penalties",
            title="Repetition penalties below and above 1, which count the prompt as well",
            kinds=(
                greedy(repetition_penalty=1.3),
                drawn(repetition_penalty=0.7),
                greedy(repetition_penalty=3.0),
                drawn(repetition_penalty=1.01),
                greedy(repetition_penalty=0.5),
            ),
        ),
        paired=(1.3, 0.8),
        bounds=(0.01, 0.999, 1.001, 10.0),
        kernels="penalt",
        bundles={1: 1.4},
        alike={2: 1.3},
        invariance={5: lambda draw, _: draw.uniform(0.6, 1.8)},
        story=lambda draw, _: draw.uniform(0.7, 1.6),
    ),
    Parameter(
        name="logit_bias",
        neutral=(),
        group="masks",
        own_case=OwnCase(
            id="logit_bias",
            number=2,
            feature="logit bias",
            title="Biases of all sizes on one token, on many, on the first and the last",
            kinds=(
                greedy(logit_bias=tuple((token, 2.5) for token in some_tokens(7, 50))),
                drawn(logit_bias=((0, 4.0), (330, -4.0), (17, 0.125))),
                greedy(logit_bias=((9, 100.0),)),
                drawn(logit_bias=tuple((token, -100.0) for token in some_tokens(8, 300))),
                greedy(logit_bias=((3, 1.0), (4, -1.0))),
            ),
        ),
        paired=(
            tuple((token, 1.5) for token in some_tokens(20, 60)),
            ((7, 100.0), (8, -100.0), (9, 2.0)),
        ),
        # What a penalty does to a row, as far as the draw can tell.
        counted=("bias", {3: 1.5, 11: -2.0, 20: 0.75}),
        alike={
            2: tuple((token, 1.5) for token in some_tokens(20, 60)),
            3: ((7, 100.0), (8, -100.0), (9, 2.0)),
        },
        invariance={
            6: lambda draw, tokens: {token: draw.uniform(-4.0, 4.0) for token in tokens(3)}
        },
        story=lambda draw, tokens: {token: draw.uniform(-5, 5) for token in tokens(4)},
    ),
    Parameter(
        name="allowed_token_ids",
        group="masks",
        own_case=OwnCase(
            id="allowed_tokens",
            number=0,
            feature="allowed tokens",
            title="A few, half and one of the vocabulary allowed",
            kinds=(
                greedy(allowed_token_ids=some_tokens(1, 40)),
                drawn(allowed_token_ids=some_tokens(2, 165)),
                greedy(allowed_token_ids=(330,)),
                drawn(allowed_token_ids=some_tokens(3, 7)),
                greedy(allowed_token_ids=(7, 7, 3)),
            ),
        ),
        paired=(some_tokens(21, 120), some_tokens(22, 20)),
        bundles={3: [0, 3, 5, 8, 13, 21, 30]},
        alike={0: some_tokens(21, 120)},
        invariance={9: lambda _, tokens: tokens(12)},
        story=lambda _, tokens: tokens(30),
        goes_with_grammars=False,
    ),
    Parameter(
        name="bad_words",
        neutral=(),
        attribute="_bad_words_token_ids",
        group="masks",
        own_case=OwnCase(
            id="bad_words",
            number=6,
            feature="bad words",
            title=(
                "Words of one token, of two and of three; "
                "the longer ones begin in the outputs alone"
            ),
            kinds=(
                greedy(bad_words=tuple((token,) for token in some_tokens(9, 40))),
                drawn(bad_words=tuple((first, first * 7 % 331) for first in range(331))),
                greedy(
                    bad_words=tuple(
                        (first, (first + step) % 331)
                        for first in range(0, 331, 2)
                        for step in (1, 100, 200)
                    )
                ),
                drawn(
                    allowed_token_ids=(1, 2, 3, 4),
                    bad_words=tuple(
                        (a, b, (a + b) % 4 + 1) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4)
                    ),
                ),
                greedy(bad_words=((5,), (5, 6), (330, 329, 328))),
            ),
        ),
        paired=(
            tuple((token,) for token in some_tokens(23, 80)),
            tuple((first, first * 3 % 331) for first in range(331)),
        ),
        alike={1: tuple((token,) for token in some_tokens(23, 80))},
        invariance={8: lambda _, tokens: [tokens(length) for length in (1, 1, 2, 2, 3)]},
        story=lambda _, tokens: (tokens(1), tokens(2)),
    ),
    Parameter(
        name="min_tokens",
        neutral=0,
        group="masks",
        own_case=OwnCase(
            id="min_tokens",
            number=1,
            feature="min tokens",
            title=(
                "Stop tokens are masked until the least number of outputs, "
                "counted across preemptions"
            ),
            kinds=(
                greedy(min_tokens=30, stop_token_ids=some_tokens(4, 60)),
                drawn(min_tokens=48, stop_token_ids=some_tokens(5, 100)),
                greedy(min_tokens=48),
                drawn(min_tokens=1, stop_token_ids=(5,), ignore_eos=False),
                greedy(min_tokens=44, stop_token_ids=some_tokens(6, 30), ignore_eos=False),
            ),
        ),
        paired=(14,),
        bundles={2: 1},
        # As many outputs as the requests of these two are sure to have room for.
        alike={4: 4},
        invariance={7: lambda draw, _: draw.randint(1, 14)},
        story=lambda draw, _: draw.randint(1, 8),
    ),
    Parameter(
        name="stop_token_ids",
        neutral=(),
        group="masks",
        paired=(some_tokens(24, 25),),
        alike={4: some_tokens(24, 25)},
        story=lambda _, tokens: tokens(3),
        acts_alone=False,
    ),
    Parameter(
        name="thinking_token_budget",
        paired=(0, 6),
        invariance={10: lambda draw, _: draw.randint(0, 6)},
        story=lambda draw, _: draw.randint(0, 6),
        needs_markers=True,
        goes_with_grammars=False,
    ),
    Parameter(
        name="logprobs",
        paired=(0, 4),
        kernels="logprob",
        invariance={12: lambda draw, _: draw.choice([-1, 0, 1, 5])},
        story=lambda draw, _: draw.randint(0, 5),
    ),
    Parameter(
        name="logprob_token_ids",
        invariance={11: lambda draw, tokens: tokens(draw.randint(1, 6))},
        story=lambda _, tokens: tokens(3),
    ),
    Parameter(
        name="prompt_logprobs",
        kernels="logprob",
        invariance={13: lambda draw, _: draw.choice([-1, 0, 1, 5])},
        story=lambda draw, _: draw.randint(0, 4),
    ),
    Parameter(name="structured_outputs"),
    Parameter(name="extra_args"),
)
"""In the order in which all pairs of their values are sought, and stories draw them."""


def alike_of(group: Group) -> tuple[Options, ...]:
    """Return what requests without a fault ask for of one group, one entry for each place."""
    rows = [row for row in PARAMETERS if row.group == group]
    places = sorted({place for row in rows for place in row.alike})
    return tuple(
        tuple((row.name, row.alike[place]) for row in rows if place in row.alike)
        for place in places
    )
