"""Which scheduler an engine gets, and what a failed request becomes."""

from types import SimpleNamespace
from typing import Any

import pytest

from mrv2_compat.vllm_v1 import schedulers
from mrv2_compat.vllm_v1.schedulers import FAILING, FAILING_ASYNC, ProcessorError


def config(named: object, scheduler: object = None, *, is_async: bool = False) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=named),
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler, async_scheduling=is_async),
    )


@pytest.mark.parametrize(
    ("named", "installed", "is_async", "expected"),
    [
        (None, [], False, None),
        ([], [], True, None),
        (["a:B"], [], False, FAILING),
        (["a:B"], [], True, FAILING_ASYNC),
        (None, ["an entry point"], False, FAILING),
    ],
)
def test_only_processors_of_others_need_another_scheduler(
    monkeypatch: pytest.MonkeyPatch,
    named: object,
    installed: list[str],
    is_async: bool,
    expected: str | None,
) -> None:
    asked = []

    def entry_points(group: str) -> list[str]:
        asked.append(group)
        return installed

    monkeypatch.setattr(schedulers, "entry_points", entry_points)
    built = config(named, is_async=is_async)
    for _ in range(2):  # vLLM checks a configuration again in the engine's process
        schedulers.choose_scheduler(built)
        assert built.scheduler_config.scheduler_cls == expected
    assert set(asked) <= {schedulers.PROCESSORS_GROUP}


def test_a_scheduler_that_the_user_named_stays() -> None:
    built = config(["a:B"], "their.Scheduler")
    schedulers.choose_scheduler(built)
    assert built.scheduler_config.scheduler_cls == "their.Scheduler"


@pytest.mark.parametrize("scheduler", [None, "their.Scheduler"])
def test_a_failure_that_a_scheduler_cannot_be_told_is_not_hidden(scheduler: object) -> None:
    schedulers.require_scheduler({}, scheduler)
    with pytest.raises(ProcessorError) as raised:
        schedulers.require_scheduler({"a": "x raised E", "b": "y raised E"}, scheduler)
    assert "request 'a': x raised E; request 'b': y raised E. The scheduler" in str(raised.value)


@pytest.mark.parametrize("scheduler", [FAILING, FAILING_ASYNC])
def test_ours_can_be_told(scheduler: str) -> None:
    schedulers.require_scheduler({"a": "x raised E"}, scheduler)


@pytest.mark.vllm
def test_names_are_those_of_vllms_group_and_of_our_classes() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

    assert schedulers.PROCESSORS_GROUP == LOGITSPROCS_GROUP
    plain, ahead = map(resolve_obj_by_qualname, (FAILING, FAILING_ASYNC))
    assert issubclass(plain, Scheduler)
    assert not issubclass(plain, AsyncScheduler)
    assert issubclass(ahead, AsyncScheduler)


class Request:
    """What the mixin asks of vLLM's requests."""

    trace_headers = None

    def __init__(self, request_id: str, client_index: int) -> None:
        self.request_id, self.client_index = request_id, client_index

    def get_finished_reason(self) -> Any:
        from vllm.v1.engine import FinishReason

        return FinishReason.ERROR

    def take_events(self) -> None:
        return None


@pytest.mark.vllm
def test_a_failed_request_is_finished_with_an_error_and_its_client_is_told() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    from mrv2_compat.vllm_v1.features.failures import with_failures
    from mrv2_compat.vllm_v1.scheduler import FinishesFailures

    finished: list[tuple[set[str], Any]] = []

    class Base:
        def update_from_output(self, *_: Any) -> dict[int, EngineCoreOutputs]:
            drew = EngineCoreOutput(request_id="a", new_token_ids=[4])
            return {0: EngineCoreOutputs(outputs=[drew])}

        def finish_requests(self, req_ids: Any, status: Any) -> list[Request]:
            finished.append((set(req_ids), status))
            return [Request("b", 0), Request("c", 1)]  # d has finished already

    class Scheduler(FinishesFailures, Base):
        pass

    output = ModelRunnerOutput(
        req_ids=["a", "b", "c", "d"],
        req_id_to_index={"a": 0, "b": 1, "c": 2, "d": 3},
        sampled_token_ids=[[4], [5], [6], [7]],
    )
    assert len(Scheduler().update_from_output(None, output)[0].outputs) == 1
    assert finished == []
    failures = {"b": "x raised", "c": "y raised", "d": "z raised"}
    told = Scheduler().update_from_output(None, with_failures(output, failures))
    assert finished == [({"b", "c", "d"}, RequestStatus.FINISHED_ERROR)]
    assert [entry.request_id for entry in told[0].outputs] == ["a", "b"]
    (last,) = told[1].outputs
    assert (last.request_id, last.new_token_ids, last.stop_reason) == ("c", [], "y raised")
    assert last.finish_reason == FinishReason.ERROR
