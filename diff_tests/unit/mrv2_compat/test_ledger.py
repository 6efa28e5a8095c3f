"""The ledger: what is remembered of a request, and until when."""

import pytest

from mrv2 import ProtocolError, Sampling
from mrv2_compat.vllm_v1.step.ledger import KnownRequest, RequestLedger


def known(prompt_len: int) -> KnownRequest:
    return KnownRequest(prompt_len=prompt_len, sampling=Sampling())


def test_a_request_is_known_from_its_announcement_until_it_is_forgotten() -> None:
    ledger = RequestLedger()
    ledger.announce("a", known(3))
    ledger.announce("b", known(5))
    assert (ledger.get("a"), len(ledger), "a" in ledger) == (known(3), 2, True)
    ledger.forget("a")
    ledger.forget("a")
    assert ("a" in ledger, list(ledger.known())) == (False, [("b", known(5))])
    with pytest.raises(ProtocolError, match="'a', which it never announced or has finished"):
        ledger.get("a")


def test_a_new_announcement_replaces_the_last_and_counts() -> None:
    ledger = RequestLedger()
    ledger.announce("a", known(3))
    ledger.announce("a", known(4))
    assert (ledger.get("a").prompt_len, len(ledger), ledger.num_announced) == (4, 1, 2)
    ledger.forget("a")
    assert ledger.num_announced == 2
