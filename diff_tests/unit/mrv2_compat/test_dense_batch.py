"""Changes of a dense batch, told so that a processor ends up with the batch that is meant."""

import random
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

Batch = dict[int, list[int]]


def member(number: int) -> Any:
    from vllm import SamplingParams

    from mrv2_compat.vllm_v1.features.dense_batch import Member

    return Member(req_id=f"r{number}", params=SamplingParams(), prompt=[number], outputs=[])


def as_documented(batch: Batch, update: Any) -> None:
    """Removed, then added, then moved: the order that the protocol's page states."""
    for index in update.removed:
        batch.pop(index, None)
    for index, _, _, outputs in update.added:
        batch[index] = outputs
    for one, other, direction in update.moved:
        first, second = batch.pop(one, None), batch.pop(other, None)
        if first is not None:
            batch[other] = first
        if second is not None and direction.name == "SWAP":
            batch[one] = second


def as_vllms_helper_does(batch: Batch, update: Any) -> None:
    """`process_dict_updates`, which many processors use; it adds before it removes."""
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    process_dict_updates(batch, update, lambda _params, _prompt, outputs: outputs)


@pytest.mark.parametrize("follow", [as_documented, as_vllms_helper_does])
@pytest.mark.parametrize("seed", range(3))
def test_a_processor_follows_any_changes(seed: int, follow: Callable[[Batch, Any], None]) -> None:
    from mrv2_compat.vllm_v1.features.dense_batch import batch_update

    chance = random.Random(seed)
    members = [member(number) for number in range(9)]
    batch: list[Any] = []
    told: Batch = {}
    kinds = set()
    for _ in range(400):
        wanted = chance.sample(members, chance.randint(0, len(members)))
        if chance.random() < 0.3:  # a steady batch, with one gone or one more
            wanted = [entry for entry in batch if chance.random() < 0.9]
        update = batch_update(batch, wanted)
        if update is not None:
            assert update.batch_size == len(wanted)
            assert not {entry[0] for entry in update.added} & set(update.removed)
            assert list(update.removed) == sorted(update.removed, reverse=True)
            kinds |= {name for name in ("removed", "added", "moved") if getattr(update, name)}
            follow(told, update)
        assert batch == wanted
        assert told.keys() == set(range(len(wanted)))
        assert all(told[index] is entry.outputs for index, entry in enumerate(wanted))
    assert kinds == {"removed", "added", "moved"}


def test_nothing_is_told_where_nothing_changed() -> None:
    from mrv2_compat.vllm_v1.features.dense_batch import batch_update

    batch = [member(1), member(2)]
    assert batch_update(batch, list(batch)) is None
    assert batch_update([], []) is None


def test_a_request_that_comes_back_in_the_same_place_is_another_one() -> None:
    from mrv2_compat.vllm_v1.features.dense_batch import batch_update

    old, new = member(1), member(1)
    update: Any = batch_update([old], [new])
    assert (list(update.removed), list(update.moved)) == ([], [])
    assert update.added == [(0, new.params, new.prompt, new.outputs)]


def test_what_leaves_the_end_is_only_removed_and_what_leaves_the_front_is_filled() -> None:
    from mrv2_compat.vllm_v1.features.dense_batch import batch_update

    one, two, three = (member(number) for number in range(3))
    update: Any = batch_update([one, two, three], [one])
    assert (list(update.removed), list(update.added), list(update.moved)) == ([2, 1], [], [])
    update = batch_update([one, two, three], [three, two])
    assert list(update.removed) == [0]
    assert [(a, b, way.name) for a, b, way in update.moved] == [(2, 0, "UNIDIRECTIONAL")]
