"""What goes wrong in runners of this kind, tried on ours through vLLM's own scheduler."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrv2.memory.staged import StagedWriteTensor
from mrv2_compat.vllm_v1.requests import refusals
from mrv2_diff.invariants import LiveRequest, check_invariants
from mrv2_diff.schedules.actions import Arrive, Drain, FailLoad, Reset, Setup, Step
from mrv2_diff.schedules.generator import OPTIONS, actions

pytestmark = pytest.mark.vllm

FEATURES: dict[str, object] = {
    "speculative_config": object(),
    "lora_config": object(),
    "kv_transfer_config": object(),
    "ec_transfer_config": object(),
    "model_config.runner_type": "pooling",
    "model_config.is_multimodal_model": True,
    "model_config.is_encoder_decoder": True,
    "model_config.is_hybrid": True,
    "model_config.enable_sleep_mode": True,
    "parallel_config.tensor_parallel_size": 2,
    "parallel_config.pipeline_parallel_size": 2,
    "parallel_config.data_parallel_size": 2,
    "parallel_config.decode_context_parallel_size": 2,
    "parallel_config.use_ubatching": True,
}
"""Features whose schedules hold more than a token for each request and step, or more than one
runner; a value of each that asks for it."""


@pytest.fixture
def drive() -> Any:
    from mrv2_diff.schedules.driver import Driver

    return Driver


def scheduled(driver: Any) -> list[Any]:
    """Keep every SchedulerOutput that the runner is given from now on, with what it drew."""
    seen: list[Any] = []
    runner = driver.engine.runner
    execute = runner.execute_model

    def keeping(step: Any) -> Any:
        seen.append(step)
        return execute(step)

    runner.execute_model = keeping
    return seen


def tables_are_the_schedulers(driver: Any) -> None:
    """Every live row's block table is what the scheduler says, in each KV group."""
    core, scheduler = driver.engine.runner.core, driver.engine.scheduler
    for request in scheduler.running:
        row = core.rows.row(request.request_id)
        for group, blocks in enumerate(
            scheduler.kv_cache_manager.get_block_ids(request.request_id)
        ):
            held = int(core.block_tables._num_blocks[group, row])
            table = core.block_tables.tables[group].tensor[row, :held].tolist()
            # Behind a window the scheduler has put its null block, and nobody reads the old one.
            assert [(want, got) for want, got in zip(blocks, table, strict=True)
                    if want not in (0, got)] == []  # fmt: skip


@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 20), ((None, 8), 32)])
def test_a_block_table_is_the_schedulers_whatever_was_preempted(
    drive: Any, windows: tuple[int | None, ...], num_blocks: int
) -> None:
    setup = Setup(windows=windows, num_blocks=num_blocks)
    driver = drive(setup)
    for action in actions(11, setup, 600):
        driver.do(action)
        if isinstance(action, Step):
            tables_are_the_schedulers(driver)
    assert driver.events.counts["resumes in other blocks"] >= 10


def holding_invariants(driver: Any) -> list[int]:
    """Check the runner's invariants whenever a step was queued; return the rows taken then."""
    from vllm.v1.request import RequestStatus

    seen: list[int] = []
    runner, scheduler = driver.engine.runner, driver.engine.scheduler
    sample = runner.sample_tokens

    def checking(grammar_output: Any) -> Any:
        output = sample(grammar_output)
        # A session that waits for a turn, or for its turn to run, is not running: it keeps its row.
        live = {
            name: LiveRequest(
                num_computed=request.num_computed_tokens,
                blocks=scheduler.kv_cache_manager.get_block_ids(name),
                token_ids=(),
            )
            for name, request in scheduler.requests.items()
            if request.status != RequestStatus.PREEMPTED and name in runner.ledger
        }
        check_invariants(runner.core, live)
        seen.append(len(live))
        return output

    runner.sample_tokens = checking
    return seen


@pytest.mark.parametrize(
    "setup",
    [
        Setup(num_blocks=20),
        Setup(is_async=True, num_blocks=20),
        Setup(is_async=True, windows=(None, 8), num_blocks=32),
    ],
    ids=["", "async", "async with a window"],
)
def test_invariants_hold_after_every_step_of_the_scheduler(drive: Any, setup: Setup) -> None:
    driver = drive(setup)
    seen = holding_invariants(driver)
    driver.play(actions(13, setup, 400))
    assert len(seen) > 100
    assert max(seen) == setup.max_num_reqs
    for kind in ("resumes", "next turns of a session", "aborts while running"):
        assert driver.events.counts[kind] >= 1


