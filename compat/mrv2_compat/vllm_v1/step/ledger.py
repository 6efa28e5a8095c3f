"""What vLLM's V1-mode scheduler says once and never repeats.

A resumed request comes back without its prompt split and without its sampling parameters. Permanent
rows forget a request when it is preempted, so this is the one place that remembers it, from its
first arrival until it finishes.

The last step is remembered, too, where it was a plain decode: the scheduler repeats all of it for
the step that only goes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mrv2 import NextDecode, ProtocolError, Sampling, Scheduled
from mrv2_compat.vllm_v1.features.active import NO_EXTRAS


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRequest:
    """A request's facts that never change."""

    prompt_len: int
    sampling: Sampling
    extras: Mapping[str, object] = field(default_factory=lambda: NO_EXTRAS)
    """What extensions are told of the request, at every arrival."""


@dataclass(slots=True, kw_only=True)
class LastDecode:
    """A step in which every request ran one token and drew one.

    Not frozen, since one is made at every step.
    """

    scheduled: Scheduled | NextDecode
    total_computed: int
    """Sum of what each request had computed before the step."""


class RequestLedger:
    """Requests that were announced and have not finished, by id.

    Holds more than the live rows: preempted ones stay. A step that is refused after it was
    translated is taken back, so that the ledger and the rows never tell different stories.
    """

    def __init__(self) -> None:
        self._known: dict[str, KnownRequest] = {}
        self.num_announced = 0
        """Requests announced so far, finished ones counted in."""
        self.last_decode: LastDecode | None = None
        """The last step that was translated, if it was a plain decode."""
        self._decode_before: LastDecode | None = None
        self._before: dict[str, KnownRequest | None] = {}
        """What was known before this step of each request that it changed."""
        self._num_before = 0

    def begin_step(self) -> None:
        """Note the state that `take_back_step` returns to."""
        self._decode_before = self.last_decode
        self._before = {}
        self._num_before = self.num_announced

    def take_back_step(self) -> None:
        """Undo what was announced, forgotten and noted since `begin_step`."""
        self.last_decode = self._decode_before
        for req_id, known in self._before.items():
            if known is None:
                self._known.pop(req_id, None)
            else:
                self._known[req_id] = known
        self.num_announced = self._num_before
        self._before = {}

    def announce(self, req_id: str, known: KnownRequest) -> None:
        """Remember a new request; an id that is known already is replaced."""
        self._before.setdefault(req_id, self._known.get(req_id))
        self._known[req_id] = known
        self.num_announced += 1

    def forget(self, req_id: str) -> None:
        """Drop a finished request; skip unknown ids, since vLLM also names ones that never ran."""
        known = self._known.pop(req_id, None)
        if known is not None:
            self._before.setdefault(req_id, known)

    def get(self, req_id: str) -> KnownRequest:
        """Return what is known of a request.

        Raises:
            ProtocolError: It was never announced, or has finished.
        """
        try:
            return self._known[req_id]
        except KeyError:
            raise _unknown(req_id) from None

    def prompt_lens(self, req_ids: Sequence[str]) -> list[int]:
        """Return the prompt lengths of many requests.

        Raises:
            ProtocolError: One was never announced, or has finished.
        """
        known = self._known
        try:
            return [known[req_id].prompt_len for req_id in req_ids]
        except KeyError as missing:
            raise _unknown(missing.args[0]) from None

    def known(self) -> Iterable[tuple[str, KnownRequest]]:
        """Return every request that was announced and has not finished, with its id."""
        return self._known.items()

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._known

    def __len__(self) -> int:
        return len(self._known)


def _unknown(req_id: str) -> ProtocolError:
    return ProtocolError(f"vLLM schedules {req_id!r}, which it never announced or has finished")
