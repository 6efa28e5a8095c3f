"""What `mrv2` offers is a sorted list that changes only on purpose."""

import mrv2

PUBLIC = [
    "Arrival",
    "CapacityError",
    "CaptureError",
    "ConfigError",
    "Continuation",
    "GrammarMask",
    "Graph",
    "GraphMaker",
    "GraphSizes",
    "KVGroup",
    "LogitsStage",
    "LogitsView",
    "Logprobs",
    "LogprobsMode",
    "Mrv2Error",
    "NextDecode",
    "NullTrace",
    "PendingOutput",
    "Probe",
    "ProtocolError",
    "Runner",
    "RunnerConfig",
    "RunnerOutput",
    "Sampling",
    "Scheduled",
    "StageFactory",
    "StageResources",
    "StepInFlight",
    "StepPlan",
    "StepTrace",
    "ThinkingMarkers",
    "UnsupportedByRunner",
    "draw_unattached",
    "sampling_faults",
    "score_unattached",
    "stages_with",
]


def test_public_names_are_the_frozen_list() -> None:
    assert mrv2.__all__ == PUBLIC, "a changed public name is changed here and in CHANGELOG.md too"


def test_public_names_are_sorted_and_exist() -> None:
    assert list(mrv2.__all__) == sorted(mrv2.__all__)
    missing = [name for name in mrv2.__all__ if not hasattr(mrv2, name)]
    assert not missing
