"""Structured outputs: grammars of real libraries constrain some requests of the batch.

The engine is short of blocks and of tokens in a step, so the scheduler names requests that are in
the middle of their prompts, and masks come in another order than the batch's.
"""

from dataclasses import replace

from mrv2_diff.case import Case
from mrv2_diff.catalog.workloads import STRAINED, beside_others
from mrv2_diff.kinds import Kind

_CHOICE = (("choice", ("river", "the quick fox", "over")),)
_REGEX = (("regex", r"([a-f]{3}-[0-9]{4,9}\.){4}"),)
_JSON = (
    (
        "json",
        '{"type": "object", "properties": {"is_it": {"type": "boolean"}, "how_many": '
        '{"enum": [1, 20, 300]}}, "required": ["is_it", "how_many"], '
        '"additionalProperties": false}',
    ),
)


def _under(grammar: object, temperature: float = 0.0, **options: object) -> Kind:
    asked = {"structured_outputs": grammar, "ignore_eos": False, **options}
    return Kind(temperature=temperature, options=tuple(asked.items()))


CASES = (
    Case(
        id="sampling.structured",
        area="sampling",
        feature="structured outputs",
        title="Choices, patterns and JSON; one that must go on, one that cannot",
        engine=replace(STRAINED, tokenizer=True),
        workload=beside_others(
            "structured",
            1600,
            (
                _under(_REGEX),
                _under(_JSON),
                replace(_under(_REGEX, temperature=1.0), logprobs=3),
                # The grammar ends first, and leaves nothing but the stop token.
                _under(_CHOICE, min_tokens=30),
                # The grammar may end at once and is not let.
                _under((("regex", "[a-z]{0,40}"),), min_tokens=20),
                _under(_REGEX, logit_bias=((20, 2.0), (70, 1.0))),
            ),
        ),
        expects=frozenset({"preemptions", "resumes", "chunks"}),
    ),
)
