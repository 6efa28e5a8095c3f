"""A model runner with permanent state rows, after the Model Runner V2 design.

It knows nothing of its host.
"""

from mrv2.batch.commit import SampledTokens
from mrv2.batch.layout import BatchLayout
from mrv2.config import GraphSizes, KVGroup, LogprobsMode, RunnerConfig, ThinkingMarkers
from mrv2.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    ExtensionError,
    Mrv2Error,
    ProtocolError,
    UnsupportedByRunner,
)
from mrv2.execute.capture import Graph, GraphMaker
from mrv2.extension import ExtensionFactory, ExtensionResources, StepExtension
from mrv2.features import EXTENSIONS
from mrv2.features.prompt_logprobs import PROMPT_LOGPROBS, PromptLogprobs, score_unattached
from mrv2.head.generate import GenerateHead, generate_head
from mrv2.head.pool import POOLED, Pooler, PoolHead, pool_head
from mrv2.head.protocol import Head, HeadFactory, HeadResources, HeadResults, PlainDraw
from mrv2.head.relay import RelayHead, relay_head
from mrv2.output import Logprobs, PendingOutput, Reader, RunnerOutput
from mrv2.params import Sampling, sampling_faults
from mrv2.plan import Arrival, Continuation, NextDecode, Scheduled, StepPlan
from mrv2.ports import Captures
from mrv2.runner import Runner
from mrv2.sampling.grammar import GrammarMask
from mrv2.sampling.sampler import draw_unattached
from mrv2.sampling.stage import LogitsStage, LogitsView, StageFactory, StageResources
from mrv2.sampling.stages import STAGES, stages_with
from mrv2.step import Step
from mrv2.trace import NullTrace, Probe, StepTrace

__all__ = [
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
