"""Noise has the same lengths, keeps equal prefixes equal, and nothing else of what it replaces."""

import msgspec
import numpy as np

from mrv2_diff.traces.events import Event, Executed, Mask, Output, Sampled
from mrv2_diff.traces.privacy import Noise
from mrv2_diff.traces.toy import VOCAB_SIZE, a_load, arrival, going_on

KEY = bytes(range(32))


def _prompt(event: Event) -> list[int]:
    assert isinstance(event, Executed)
    return event.new[0].prompt


def test_lengths_stay_and_tokens_do_not() -> None:
    noise = Noise(VOCAB_SIZE)
    before = a_load(160)
    after = [noise.of(event) for event in before]
    prompts = [event for event in before if isinstance(event, Executed) and event.new]
    replaced = [event for event in after if isinstance(event, Executed) and event.new]
    equal = total = 0
    for old, new in zip(prompts, replaced, strict=True):
        assert len(_prompt(old)) == len(_prompt(new))
        equal += sum(a == b for a, b in zip(_prompt(old), _prompt(new), strict=True))
        total += len(_prompt(old))
    assert equal < 0.02 * total  # 1 in 331 by chance
    assert all(0 <= token < VOCAB_SIZE for event in replaced for token in _prompt(event))


def test_no_name_and_no_drawn_token_is_left() -> None:
    noise = Noise(VOCAB_SIZE)
    data = msgspec.msgpack.encode([noise.of(event) for event in a_load(80)])
    assert b"request-" not in data
    drawn = [event.token_ids for event in a_load(80) if isinstance(event, Output)]
    noisy = [noise.of(event) for event in a_load(80)]
    kept = [event.token_ids for event in noisy if isinstance(event, Output)]
    assert sum(a == b for a, b in zip(drawn, kept, strict=True)) <= 4


def test_equal_prefixes_stay_equal_and_no_further() -> None:
    noise = Noise(VOCAB_SIZE, KEY)
    one = _prompt(noise.of(arrival("a", (1, 2, 3, 4, 4, 4))))
    two = _prompt(noise.of(arrival("b", (1, 2, 3, 9, 4, 4))))
    assert one[:3] == two[:3]
    assert one[3:] != two[3:]
    assert len(set(one[3:])) > 1  # a repeated token is not a repeated noise


def test_a_resumed_request_has_the_noise_that_it_had() -> None:
    noise = Noise(VOCAB_SIZE, KEY)
    prompt = _prompt(noise.of(arrival("a", (1, 2, 3))))
    drawn = noise.of(Output(0, ["a"], [[7]]))
    event = going_on("a")
    known = msgspec.structs.replace(event.known, all_token_ids={"a": [1, 2, 3, 7]})
    resumed = noise.of(msgspec.structs.replace(event, known=known))
    assert isinstance(drawn, Output)
    assert isinstance(resumed, Executed)
    assert resumed.known.all_token_ids == {"r0": prompt + drawn.token_ids[0]}


def test_a_mask_allows_as_many_tokens() -> None:
    bits = np.zeros((2, 11), np.int32)
    bits[0, 0] = 0b1011
    bits[1, :10] = -1
    event = Noise(VOCAB_SIZE).of(Sampled(0, ["a", "b"], Mask.of(bits)))
    assert isinstance(event, Sampled)
    after = event.mask.array()
    counts = np.unpackbits(after.view(np.uint8), axis=1).sum(axis=1).tolist()
    assert counts == [3, 320]
    assert not (after[:, 10] >> (VOCAB_SIZE % 32)).any()  # no bit beyond the vocabulary
    assert after.tolist() != bits.tolist()


def test_lists_of_tokens_become_others_and_stops_stay() -> None:
    event = arrival(
        allowed_token_ids=[4, 5, 6],
        logit_bias={4: 2.0, 9: -1.0},
        stop_token_ids=[2],
        all_stop_token_ids=[2],
        bad_words_token_ids=[[4, 5], [2]],
    )
    replaced = Noise(VOCAB_SIZE, KEY).of(event)
    assert isinstance(replaced, Executed)
    params = replaced.new[0].params
    assert params.allowed_token_ids is not None
    assert len(set(params.allowed_token_ids)) == 3
    assert params.allowed_token_ids != [4, 5, 6]
    assert params.logit_bias is not None
    assert list(params.logit_bias.values()) == [2.0, -1.0]
    assert params.bad_words_token_ids == [params.allowed_token_ids[:2], [2]]
    assert params.all_stop_token_ids == params.stop_token_ids == [2]


def test_an_id_that_is_used_again_is_another_name() -> None:
    noise = Noise(VOCAB_SIZE, KEY)
    noise.of(arrival("a"))
    again = noise.of(msgspec.structs.replace(arrival("a"), finished_req_ids=["a"]))
    assert isinstance(again, Executed)
    assert again.finished_req_ids == ["r0"]
    assert again.new[0].req_id == "r1"
