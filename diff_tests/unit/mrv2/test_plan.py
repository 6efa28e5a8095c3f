"""The plain decode that follows another step."""

from mrv2 import Scheduled


def test_the_next_decodes_have_the_lists_that_the_host_would_write() -> None:
    first = Scheduled(
        req_ids=["a", "b"], num_tokens=[3, 1], num_computed_tokens=[2, 7], num_known_tokens=[5, 8]
    )
    second = first.next_decode()
    assert second.listed() == Scheduled(
        req_ids=["a", "b"], num_tokens=[1, 1], num_computed_tokens=[5, 8], num_known_tokens=[6, 9]
    )
    assert second.next_decode().listed() == second.listed().next_decode().listed()


def test_a_chain_of_decodes_keeps_its_base_alone() -> None:
    first = Scheduled(req_ids=["a"], num_tokens=[1], num_computed_tokens=[0], num_known_tokens=[1])
    last = first.next_decode()
    for _ in range(10_000):
        last = last.next_decode()
    assert last.base is first
    assert last.num_known_tokens == [10_002]
