"""A shadow's process with a planted fault, named by `MRV2_DIFF_FAULT`: started like the real one.

The fault is a mutant of the runner by its id, or one that a process can have: `raise`, `hang`,
`memory` (it asks for more than there is) or `die`.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

from mrv2_diff.mutants import MUTANTS
from mrv2_diff.shadow import child

FAULT_VAR = "MRV2_DIFF_FAULT"
AFTER = 3
"""Steps that run well before."""


def _raise() -> None:
    raise RuntimeError("a planted fault")


def _hang() -> None:
    while True:
        time.sleep(0.01)


def _memory() -> None:
    """Take memory until the kernel gives no more, which it does not 256 MiB above what is taken."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    taken = []
    while True:
        taken.append(torch.ones(4 << 20))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "hang": _hang,
    "memory": _memory,
    "die": _die,
}


def main() -> int:
    """Put the fault in, then do what the real one does."""
    name = os.environ[FAULT_VAR]
    if name in FAULTS:
        from mrv2_diff.shadow.follower import Follower

        run, calls = Follower.run, iter(range(1_000_000))

        def faulty(self: Follower, part: object) -> object:
            if next(calls) >= AFTER:
                FAULTS[name]()
            return run(self, part)  # type: ignore[arg-type]

        with patch.object(Follower, "run", faulty):
            return child.main()
    (mutant,) = (mutant for mutant in MUTANTS if mutant.id == name)
    with mutant.apply():
        return child.main()


if __name__ == "__main__":
    sys.exit(main())
