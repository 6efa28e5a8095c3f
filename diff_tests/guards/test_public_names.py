"""What `mrv2` offers is a sorted list that changes only on purpose."""

import mrv2

PUBLIC = [
    "EXTENSIONS",
    "POOLED",
    "PROMPT_LOGPROBS",
    "STAGES",
    "Arrival",
    "BatchLayout",
    "CapacityError",
    "CaptureError",
    "Captures",
    "ConfigError",
    "Continuation",
    "ExtensionError",
    "ExtensionFactory",
    "ExtensionResources",
    "GenerateHead",
    "GrammarMask",
    "Graph",
    "GraphMaker",
    "GraphSizes",
    "Head",
    "HeadFactory",
    "HeadResources",
    "HeadResults",
    "KVGroup",
    "LogitsStage",
    "LogitsView",
    "Logprobs",
    "LogprobsMode",
    "Mrv2Error",
    "NextDecode",
    "NullTrace",
    "PendingOutput",
    "PlainDraw",
    "PoolHead",
    "Pooler",
    "Probe",
    "PromptLogprobs",
    "ProtocolError",
    "Reader",
    "RelayHead",
    "Runner",
    "RunnerConfig",
    "RunnerOutput",
    "SampledTokens",
    "Sampling",
    "Scheduled",
    "StageFactory",
    "StageResources",
    "Step",
    "StepExtension",
    "StepPlan",
    "StepTrace",
    "ThinkingMarkers",
    "UnsupportedByRunner",
    "draw_unattached",
    "generate_head",
    "pool_head",
    "relay_head",
    "sampling_faults",
    "score_unattached",
    "stages_with",
]


def test_public_names_are_the_frozen_list() -> None:
    assert mrv2.__all__ == PUBLIC, "a changed public name is changed here and in CHANGELOG.md too"


def test_public_names_exist_once() -> None:
    assert len(set(mrv2.__all__)) == len(mrv2.__all__)  # ruff sees to their order
    missing = [name for name in mrv2.__all__ if not hasattr(mrv2, name)]
    assert not missing
