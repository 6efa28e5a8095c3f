"""Mirrored lists: packed in row order, carried over when one changed, and found again by row."""

import itertools

import numpy as np
import torch
from torch import Tensor

from mrv2.memory.ragged import MirroredLists, places_of
from mrv2.memory.transfers import Transfers, queue_copy


def lists_of(lists: MirroredLists) -> list[list[int]]:
    bounds = lists.bounds.tolist()
    return [lists.words[start:end].tolist() for start, end in itertools.pairwise(bounds)]


def test_lists_are_packed_by_row_and_rows_without_one_are_empty() -> None:
    lists = MirroredLists(4, Transfers(torch.device("cpu")))
    lists.set(3, [7, -1])
    lists.set(1, np.array([5], dtype=np.int32))
    lists.flush()
    assert lists_of(lists) == [[], [5], [], [7, -1]]
    assert lists.is_set.tolist() == [False, True, False, True]
    lists.clear(1)
    lists.set(3, [])
    lists.flush()
    assert lists_of(lists) == [[]] * 4
    assert not lists.is_set.any()


def test_a_flush_carries_over_only_what_changed() -> None:
    copies: list[int] = []

    def copy(destination: Tensor, source: Tensor) -> None:
        copies.append(destination.numel())
        queue_copy(destination, source)

    lists = MirroredLists(3, Transfers(torch.device("cpu"), copy))
    lists.flush()
    lists.clear(2)
    lists.flush()
    assert copies == []
    lists.set(0, [4, 5, 6])
    lists.flush()
    lists.flush()
    assert copies == [4, 3]


def test_a_list_is_copied_when_it_is_set() -> None:
    lists = MirroredLists(1, Transfers(torch.device("cpu")))
    given = np.array([1, 2], dtype=np.int32)
    lists.set(0, given)
    given[:] = 9
    lists.flush()
    assert lists_of(lists) == [[1, 2]]


def test_places_name_every_word_of_every_list_in_the_order_of_the_rows() -> None:
    bounds = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    owners, places = places_of(bounds, torch.tensor([3, 2, 1, 2, 0], dtype=torch.int32))
    assert owners.tolist() == [0, 1, 1, 1, 3, 3, 3, 4, 4]
    assert places.tolist() == [5, 2, 3, 4, 2, 3, 4, 0, 1]


def test_rows_without_lists_have_no_places() -> None:
    bounds = torch.zeros(4, dtype=torch.int32)
    for rows in ([2, 0], []):
        owners, places = places_of(bounds, torch.tensor(rows, dtype=torch.int32))
        assert owners.tolist() == places.tolist() == []
