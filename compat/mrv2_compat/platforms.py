"""vLLM's CPU and CUDA platforms with one change: where a worker is chosen, ours may be.

`CpuPlatform` and `CudaPlatform` are made when vLLM asks for them by dotted name, each a subclass of
the very class that vLLM would have used, because importing the CUDA one on a machine without CUDA
fails. They act in three places, all of them hooks that vLLM offers to platforms: early in the
building of a configuration (`auto` decides whether V1-mode scheduling can serve it), at its end
(the worker is put in place, and an unsupported configuration is refused, in the process that
builds it), and for each request.

Order matters at the end: refusals are looked for after vLLM's own platform code, because that code
changes the configuration; it also replaces a worker name of "auto", so the name is read before.
"""

import gc
import os
import weakref
from functools import cache
from typing import Any, NoReturn

from mrv2.errors import ConfigError, UnsupportedByRunner
from mrv2_compat import selection as sel
from mrv2_compat.entry_points import RUNNER_VAR
from mrv2_compat.vllm_v1 import versions
from mrv2_compat.vllm_v1.requests import refusals
from mrv2_compat.vllm_v1.requests.refusals import Refusal
from mrv2_compat.vllm_v1.schedulers import choose_scheduler

AUTO_WORKER = "auto"
"""vLLM's own value of `worker_cls` for "the platform chooses"."""

CPU = "cpu"
CUDA = "cuda"
CLASS_NAMES = {CPU: "CpuPlatform", CUDA: "CudaPlatform"}
WORKERS = {
    CPU: "mrv2_compat.vllm_v1.worker.CpuWorker",
    CUDA: "mrv2_compat.vllm_v1.worker.CudaWorker",
}

_settled: list[tuple[weakref.ref[Any], str]] = []
"""Configurations that were settled in this process and may still be in use, with their runners."""


def builtin_platform() -> tuple[str, str] | None:
    """Return the kind ("cpu" or "cuda") and dotted name of the platform that vLLM would choose.

    None where that platform is neither.
    """
    from vllm.platforms import builtin_platform_plugins

    for kind in (CUDA, CPU):
        dotted = builtin_platform_plugins[kind]()
        if dotted is not None:
            return kind, str(dotted)
    return None


def dotted_name(kind: str) -> str:
    """Return the name by which vLLM imports our platform of a kind."""
    return f"{__name__}.{CLASS_NAMES[kind]}"


def is_ours(platform: object) -> bool:
    """Return whether a platform object is an instance of one made here."""
    return type(platform).__module__ == __name__


