"""The process of a shadow: an mrv2 worker with V1's weights and a KV cache of its own.

Started as `python -m mrv2_diff.shadow.child FD`, where FD is a socket to the serving process. It
ends when that process does, and it is what the kernel ends first when memory runs out.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mrv2_diff.shadow.messages import Done, Failed, Ready, Start
from mrv2_diff.shadow.slices import Slice

NICENESS = 10
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve one desk until it closes the connection."""
    _yield_to_the_server()
    with Connection(int(sys.argv[1])) as connection:
        try:
            from mrv2_diff.shadow.build import build  # imports vLLM, while V1 loads its model

            start = _receive(connection)
            if not isinstance(start, Start):
                raise TypeError(f"the first message is a {type(start).__name__}")
            follower, ready = build(start)
            _send(connection, ready)
            while True:
                part: Slice = _receive(connection)
                _send(connection, follower.run(part))
        except EOFError:
            return 0
        except Exception:  # noqa: BLE001 - said to the desk, which gives this process up
            with contextlib.suppress(OSError):
                _send(connection, Failed(error=traceback.format_exc(limit=-6)))
            return 1


def _yield_to_the_server() -> None:
    """Take what the server leaves: other cores than its own where it is bound to some."""
    os.nice(NICENESS)
    cores = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _send(connection: Connection, message: Ready | Done | Failed) -> None:
    connection.send_bytes(pickle.dumps(message))


if __name__ == "__main__":
    sys.exit(main())