def test_a_row_that_is_used_again_takes_nothing_from_its_last_owner(drive: Any) -> None:
    driver = drive(Setup(max_num_reqs=1))
    steps = scheduled(driver)
    for tail in (1, 2, 1):  # the last one's prompt is cached but for the last token
        driver.do(Arrive(name=f"r{tail}", prefix_len=12, tail=tail, max_tokens=5))
        driver.do(Drain())
    last = [step for step in steps if step.scheduled_new_reqs][-1]
    assert last.scheduled_new_reqs[0].num_computed_tokens == 12
    assert list(last.num_scheduled_tokens.values()) == [1]
    assert driver.ended[0] == ("r1", driver.ended[2][1])


@pytest.mark.parametrize("options", [{}, *OPTIONS, {"min_tokens": 9}])
def test_a_resumed_prompt_ends_where_all_known_tokens_end(
    drive: Any, options: dict[str, Any]
) -> None:
    driver = drive(Setup(max_num_tokens=4, prefix_caching=False))
    stop = 5 if "min_tokens" in options else None
    driver.do(Arrive(name="a", tail=3, tail_len=3, max_tokens=12, stop=stop, options=options))
    for _ in range(6):
        driver.step()
    turn = driver.accounts["a"].turns[0]
    assert len(turn.received) == 6
    driver.do(Reset())
    steps = scheduled(driver)
    drawn = []
    for _ in range(3):
        before = len(turn.received)
        driver.step()
        drawn.append(len(turn.received) - before)
    assert [step.num_scheduled_tokens["a"] for step in steps] == [4, 4, 1]
    assert drawn == [0, 0, 1]
    core = driver.engine.runner.core
    assert int(core.requests.prompt_len.device_tensor[core.rows.row("a")]) == 3
    driver.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_preempted_with_tokens_in_flight_loses_and_repeats_none(
    drive: Any, depth: int
) -> None:
    setup = Setup(is_async=True, num_blocks=17, prefix_caching=False, max_num_tokens=16)
    driver = drive(setup)
    preempted_in_flight = 0
    for tail in range(12):
        for name in ("a", "b"):  # ten blocks each; sixteen are there
            driver.do(Arrive(name=name, prefix_len=15, tail=tail, tail_len=5, max_tokens=20))
        for number in range(60):
            if number == 6:
                driver.do(Arrive(name="c", prefix_len=30, tail=tail, tail_len=9, max_tokens=3))
            before = driver.events.counts["preemptions"]
            in_flight = len(driver._queued)
            driver.step(lag=depth)
            if driver.events.counts["preemptions"] > before and in_flight:
                preempted_in_flight += 1
            requests = driver.engine.scheduler.requests.values()
            assert all(request.num_output_placeholders >= 0 for request in requests)
        driver.drain()
        outputs = driver.ended[-3:]
        assert {name: len(tokens) for name, tokens in outputs} == {"a": 20, "b": 20, "c": 3}
    assert preempted_in_flight >= 12


@pytest.mark.parametrize("length", range(11, 28))
def test_a_last_chunk_of_one_token_beside_decodes_is_still_a_prompt(
    drive: Any, length: int
) -> None:
    driver = drive(Setup(max_num_tokens=8, prefix_caching=False))
    driver.do(Arrive(name="decode", tail=1, max_tokens=12))
    driver.step()
    steps = scheduled(driver)
    driver.do(Arrive(name="prompt", prefix_len=length - 1, tail=2, max_tokens=4))
    while "prompt" in driver.accounts:
        driver.step()
    chunks = [step.num_scheduled_tokens["prompt"] for step in steps]
    assert sum(chunks) == length + 3
    assert max(chunks) == 7  # the decode has the eighth
    driver.drain()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_that_failed_is_run_again_from_its_first_block(drive: Any, is_async: bool) -> None:
    driver = drive(Setup(is_async=is_async, max_num_tokens=32, prefix_caching=False))
    driver.do(Arrive(name="a", prefix_len=36, tail=1, tail_len=4, max_tokens=9))
    steps = scheduled(driver)
    driver.step(lag=int(is_async))
    driver.do(FailLoad(request=0, block=0))
    driver.step(lag=int(is_async))
    assert driver.events.counts["progress taken back"] == 1
    assert driver.engine.scheduler.requests["a"].num_computed_tokens == 0
    driver.step(lag=int(is_async))
    cached = steps[-1].scheduled_cached_reqs
    assert (cached.req_ids, cached.num_computed_tokens) == (["a"], [0])
    assert cached.resumed_req_ids == set()
    core = driver.engine.runner.core
    row = core.rows.row("a")
    assert int(core.requests.num_computed_tokens.tensor[row]) == 32
    driver.drain()
    assert len(driver.ended[-1][1]) == 9