def __getattr__(name: str) -> Any:
    """Make `CpuPlatform` or `CudaPlatform` when it is first asked for."""
    for kind, class_name in CLASS_NAMES.items():
        if name == class_name:
            return _platform_class(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _platform_class(kind: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    found = builtin_platform()
    if found is None or found[0] != kind:
        raise ConfigError(
            f"{dotted_name(kind)} needs a machine and a vLLM for {kind!r}; vLLM's own choice here "
            f"is {found[1] if found else 'neither cpu nor cuda'}"
        )
    base: Any = resolve_obj_by_qualname(found[1])

    class Mrv2Platform(base):
        """vLLM's platform, with our worker where MRV2_RUNNER asks for it."""

        @classmethod
        def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
            super().apply_config_platform_defaults(vllm_config)
            choose_dialect(vllm_config)

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            asked_worker = vllm_config.parallel_config.worker_cls
            super().check_and_update_config(vllm_config)
            settle(vllm_config, asked_worker, kind)

        @classmethod
        def validate_request(cls, processed_inputs: Any, params: Any) -> None:
            super().validate_request(processed_inputs, params)
            refuse_request(processed_inputs, params)

    Mrv2Platform.__name__ = Mrv2Platform.__qualname__ = CLASS_NAMES[kind]
    return Mrv2Platform


def choose_dialect(vllm_config: Any) -> None:
    """For `auto`: set V1-mode scheduling unless V1 cannot run this configuration.

    Ours and V1's runner both need it; which of the two runs is settled at the end, when the
    configuration is final. Without a model there is nothing to decide.

    Raises:
        ConfigError: Another engine of this process needs it otherwise.
    """
    selection = sel.current_selection()
    if vllm_config.model_config is None:
        return
    if selection is None or selection.name != sel.AUTO:
        # The plugin did this when it was loaded, but the variable may have changed since.
        sel.prepare_flag(selection, os.environ)
        return
    if refusals.v1_obstacles(vllm_config):
        _require_one_runner(vllm_config, sel.VLLM)
        sel.release_flag(os.environ)
    else:
        _require_one_runner(vllm_config, sel.MRV2, sel.V1)
        sel.claim_flag(os.environ)


def settle(vllm_config: Any, asked_worker: str, kind: str) -> None:
    """Choose the runner for a final configuration, put its worker in place, and say so.

    Args:
        vllm_config: vLLM's configuration, after vLLM's own platform code.
        asked_worker: `worker_cls` as it was before that code; "auto" where the user named none.
        kind: "cpu" or "cuda".

    Raises:
        ConfigError: A setting contradicts the selection, the worker is not one of the runner's,
            another engine of this process has another runner, or the runner does not support the
            configuration; then with every reason.
    """
    selection = sel.current_selection()
    if vllm_config.model_config is None:
        return
    if selection is None:
        _require_one_runner(vllm_config, sel.VLLM)
        _note(vllm_config, sel.VLLM)
        return
    sel.require_entry_points(os.environ)
    sel.require_no_conflict(selection, os.environ)
    decision = _decide(selection, vllm_config, asked_worker, kind)
    _require_one_runner(vllm_config, decision.runner)
    worker = _worker_of(decision, selection, kind)
    if worker is not None and asked_worker == AUTO_WORKER:
        vllm_config.parallel_config.worker_cls = worker
    if decision.runner == sel.MRV2:
        choose_scheduler(vllm_config)
    if decision.runner != sel.VLLM and vllm_config.use_v2_model_runner:
        raise ConfigError(
            f"{RUNNER_VAR}={selection.name!r} needs V1-mode scheduling, and vLLM schedules for "
            f"its V2 runner ({sel.FLAG_VAR}={os.environ.get(sel.FLAG_VAR)!r}): drop the feature "
            f"that only its V2 runner has, or unset {RUNNER_VAR}"
        )
    # vLLM checks a finished configuration again in the engine's process: say it once.
    is_news = asked_worker == AUTO_WORKER or os.environ.get(sel.DECISION_VAR) != decision.runner
    _note(vllm_config, decision.runner)
    if is_news:
        _say(decision, selection, vllm_config.parallel_config.worker_cls)


def _require_one_runner(vllm_config: Any, *possible: str) -> None:
    """Refuse a second runner in one process.

    How requests are checked and which dialect vLLM schedules in is settled for a process: with two
    runners, one engine would be served by the other's rules.

    Args:
        vllm_config: The configuration that is being built.
        possible: The runners that it may still get.

    Raises:
        ConfigError: A configuration that is still in use has none of them.
    """
    others = _runners_beside(vllm_config) - set(possible)
    if others:
        gc.collect()  # an engine that was dropped may be held by a cycle
        others = _runners_beside(vllm_config) - set(possible)
    if others:
        raise ConfigError(
            f"this engine is for the runner {' or '.join(possible)}, and another engine of this "
            f"process has {', '.join(sorted(others))}: give each a process of its own, drop the "
            f"other first, or set {RUNNER_VAR} so that both have the same"
        )


def _runners_beside(vllm_config: Any) -> set[str]:
    found = ((settled(), runner) for settled, runner in _settled)
    return {runner for other, runner in found if other is not None and other is not vllm_config}


def _note(vllm_config: Any, runner: str) -> None:
    """Keep a decision for later requests, and beside its configuration while that lives."""
    others = [
        (settled, other)
        for settled, other in _settled
        if settled() is not None and settled() is not vllm_config
    ]
    _settled[:] = [*others, (weakref.ref(vllm_config), runner)]
    os.environ[sel.DECISION_VAR] = runner


def _decide(
    selection: sel.Selection, vllm_config: Any, asked_worker: str, kind: str
) -> sel.Decision:
    if selection.name in (sel.MRV2, sel.AUTO):
        return _decide_by_support(selection, vllm_config, asked_worker, kind)
    foreign: list[Refusal] = []
    if selection.load_choice is not None:
        foreign = _foreign_worker(asked_worker, selection.load_choice().worker_class(kind))
    elif asked_worker in WORKERS.values():
        foreign = [Refusal("the worker of mrv2", f"worker_cls={asked_worker}", "leave it out")]
    if foreign:
        raise ConfigError(f"{RUNNER_VAR}={selection.name!r} contradicts {foreign[0]}")
    return sel.Decision(runner=selection.name, why="it was asked for")


def _decide_by_support(
    selection: sel.Selection, vllm_config: Any, asked_worker: str, kind: str
) -> sel.Decision:
    found = [
        *versions.version_refusals(versions.installed_vllm()),
        *refusals.config_refusals(vllm_config),
        *refusals.environment_refusals(os.environ),
        *_foreign_worker(asked_worker, WORKERS[kind]),
    ]
    if selection.name == sel.AUTO:
        reasons = [refusal.what for refusal in found]
        return sel.decide_auto(reasons, refusals.v1_obstacles(vllm_config))
    if found:
        raise UnsupportedByRunner([str(refusal) for refusal in found])
    return sel.Decision(runner=sel.MRV2, why="it was asked for")


def _worker_of(decision: sel.Decision, selection: sel.Selection, kind: str) -> str | None:
    """Return the worker that a decision needs; None where vLLM's own choice is right."""
    if decision.runner == sel.MRV2:
        return WORKERS[kind]
    if selection.load_choice is not None:
        return selection.load_choice().worker_class(kind)
    return None


def _foreign_worker(asked: str, wanted: str) -> list[Refusal]:
    """Return why a worker that the user named cannot run the selected runner; empty if it can.

    A class that the user named is imported here, in the process that builds the configuration:
    there is no other way to know that it is a subclass of the wanted one.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if asked in (AUTO_WORKER, wanted):
        return []
    if issubclass(resolve_obj_by_qualname(asked), resolve_obj_by_qualname(wanted)):
        return []
    remedy = f"leave worker_cls out, or make the class a subclass of {wanted}"
    return [Refusal("a worker of another kind", f"worker_cls={asked}", remedy)]


def _say(decision: sel.Decision, selection: sel.Selection, worker: str) -> None:
    """Log the one line that names the runner and the reason."""
    from vllm.logger import init_logger

    names = {
        sel.MRV2: f"mrv2 {versions.runner_version()}",
        sel.V1: "v1, vLLM's V1 runner",
        sel.VLLM: "vLLM's own choice",
    }
    # A child of vLLM's logger: no other has a handler.
    init_logger(f"vllm.{__name__}").info_once(
        "runner: %s; worker %s; because %s=%s and %s",
        names.get(decision.runner, decision.runner),
        worker,
        RUNNER_VAR,
        selection.name,
        decision.why,
    )


def refuse_request(engine_input: Any, params: Any) -> None:
    """Refuse a request that asks our runner for something it does not support or cannot honour.

    The error is vLLM's own: its server answers 400 with the text to no other, and 500 to a plain
    ValueError.

    Raises:
        VLLMValidationError: With every reason.
    """
    if os.environ.get(sel.DECISION_VAR) != sel.MRV2:
        return
    found = ((settled(), runner) for settled, runner in _settled)
    configs = [config for config, runner in found if config is not None and runner == sel.MRV2]
    lifted = frozenset[str]().union(*map(refusals.lifted_rules, configs))
    reasons = refusals.request_refusals(params, engine_input, lifted)
    if reasons:
        _refuse(UnsupportedByRunner([str(reason) for reason in reasons]))
    # vLLM is being imported until now.
    from mrv2_compat.vllm_v1.requests.validation import request_faults

    faults = request_faults(params, configs)
    if faults:
        _refuse(ConfigError(f"the request cannot be served: {'; '.join(faults)}"))


def _refuse(refusal: ConfigError) -> NoReturn:
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(str(refusal)) from refusal
