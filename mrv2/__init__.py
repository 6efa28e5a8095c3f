"""A model runner with permanent state rows, after the Model Runner V2 design.

It knows nothing of its host.
"""

from mrv2.config import GraphSizes, KVGroup, LogprobsMode, RunnerConfig, ThinkingMarkers
from mrv2.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    Mrv2Error,
    ProtocolError,
    UnsupportedByRunner,
)
from mrv2.graphs.capture import Graph, GraphMaker
from mrv2.output import Logprobs, PendingOutput, RunnerOutput
from mrv2.params import Sampling, sampling_faults
from mrv2.plan import Arrival, Continuation, NextDecode, Scheduled, StepPlan
from mrv2.runner import Runner, StepInFlight
from mrv2.sampling.grammar import GrammarMask
from mrv2.sampling.prompt_logprobs import score_unattached
from mrv2.sampling.sampler import draw_unattached
from mrv2.sampling.stage import LogitsStage, LogitsView, StageFactory, StageResources
from mrv2.sampling.stages import stages_with
from mrv2.trace import NullTrace, Probe, StepTrace

__all__ = [
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
