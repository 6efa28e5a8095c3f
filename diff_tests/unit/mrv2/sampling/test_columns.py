"""What the draw knows of a row: the bound of greedy, and seeds of 64 bits."""

import numpy as np
import pytest
import torch

from mrv2.memory.arena import Arena
from mrv2.memory.transfers import Transfers
from mrv2.params import Sampling
from mrv2.plan import Arrival
from mrv2.sampling.columns import GREEDY_BELOW, DrawColumns


@pytest.fixture
def columns() -> DrawColumns:
    return DrawColumns(4, Arena(Transfers(torch.device("cpu"))))


def admit(columns: DrawColumns, row: int, sampling: Sampling) -> None:
    columns.admit(
        row,
        Arrival(
            req_id="r",
            token_ids=[1],
            prompt_len=1,
            num_computed_tokens=0,
            block_ids=([0],),
            sampling=sampling,
        ),
    )
    flush(columns)


def flush(columns: DrawColumns) -> None:
    columns.flush()
    columns.temperature._arena.flush()


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-6, float(np.nextafter(GREEDY_BELOW, 0))])
def test_below_the_bound_a_row_is_greedy(columns: DrawColumns, temperature: float) -> None:
    admit(columns, 2, Sampling(temperature=1.0))
    admit(columns, 2, Sampling(temperature=temperature))
    assert columns.temperature.device_tensor.tolist()[2] == 0.0


@pytest.mark.parametrize("temperature", [GREEDY_BELOW, 0.01, 2.0])
def test_from_the_bound_on_a_row_keeps_its_temperature(
    columns: DrawColumns, temperature: float
) -> None:
    admit(columns, 2, Sampling(temperature=temperature))
    assert columns.temperature.device_tensor[2] == np.float32(temperature)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_a_seed_keeps_its_64_bits(columns: DrawColumns, seed: int) -> None:
    admit(columns, 0, Sampling(temperature=1.0, seed=seed))
    assert int(columns.seed.device_tensor[0]) % 2**64 == seed % 2**64


def test_an_evicted_row_is_greedy_and_has_no_seed(columns: DrawColumns) -> None:
    admit(columns, 1, Sampling(temperature=1.0, seed=9))
    columns.evict(1)
    flush(columns)
    assert columns.temperature.device_tensor.tolist()[1] == 0.0
    assert columns.seed.device_tensor.tolist()[1] == 0