@pytest.mark.parametrize("is_async", [False, True])
def test_a_grammar_on_a_cpu_makes_no_stream_and_pins_no_memory(
    drive: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a CPU has neither streams nor pinned memory")

    empty = torch.empty

    def unpinned(*sizes: Any, **options: Any) -> torch.Tensor:
        assert not options.get("pin_memory")
        return empty(*sizes, **options)

    for name in ("Stream", "Event", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, refused)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    monkeypatch.setattr(torch, "empty", unpinned)
    driver = drive(Setup(is_async=is_async), compares=False)
    driver.do(Arrive(name="a", tail_len=5, max_tokens=8, grammar=3))
    driver.do(Arrive(name="b", tail_len=7, max_tokens=8))
    driver.do(Drain())
    assert {name: len(tokens) for name, tokens in driver.ended} == {"a": 8, "b": 8}


def test_two_requests_that_share_a_block_that_failed_both_run_it_again(drive: Any) -> None:
    driver = drive(Setup(max_num_tokens=24))
    driver.do(Arrive(name="a", prefix_len=16, tail=1, tail_len=3, max_tokens=9))
    driver.step()
    driver.do(Arrive(name="b", prefix_len=16, tail=2, tail_len=3, max_tokens=9))
    driver.step()
    shared = driver.engine.scheduler.kv_cache_manager
    assert shared.get_block_ids("a")[0][:4] == shared.get_block_ids("b")[0][:4]
    for block in (0, 1, 3):
        driver.do(FailLoad(request=block % 2, block=block))
        driver.step()
        driver.step()
    assert driver.events.counts["progress taken back"] == 3
    driver.drain()
    assert [len(tokens) for _, tokens in driver.ended] == [9, 9]


def staged_tensors(thing: object, seen: set[int]) -> Iterator[StagedWriteTensor]:
    """Every staged tensor that a runner holds, wherever in it."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, StagedWriteTensor):
        yield thing
        return
    if isinstance(thing, dict | list | tuple) or type(thing).__module__.startswith("mrv2."):
        for inner in gc.get_referents(thing):
            yield from staged_tensors(inner, seen)


def test_after_a_thousand_steps_nothing_is_left_of_any_request(drive: Any) -> None:
    setup = Setup(max_num_reqs=6, num_blocks=40)
    driver = drive(setup)
    driver.play(actions(5, setup, 1500))
    assert driver.num_steps > 1000
    core = driver.engine.runner.core
    tensors = list(staged_tensors(core, set()))
    assert len(tensors) >= 3
    assert [tensor.num_staged for tensor in tensors] == [0] * len(tensors)
    assert sorted(core.rows._free) == list(range(6))
    assert not core.block_tables._num_blocks.any()
    assert not core.requests.progress.upper.any()
    assert len(driver.engine.runner.ledger) == 0


@pytest.mark.parametrize("path", FEATURES)
def test_what_needs_other_schedules_is_refused_by_name(path: str) -> None:
    from mrv2_diff.schedules.driver import Driver

    served = Driver(Setup()).engine.scheduler.vllm_config
    assert refusals.config_refusals(served) == []
    (refusal,) = refusals.config_refusals(_with(served, path.split("."), FEATURES[path]))
    assert f"{path.rpartition('.')[2]}=" in refusal.value
    assert refusal.remedy


def _with(config: Any, path: list[str], value: object) -> Any:
    """Return a view of a configuration in which one value is another."""
    name, *rest = path
    inner = _with(getattr(config, name), rest, value) if rest else value

    class View(SimpleNamespace):
        def __getattr__(self, other: str) -> Any:
            return getattr(config, other)

    return View(**{name: inner})
