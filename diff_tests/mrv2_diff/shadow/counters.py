"""What the shadow counts, in a few words of memory that other processes can read.

A worker is not the process that answers `/metrics`. Its counters lie in a small file that is mapped
into memory, one file for each worker, and a collector in the API process adds them up when it is
asked. Where several API processes share their metrics (`PROMETHEUS_MULTIPROC_DIR`), vLLM shows what
`prometheus_client` itself has written in any process, so there the worker counts with that, too.
"""

import mmap
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

COUNTERS = {
    "sampled_requests": "Requests that the shadow began to follow.",
    "unsupported_requests": "Requests drawn for the sample that mrv2 refuses; not followed.",
    "no_room_requests": "Requests drawn for the sample that did not fit the shadow's KV cache.",
    "busy_requests": "Requests drawn for the sample while the shadow was behind; not followed.",
    "dropped_requests": "Requests that the shadow gave up before their end.",
    "resumed_requests": "Times that a followed request went on after a preemption.",
    "compared_tokens": "Tokens of V1 that were compared.",
    "compared_logprobs": "Logprobs of V1 that were compared.",
    "mismatches": "Values of V1 that mrv2 would not have given.",
    "near_ties": "Differences that rounding explains; not mismatches.",
    "faults": "Times that the shadow was abandoned: an exception, a hang, a death.",
}
"""Every counter with its help text; the order is that of the file."""
UP = "up"
"""The one gauge: whether the shadow follows requests."""
_NAMES = (*COUNTERS, UP)
_WORD = struct.Struct("<q")
_SUFFIX = ".counts"


class Counters:
    """A worker's counters. Any thread may add.

    Args:
        folder: Where the file is made; None keeps them in this process.
    """

    def __init__(self, folder: Path | None) -> None:
        size = _WORD.size * len(_NAMES)
        if folder is None:
            self._words = mmap.mmap(-1, size)
        else:
            with (folder / f"{os.getpid()}{_SUFFIX}").open("w+b") as file:
                file.truncate(size)
                self._words = mmap.mmap(file.fileno(), size)
        self._shared = _shared_counters()
        self._adding = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        with self._adding:
            self._set(name, self[name] + amount)
        if name in self._shared and amount:
            self._shared[name].inc(amount)

    def set_up(self, up: bool) -> None:
        """Say whether the shadow follows requests."""
        self._set(UP, int(up))

    def __getitem__(self, name: str) -> int:
        return int(_WORD.unpack_from(self._words, _WORD.size * _NAMES.index(name))[0])

    def _set(self, name: str, value: int) -> None:
        _WORD.pack_into(self._words, _WORD.size * _NAMES.index(name), value)

    def as_dict(self) -> dict[str, int]:
        """Return every counter, and `up`."""
        return {name: self[name] for name in _NAMES}


def read_all(folder: Path) -> dict[str, int]:
    """Add up the counters of every worker."""
    totals = dict.fromkeys(_NAMES, 0)
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        data = path.read_bytes()
        if len(data) == _WORD.size * len(_NAMES):
            for name, (value,) in zip(_NAMES, _WORD.iter_unpack(data), strict=True):
                totals[name] += value
    return totals


class Collector:
    """Shows the counters of a folder to `prometheus_client`.

    Args:
        folder: Where the workers' files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """Yield a metric for each counter."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        totals: Mapping[str, int] = read_all(self._folder)
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"mrv2_shadow_{name}", text, value=totals[name])
        yield GaugeMetricFamily(
            "mrv2_shadow_up", "Workers whose shadow follows requests.", value=totals[UP]
        )


def _shared_counters() -> dict[str, Any]:
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return {}
    from prometheus_client import CollectorRegistry, Counter

    registry = CollectorRegistry()  # what is shown is read from the folder, not from a registry
    return {
        name: Counter(f"mrv2_shadow_{name}", text, registry=registry)
        for name, text in COUNTERS.items()
    }
