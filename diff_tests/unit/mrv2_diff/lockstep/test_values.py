"""What is copied out of a runner's block tables."""

import numpy as np
import torch

from mrv2_diff.lockstep.values import used_blocks


def test_blocks_that_hold_tokens_are_copied_and_no_others() -> None:
    tables = [torch.tensor([[4, 5, 99], [8, 99, 99], [1, 2, 3]]), torch.tensor([[7, 99], [9, 6]])]
    blocks = used_blocks(tables, [16, 32], ["a", "b"], np.array([17, 16]))
    assert {name: [group.tolist() for group in groups] for name, groups in blocks.items()} == {
        "a": [[4, 5], [7]],
        "b": [[8], [9]],
    }
    tables[0].fill_(0)
    assert blocks["a"][0].tolist() == [4, 5]
