"""Block tables: blocks are appended behind those held, and a freed row starts over."""

import pytest
import torch

from mrv2.config import KVGroup
from mrv2.errors import CapacityError, ProtocolError
from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.state.block_tables import BlockTables, gather_block_table, slot_mapping

GROUPS = (KVGroup(block_size=4, max_blocks=6), KVGroup(block_size=8, max_blocks=3))


@pytest.fixture
def tables() -> BlockTables:
    return BlockTables(GROUPS, 4, Arena(Transfers(torch.device("cpu"))))


def arrival(*block_ids: list[int]) -> Arrival:
    return Arrival(
        req_id="a",
        token_ids=[1],
        prompt_len=1,
        num_computed_tokens=0,
        block_ids=block_ids,
        sampling=Sampling(),
    )


def test_blocks_are_appended_behind_those_held(tables: BlockTables) -> None:
    tables.admit(2, arrival([10, 11], [20]))
    tables.append(2, ([12], []))
    tables.tables[0].apply_write()
    tables.append(2, ([13], [21]))
    tables.tables[0].apply_write()
    assert tables.tables[0].tensor[2].tolist() == [10, 11, 12, 13, 0, 0]
    assert tables.tables[1].tensor[2].tolist() == [20, 21, 0]
    assert tables.tables[0].tensor[[0, 1, 3]].count_nonzero() == 0


def test_the_next_owner_of_a_row_starts_at_the_first_column(tables: BlockTables) -> None:
    tables.admit(1, arrival([10, 11, 12], [20]))
    tables.tables[0].apply_write()
    tables.evict(1)
    tables.admit(1, arrival([30], []))
    tables.append(1, ([31], [40]))
    tables.tables[0].apply_write()
    assert tables.tables[0].tensor[1, :2].tolist() == [30, 31]
    assert tables.tables[1].tensor[1, :1].tolist() == [40]


def test_a_full_table_takes_no_more(tables: BlockTables) -> None:
    tables.admit(0, arrival(list(range(6)), [1]))
    tables.check("a", 0, ([], [2, 3]))
    tables.check("a", None, (list(range(6)), [1, 2, 3]))
    with pytest.raises(
        CapacityError, match="'a': 1 blocks are added to 6 of KV group 0; its max_blocks is 6"
    ):
        tables.check("a", 0, ([9], []))
    with pytest.raises(
        CapacityError, match="3 blocks are added to 1 of KV group 1; its max_blocks is 3"
    ):
        tables.check("a", 0, ([], [1, 2, 3]))
    with pytest.raises(ProtocolError, match="blocks are given for 3 KV groups; there are 2"):
        tables.check("a", 0, ([], [], []))
    with pytest.raises(CapacityError, match=r"columns 6\.\.7 of row 0"):
        tables.append(0, ([9], []))


def test_tables_are_gathered_in_the_order_of_the_batch() -> None:
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    out = torch.full((4, 3), -1, dtype=torch.int32)
    gather_block_table(table, torch.tensor([2, 0], dtype=torch.int32), 2, out)
    assert out.tolist() == [[7, 8, -1], [1, 2, -1], [-1, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("query_lens", "positions", "slots"),
    [
        # Blocks of 4: position p of a request is in its block p // 4.
        ([3, 0, 2], [2, 3, 4, 7, 8], [10 * 4 + 2, 10 * 4 + 3, 11 * 4, 31 * 4 + 3, 32 * 4]),
        ([1, 1, 1], [0, 5, 11], [10 * 4, 21 * 4 + 1, 32 * 4 + 3]),
    ],
)
def test_a_slot_is_the_block_of_the_position_and_the_rest(
    query_lens: list[int], positions: list[int], slots: list[int]
) -> None:
    tables = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]], dtype=torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    out = torch.full((len(positions),), -1)
    slot_mapping(tables, starts, torch.tensor(positions), 4, max(query_lens), out)
    assert out.tolist() == slots
