"""The process of a shadow: an mrv2 worker with V1's weights and a KV cache of its own.

Started as `python -m mrv2_diff.shadow.child PRIORITY FD`, where FD is a socket to the serving
process. It ends when that process does, and it is what the kernel ends first when memory runs out.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv2_diff.shadow.messages import Done, Failed, Lot, Ready, Start
from mrv2_diff.shadow.settings import IDLE
from mrv2_diff.shadow.slices import Slice, joined

if TYPE_CHECKING:
    from mrv2_diff.shadow.follower import Follower  # imports vLLM

STARTING = 10
RUNNING = 19
"""Niceness until the shadow is ready, which has an end, and after it where the kernel has no idle
priority."""
ANSWER_S = 1.0
"""Longest time for which the desk hears nothing while one step after the other is run."""
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve one desk until it closes the connection."""
    is_idle = sys.argv[-2] == IDLE
    _yield_to_the_server(STARTING if is_idle else 0)
    with Connection(int(sys.argv[-1])) as connection:
        try:
            from mrv2_diff.shadow.build import build  # imports vLLM, while V1 loads its model

            start = _receive(connection)
            if not isinstance(start, Start):
                raise TypeError(f"the first message is a {type(start).__name__}")
            follower, ready = build(start, heartbeat(connection))
            if is_idle:
                _take_only_what_nobody_wants()
            _send(connection, ready)
            while True:
                for done in answers(follower, _gathered(connection)):
                    _send(connection, done)
        except EOFError:
            return 0
        except Exception:  # noqa: BLE001 - said to the desk, which gives this process up
            with contextlib.suppress(OSError):
                _send(connection, Failed(error=traceback.format_exc(limit=-6)))
            return 1


def answers(follower: "Follower", parts: Sequence[Slice]) -> Iterator[Done]:
    """Run slices, and yield what was found now and then, at the end, and before an error."""
    done, told = Done(), time.monotonic()
    for part in joined(parts, follower.max_num_tokens):
        try:
            done.add(follower.run(part))
        except Exception:
            if done.num_slices:
                yield done
            raise
        if time.monotonic() - told > ANSWER_S:
            yield done
            done, told = Done(), time.monotonic()
    if done.num_slices:
        yield done


def heartbeat(connection: Connection) -> Callable[[], None]:
    """Return what tells the desk now and then that steps are run, though no slice is done."""
    told = time.monotonic()

    def tell() -> None:
        nonlocal told
        if time.monotonic() - told > ANSWER_S:
            _send(connection, Done())
            told = time.monotonic()

    return tell


def _take_only_what_nobody_wants() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(RUNNING - STARTING)


def _yield_to_the_server(niceness: int) -> None:
    """Take what the server leaves: other cores than its own where it is bound to some."""
    os.nice(niceness)
    cores = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _gathered(connection: Connection) -> list[Slice]:
    """Return the slices of all lots up to the last one."""
    parts: list[Slice] = []
    while True:
        lot: Lot = _receive(connection)
        parts += lot.slices
        if lot.is_last:
            return parts
        _send(connection, Done())


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _send(connection: Connection, message: Ready | Done | Failed) -> None:
    connection.send_bytes(pickle.dumps(message))


if __name__ == "__main__":
    sys.exit(main())
