"""Faults of lifecycles and of lateness are found, each by the check named beforehand."""

import pytest

from mrv2.execute.shape import GraphMode
from mrv2_diff.late_play import play_late
from mrv2_diff.schedule_faults import SCHEDULE_FAULTS, ScheduleFault
from mrv2_diff.schedules import fault_checks
from mrv2_diff.schedules.fault_checks import CONFIG, LAG, QUIET_STEPS, REPLAYED, WINDOWS
from mrv2_diff.toy_stories import RandomStory


@pytest.mark.parametrize("fault", SCHEDULE_FAULTS, ids=lambda fault: fault.id)
def test_a_fault_is_found_by_the_check_named_beforehand(fault: ScheduleFault) -> None:
    fault_checks.prepare()
    with fault.apply():
        assert fault_checks.found_by(fault) == fault.found_by


def test_nothing_is_found_where_there_is_no_fault() -> None:
    quietly = play_late(CONFIG, fault_checks.quiet, QUIET_STEPS, lag=1, windows=WINDOWS)
    assert quietly.events["finished"] > CONFIG.max_num_reqs + 16
    assert quietly.events["rewound"] >= 3
    assert fault_checks.false_finds() == []


def test_the_story_of_replayed_steps_has_draws_of_every_kind() -> None:
    assert fault_checks.right(REPLAYED).steps_by_mode[GraphMode.DECODE] >= 5
    scored = [bool(step[2]) for step in fault_checks.right(REPLAYED).results]
    assert min(scored.count(True), scored.count(False)) >= 5


@pytest.mark.parametrize(
    "fault",
    [fault for fault in SCHEDULE_FAULTS if fault.found_by == "replayed"],
    ids=lambda f: f.id,
)
def test_a_fault_of_replays_changes_no_eager_step(fault: ScheduleFault) -> None:
    story = RandomStory(2, CONFIG, sampling=fault_checks.scored_sampling)
    fault_checks.right_eagerly()
    with fault.apply():
        played = play_late(CONFIG, story, 30, lag=LAG, windows=WINDOWS)
    assert played.results == fault_checks.right_eagerly().results


def test_there_are_at_least_twelve_faults_with_names_of_their_own() -> None:
    assert len({fault.id for fault in SCHEDULE_FAULTS}) == len(SCHEDULE_FAULTS) >= 12
