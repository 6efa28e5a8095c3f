"""The command `mrv2-diff`: reads arguments, calls the harness, and turns errors into exit codes.

Nothing heavy is imported before a command needs it, so that `--help` is instant.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mrv2_diff import help_texts
from mrv2_diff.case import GRAPHS, Case
from mrv2_diff.harness import (
    MAX_BENCH_REQUESTS,
    MAX_BENCH_STEPS,
    MAX_GROWTH,
    MAX_HOST_COST_STEPS,
    MAX_INVARIANCE_REQUESTS,
    MAX_RATIO,
    MAX_TRANSLATED_GROWTH,
    PAIRS,
    RUNNERS,
    TRACED_RUNNERS,
    UPSTREAM,
    Harness,
    Recording,
    Selection,
    Soak,
    TraceReplay,
    installed_harness,
)
from mrv2_diff.record import Record
from mrv2_diff.records_folder import RECORDS, RecordsFolder, RecordsFolderError
from mrv2_diff.schedules import actions
from mrv2_diff.schedules.result import LONG_SECONDS, SoakResult, invariance_table, summary
from mrv2_diff.selection import SelectionError, case_in, check_known, pair_named, selected
from mrv2_diff.verdict import Verdict

if TYPE_CHECKING:
    from mrv2_diff.selftest.result import SelfTest
    from mrv2_diff.shrinking.request import Result

_T = TypeVar("_T")

EXIT_PASSED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
EXIT_READER_LEFT = 141
"""128 + SIGPIPE, as shells report it."""

TRACEBACK_VAR = "MRV2_DIFF_TRACEBACK"
"""Where it is set, what led to a message comes before it, such as why an engine did not start."""

_SOURCES = ("commit", "mrv2", "vllm", "torch")
"""Of an environment: what decides the outcome of a case. A record of another one is out of date."""

MAX_SOAK_MINUTES = 24 * 60
MAX_SHRINK_SECONDS = 24 * 3600
MAX_REPEAT = 1000
MAX_MUTANTS = 1000
MAX_ALIKE = 100_000
MAX_SEED = 2**32 - 1

LATEST = Path("reports/latest")
FAILING = "failing"
"""Folder in that of a run, with a file for each case that fails."""
COMMITTED = Path("reports")


class BadInputError(Exception):
    """The user asked for something that cannot be done. The message says what to do instead."""


def main(argv: Sequence[str] | None = None, *, harness: Harness | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    harness = harness if harness is not None else installed_harness()
    parsed = _parser().parse_args(arguments)
    try:
        return _COMMANDS[parsed.command](parsed, harness)
    except (BadInputError, RecordsFolderError, SelectionError) as error:
        if os.environ.get(TRACEBACK_VAR):
            traceback.print_exception(error)
        print(f"mrv2-diff {parsed.command}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"mrv2-diff {parsed.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_READER_LEFT


# ---------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrv2-diff",
        description=help_texts.PROGRAM,
        epilog=help_texts.PROGRAM_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_report(commands)
    _add_make_model(commands)
    _add_cases(commands)
    _add_bench(commands)
    _add_soak(commands)
    _add_record(commands)
    _add_replay(commands)
    _add_shrink(commands)
    _add_mutants(commands)
    _add_invariance(commands)
    _add_host_cost(commands)
    _add_command(commands, "check-surface", help_texts.CHECK_SURFACE)
    return parser


_Commands = argparse._SubParsersAction  # the only name that argparse has for it


def _add_command(
    commands: "_Commands[argparse.ArgumentParser]", name: str, text: help_texts.HelpText
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text.short,
        description=text.long,
        epilog=text.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_run(commands: "_Commands[argparse.ArgumentParser]") -> None:
    run = _add_command(commands, "run", help_texts.RUN)
    run.add_argument("--area", action="append", default=[], metavar="A", help="every case of an "
                     "area; may be given again")  # fmt: skip
    run.add_argument("--case", action="append", default=[], metavar="ID", help="one case, besides "
                     "those of --area; may be given again")  # fmt: skip
    run.add_argument("--case-file", action="append", type=Path, default=[], metavar="FILE",
                     help="a case that shrink or run wrote; may be given again")  # fmt: skip
    pairs = run.add_mutually_exclusive_group()
    pairs.add_argument("--pair", default="v1,mrv2", metavar="REF,CAND",
                       help="reference and candidate: v1,mrv2 (default), v1,v1, v1,vllm-v2 or "
                       "mrv2,vllm-v2")  # fmt: skip
    pairs.add_argument("--runners", type=_names, metavar="R,...", help="every pair of these, of "
                       "v1, mrv2, vllm-v2 (vLLM's own second runner)")  # fmt: skip
    run.add_argument("--small", action="store_true", help="cut each case down to a few greedy "
                     "requests and some 30 steps; vllm-v2 is always run so")  # fmt: skip
    run.add_argument("--referee", action="store_true", help="where logits differ beyond the "
                     "floor, ask transformers' model in a higher precision who is "
                     "right")  # fmt: skip
    run.add_argument("--layers", action="store_true", help="compare the hidden states behind each "
                     "layer, too, so that the first wrong layer is named")  # fmt: skip
    run.add_argument("--model", type=Path, metavar="DIR", help="checkpoint to run on, instead of "
                     "the tiny one that each case names")  # fmt: skip
    run.add_argument("--graphs", choices=GRAPHS, default="none", help="CUDA graphs of both "
                     "runners, on a CUDA device (default: %(default)s, all steps "
                     "eager)")  # fmt: skip
    run.add_argument("--out", type=Path, default=LATEST, metavar="DIR",
                     help="where records.jsonl is written (default: %(default)s)")  # fmt: skip
    run.add_argument("--budgets", action="store_true", help="fail also where a case is over its "
                     "budget of memory or time; without it that is only told")  # fmt: skip
    run.add_argument("--resume", action="store_true", help="keep the records in --out and run "
                     "only the cases that have none for this pair, model and source")  # fmt: skip


def _add_report(commands: "_Commands[argparse.ArgumentParser]") -> None:
    report = _add_command(commands, "report", help_texts.REPORT)
    report.add_argument("folder", nargs="?", type=Path, default=LATEST, metavar="DIR",
                        help="folder of a run (default: %(default)s)")  # fmt: skip
    report.add_argument("--records", action="append", type=Path, default=[], metavar="FILE",
                        help="records to read instead of DIR/records.jsonl; may be given "
                        "again")  # fmt: skip
    report.add_argument("--out", type=Path, metavar="DIR", help="where the report is written "
                        "(default: beside the first file of records)")  # fmt: skip
    report.add_argument("--committed", nargs="?", type=Path, const=COMMITTED, metavar="ROOT",
                        help="write ROOT/PARITY.md from the records under ROOT/parity instead "
                        "(ROOT: %(const)s)")  # fmt: skip


def _add_make_model(commands: "_Commands[argparse.ArgumentParser]") -> None:
    make = _add_command(commands, "make-model", help_texts.MAKE_MODEL)
    make.add_argument("folder", type=Path, metavar="DIR", help="new or empty folder, or one that "
                      "this command made")  # fmt: skip
    make.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    make.add_argument("--layers", type=int, default=2, metavar="L", help="(default: %(default)s)")
    make.add_argument("--sliding-window", type=int, metavar="W", help="tokens that a sliding "
                      "layer sees (default: full attention)")  # fmt: skip
    make.add_argument("--sliding-layers", choices=("all", "alternate"), default="all",
                      help="which layers slide (default: %(default)s)")  # fmt: skip


def _add_cases(commands: "_Commands[argparse.ArgumentParser]") -> None:
    cases = _add_command(commands, "cases", help_texts.CASES)
    cases.add_argument("--area", action="append", default=[], metavar="A", help="only the cases "
                       "of an area; may be given again")  # fmt: skip


def _add_bench(commands: "_Commands[argparse.ArgumentParser]") -> None:
    bench = _add_command(commands, "bench", help_texts.BENCH)
    bench.add_argument("--steps", type=_whole_number(MAX_BENCH_STEPS), metavar="N",
                       help=f"decode steps to measure, 1 to {MAX_BENCH_STEPS} (default: 150; of a "
                       "block with --runners: 48)")  # fmt: skip
    bench.add_argument("--out", type=Path, metavar="FILE", help="where to write the figures, as "
                       "JSON")  # fmt: skip
    one = bench.add_argument_group("both runners in one engine")
    one.add_argument("--requests", type=_whole_number(MAX_BENCH_REQUESTS), metavar="N",
                     help="decoding requests in the batch, 1 to "
                     f"{MAX_BENCH_REQUESTS} (default: 64)")  # fmt: skip
    one.add_argument("--max-ratio", type=float, metavar="R", help="bound on "
                     f"mrv2 / v1 (default: {MAX_RATIO:g})")  # fmt: skip
    apart = bench.add_argument_group("engines side by side")
    apart.add_argument("--runners", type=_names, metavar="R,...", help="of v1, mrv2, vllm-v2 "
                       "(vLLM's own second runner)")  # fmt: skip
    for name, option in _APART_OPTIONS.items():
        apart.add_argument(f"--{name}", type=option.read, metavar=option.metavar, help=option.help)
    apart.add_argument("--engine-of", nargs=2, action="append", default=[],
                       metavar=("RUNNER", "JSON"), help="more arguments of vLLM's LLM for one "
                       "runner; may be given for each")  # fmt: skip


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_one_number(int, part) for part in text.split(","))


def _fractions(text: str) -> tuple[float, ...]:
    return tuple(_one_number(float, part) for part in text.split(","))


def _number(text: str) -> int:
    return _one_number(int, text)


def _fraction(text: str) -> float:
    return _one_number(float, text)


def _one_number(kind: Callable[[str], _T], text: str) -> _T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _json_object(text: str) -> dict[str, object]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object of arguments of vLLM's LLM")
    return values


@dataclasses.dataclass(frozen=True)
class _ApartOption:
    """An option of `bench --runners`, which becomes a field of `Options`."""

    field: str
    read: Callable[[str], object]
    metavar: str
    help: str


_APART_OPTIONS = {
    "parts": _ApartOption("parts", _names, "P,...",
                          "what to measure (default: steady,churn,replay,profile)"),
    "batches": _ApartOption("batches", _numbers, "N,...", "requests (default: 1,32,256)"),
    "temperatures": _ApartOption("temperatures", _fractions, "T,...",
                                 "0 is greedy (default: 0,1)"),
    "context": _ApartOption("context", _number, "N", "tokens of a prompt (default: 64)"),
    "churn": _ApartOption("churn", _fraction, "X",
                          "part of the batch that leaves in a step, 0 to 0.5 (default: 0.1)"),
    "limit": _ApartOption("limit_s", _fraction, "S",
                          "seconds for everything, starts included (default: 560)"),
    "answer-limit": _ApartOption("answer_limit_s", _fraction, "S",
                                 "seconds after which a block counts as hung (default: 90)"),
    "model": _ApartOption("model", str, "M", "qwen3-0.6b, llama-3.1-8b, both with random weights, "
                          "tiny, or a folder (default: qwen3-0.6b on a GPU, else tiny)"),
    "cudagraph-mode": _ApartOption("cudagraph_mode", str, "MODE",
                                   "of every engine (default: FULL_DECODE_ONLY)"),
    "blocks": _ApartOption("blocks", _number, "N",
                           "KV blocks of each engine (default: what the parts need)"),
    "before": _ApartOption("before", str, "PATH", "folders of another installation of this "
                           "project, as in PYTHONPATH: the runner `before`"),
    "engine": _ApartOption("engine", _json_object, "JSON", "more arguments of vLLM's LLM"),
    "growth-batches": _ApartOption("growth_batches", _numbers, "N,...",
                                   "(default: 1,2,4,...,1024)"),
    "growth-contexts": _ApartOption("growth_contexts", _numbers, "N,...",
                                    "(default: 64,512,4096,16384,32000)"),
    "growth-arrivals": _ApartOption("growth_arrivals", _fractions, "X,...",
                                    "(default: 0,0.05,0.1,0.2,0.5)"),
    "growth-rounds": _ApartOption("growth_rounds", _number, "N", "(default: 2)"),
}  # fmt: skip


def _add_soak(commands: "_Commands[argparse.ArgumentParser]") -> None:
    soak = _add_command(commands, "soak", help_texts.SOAK)
    soak.add_argument("--minutes", type=_minutes, default=5.0, metavar="M",
                      help="time to spend (default: %(default)g)")  # fmt: skip
    soak.add_argument("--model", action="append", choices=actions.MODELS, default=[],
                      metavar="M", help="hash, tiny or lockstep; may be given again, and all "
                      "have the same share of the time (default: every one)")  # fmt: skip
    soak.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    soak.add_argument("--out", type=Path, default=LATEST / "failing-schedule.json", metavar="FILE",
                      help="for a failing schedule (default: %(default)s)")  # fmt: skip


def _add_record(commands: "_Commands[argparse.ArgumentParser]") -> None:
    record = _add_command(commands, "record", help_texts.RECORD)
    record.add_argument("--out", type=Path, required=True, metavar="FILE",
                        help="trace to write; it must not be there yet")  # fmt: skip
    record.add_argument("--runner", choices=TRACED_RUNNERS, help="MRV2_RUNNER of the "
                        "command (default: as it is set)")  # fmt: skip
    record.add_argument("--private", action="store_true", help="replace prompts, answers, lists of "
                        "tokens and request ids by noise of the same length")  # fmt: skip
    record.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what "
                        "starts the engine, with its arguments")  # fmt: skip


def _add_replay(commands: "_Commands[argparse.ArgumentParser]") -> None:
    replay = _add_command(commands, "replay", help_texts.REPLAY)
    replay.add_argument("file", type=Path, metavar="FILE", help="trace that record wrote, or "
                        "schedule that soak wrote")  # fmt: skip
    trace = replay.add_argument_group("of a trace")
    trace.add_argument("--runner", choices=TRACED_RUNNERS, help="(default: mrv2)")
    how = trace.add_mutually_exclusive_group()
    how.add_argument("--forced", action="store_true", help="commit the recorded tokens, so that "
                     "every step is as it was (the default)")  # fmt: skip
    how.add_argument("--free", action="store_true", help="commit the runner's own tokens")
    trace.add_argument("--against", choices=TRACED_RUNNERS, help="compare with another "
                       "runner's replay instead of the recorded tokens (a private trace always "
                       "does)")  # fmt: skip
    trace.add_argument("--model", type=Path, metavar="DIR", help="the recorded model (default: "
                       "the tiny one that was recorded)")  # fmt: skip
    trace.add_argument("--salvage", action="store_true", help="play the whole steps that precede "
                       "a damage")  # fmt: skip


def _add_mutants(commands: "_Commands[argparse.ArgumentParser]") -> None:
    mutants = _add_command(commands, "mutants", help_texts.MUTANTS)
    mutants.add_argument("--only", action="append", default=[], metavar="NAME", help="one fault; "
                         "may be given again (default: every one)")  # fmt: skip
    mutants.add_argument("--kinds", type=_names, default=(), metavar="K,...", help="the faults of "
                         "some kinds, beside those of --only")  # fmt: skip
    mutants.add_argument("--aa", metavar="N", help="cases in which "
                         "nothing is wrong (default: 2000, or 0 with --only or "
                         "--kinds)")  # fmt: skip
    mutants.add_argument("--seed", default="0", metavar="N", help="of those "
                         "cases (default: %(default)s)")  # fmt: skip
    mutants.add_argument("--out", type=Path, default=LATEST, metavar="DIR", help="where "
                         "mutants.json is written (default: %(default)s)")  # fmt: skip


def _add_shrink(commands: "_Commands[argparse.ArgumentParser]") -> None:
    shrink = _add_command(commands, "shrink", help_texts.SHRINK)
    shrink.add_argument("case", nargs="?", metavar="CASE", help="id of a case, or a case file "
                        "(default: the case of each --mutant)")  # fmt: skip
    shrink.add_argument("--mutant", action="append", default=[], metavar="NAME", help="fault to "
                        "plant in the candidate; may be given again")  # fmt: skip
    shrink.add_argument("--mutants", type=_whole_number(MAX_MUTANTS), metavar="N",
                        help="so many faults, of as many cases as there are")  # fmt: skip
    shrink.add_argument("--pair", metavar="REF,CAND", help="reference and candidate (default: the "
                        "file's, or v1,mrv2)")  # fmt: skip
    shrink.add_argument("--model", type=Path, metavar="DIR", help="checkpoint to run on, instead "
                        "of the tiny one that each case names")  # fmt: skip
    shrink.add_argument("--graphs", choices=GRAPHS, default="none", help="as for run "
                        "(default: %(default)s)")  # fmt: skip
    shrink.add_argument("--repeat", type=_whole_number(MAX_REPEAT), default=3, metavar="N",
                        help="runs before and after, and of each try where the failure is flaky "
                        "(default: %(default)s)")  # fmt: skip
    shrink.add_argument("--seconds", type=_seconds, default=60.0, metavar="S", help="processor "
                        "time for each case, beside its engine's start (default: "
                        "%(default)g)")  # fmt: skip
    shrink.add_argument("--simpler-engine", action="store_true", help="try a simpler engine at "
                        "the end, which takes another start")  # fmt: skip
    shrink.add_argument("--out", type=Path, default=LATEST / "short", metavar="DIR", help="for "
                        "ID.json and test_ID.py (default: %(default)s)")  # fmt: skip


def _seconds(text: str) -> float:
    seconds = _one_number(float, text)
    if not 0.0 < seconds <= MAX_SHRINK_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds above 0 and up to {MAX_SHRINK_SECONDS}"
        )
    return seconds


def _add_invariance(commands: "_Commands[argparse.ArgumentParser]") -> None:
    invariance = _add_command(commands, "invariance", help_texts.INVARIANCE)
    invariance.add_argument("--requests", type=_whole_number(MAX_INVARIANCE_REQUESTS), default=200,
                            metavar="N", help=f"requests, 1 to {MAX_INVARIANCE_REQUESTS} "
                            "(default: %(default)s)")  # fmt: skip


def _add_host_cost(commands: "_Commands[argparse.ArgumentParser]") -> None:
    cost = _add_command(commands, "host-cost", help_texts.HOST_COST)
    cost.add_argument("--steps", type=_whole_number(MAX_HOST_COST_STEPS), default=100,
                      metavar="N", help="steps of each batch size and round, 1 to "
                      f"{MAX_HOST_COST_STEPS} (default: %(default)s)")  # fmt: skip
    cost.add_argument("--max-growth", type=float, default=MAX_GROWTH, metavar="R",
                      help="bound on a steady step of 1,024 requests over one of 64 "
                      "(default: %(default)s)")  # fmt: skip
    cost.add_argument("--out", type=Path, metavar="FILE", help="where to write the curves, as SVG")


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0.0 <= minutes <= MAX_SOAK_MINUTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of minutes from 0 to {MAX_SOAK_MINUTES}"
        )
    return minutes


def _whole_number(high: int) -> Callable[[str], int]:
    """Return an argument type that takes 1 to `high`."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {high}")
        return int(text)

    return whole_number


# ---------------------------------------------------------------- run


def _run(arguments: argparse.Namespace, harness: Harness) -> int:
    pairs = _pairs(arguments)
    if arguments.layers and arguments.graphs != "none":
        raise BadInputError(
            "--layers looks into each forward, which --graphs replays as a whole; leave one out"
        )
    small = arguments.small or any(UPSTREAM in pair for pair in pairs)
    cases = selected(harness.cases(), arguments.area, arguments.case, arguments.case_file)
    if small:
        cases = _with_small_form(cases, arguments.case)
    selection = Selection(
        cases=_runnable(cases, pairs[0], harness),
        pair=pairs[0],
        further=pairs[1:],
        model=_checked_model(arguments.model),
        graphs=arguments.graphs,
        small=small,
        referee=arguments.referee,
        layers=arguments.layers,
    )
    label = _model_label(selection.model)
    folder = RecordsFolder(arguments.out, resume=arguments.resume)
    wanted = {case.id: case for case in selection.cases}
    kept = [record for record in _read_or_refuse(folder)
            if record.id in wanted and record.pair in pairs
            and (record.environment.get("form") == "small") == small
            and ("layers" in record.environment) == selection.layers
            and record.environment.get("graphs", "none") == selection.graphs
            and record.environment.get("model") == label]  # fmt: skip
    records = _of_this_source(kept, harness) if kept else []
    made = {(record.id, record.pair) for record in records}
    expected = len(wanted) * len(pairs)
    done = {case_id for case_id in wanted if all((case_id, pair) in made for pair in pairs)}
    records = [record for record in records if record.id in done]
    left = dataclasses.replace(
        selection, cases=tuple(case for case in selection.cases if case.id not in done)
    )
    if done:
        print(f"resuming: {len(done)} of {len(wanted)} cases have records", flush=True)

    def keep(record: Record) -> None:
        _keep(record, label, folder, records)
        with _telling_of(arguments.out):
            _keep_failing(_as_run(wanted[record.id], small), record, arguments.out / FAILING)

    try:
        _execute(left, harness, keep)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {_how_to_go_on(records, expected, folder)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return _conclude(records, expected=expected, with_budgets=arguments.budgets)


def _of_this_source(records: Sequence[Record], harness: Harness) -> list[Record]:
    """Return the records that a run now would make alike, and say why the others do not count."""
    now = harness.environment()
    counting = []
    cases: dict[str, list[str]] = {}
    for record in records:
        made = record.environment
        changes = [f"{name} {made.get(name, 'unknown')}, now {now[name]}"
                   for name in _SOURCES if made.get(name) != now[name]]  # fmt: skip
        if changes:
            cases.setdefault("; ".join(changes), []).append(record.id)
        else:
            counting.append(record)
    for why, ids in cases.items():
        print(f"running again, since their records are of {why}: {', '.join(ids)}", flush=True)
    return counting


def _how_to_go_on(records: Sequence[Record], expected: int, folder: RecordsFolder) -> str:
    """Return what an interrupted run leaves; a run without records must not resume a former's."""
    if not records:
        return "no record was written; run the same command again"
    return (
        f"{len(records)} of {expected} cases have whole records in {folder.path}; "
        f"go on with the same command and --resume"
    )


def _execute(selection: Selection, harness: Harness, keep: Callable[[Record], None]) -> None:
    """Run the cases, hand each record to `keep` as its case ends, and show how it goes."""
    from mrv2_diff.progress import progress_on

    if not selection.cases:
        return
    with progress_on(sys.stdout, len(selection.cases) * len(selection.pairs)) as progress:
        records = harness.run(selection, progress.step)
        from mrv2.errors import ConfigError  # imports torch, for which the harness prepares first

        try:
            for record in records:
                keep(record)
                progress.finished(record)
        except ConfigError as error:
            raise BadInputError(str(error)) from error


def _keep(record: Record, label: str, folder: RecordsFolder, records: list[Record]) -> None:
    """Write a record with its model's label, then count it."""
    labelled = dataclasses.replace(record, environment={**record.environment, "model": label})
    folder.append(labelled)
    records.append(labelled)


def _as_run(case: Case, small: bool) -> Case:
    """Return a case in the form in which it was run, so that its file runs alike."""
    from mrv2_diff.small import small_form

    return small_form(case) if small else case


def _file_stem(case: Case, pair: tuple[str, str]) -> str:
    """Return the name of a failing case's file: of a pair besides the usual one, with the pair."""
    return case.id if pair == PAIRS[0] else f"{case.id}.{'-'.join(pair)}"


def _keep_failing(case: Case, record: Record, folder: Path) -> None:
    """Write the case of a record that fails as a file, and remove the file of one that passes."""
    from mrv2_diff import case_file

    file = folder / f"{_file_stem(case, record.pair)}.json"
    if record.verdict.passes:
        file.unlink(missing_ok=True)
    elif case.apart is None:
        first = record.first_divergence
        found = case_file.Found(
            verdict=record.verdict,
            value=first.value if first is not None else None,
            summary=record.summary,
        )
        case_file.write(case_file.CaseFile(case=case, pair=record.pair, found=found), file)


def _conclude(records: Sequence[Record], *, expected: int, with_budgets: bool = False) -> int:
    """Print the last line and return the exit code: 0 only where every case ran and passed."""
    from mrv2_diff.report import budgets_line, pairs_table, parity_line

    table = pairs_table(records)
    if table is not None:
        print("\n".join(table.lines))
    if len(records) < expected:
        print(f"{expected - len(records)} of {expected} cases gave no record", file=sys.stderr)
    if (budgets := budgets_line(records)) is not None:
        print(budgets)
    print(parity_line(records), flush=True)
    whole = bool(records) and len(records) >= expected
    passed = whole and all(record.verdict.passes for record in records)
    over = [cost for record in records for cost in record.costs
            if cost.verdict is Verdict.OVER_BUDGET]  # fmt: skip
    if over and with_budgets:
        return EXIT_FAILED
    return EXIT_PASSED if passed else EXIT_FAILED


def _runnable(cases: tuple[Case, ...], pair: tuple[str, str], harness: Harness) -> tuple[Case, ...]:
    """Return the cases without those in which V1 is known to be wrong, where V1 is both sides."""
    if pair[0] != pair[1]:
        return cases
    device = harness.device()
    runnable = tuple(case for case in cases if case.on(device).against_itself)
    if not runnable:
        raise BadInputError("V1 is known to be wrong in these cases; compare it with mrv2 instead")
    return runnable


def _pairs(arguments: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return the pairs that --pair or --runners asks for."""
    names = arguments.runners
    if names is None:
        return (pair_named(arguments.pair),)
    check_known("runner", names, RUNNERS)
    ordered = [name for name in RUNNERS if name in names]
    if len(ordered) < 2 or len(ordered) != len(names):
        raise BadInputError(
            f"--runners {','.join(names)} makes no pair; name two or three of "
            f"{', '.join(RUNNERS)}, each once"
        )
    return tuple(itertools.combinations(ordered, 2))


def _with_small_form(cases: tuple[Case, ...], named: Sequence[str]) -> tuple[Case, ...]:
    """Return the cases of which something is left when they are cut down."""
    from mrv2_diff.small import has_small_form

    left = tuple(case for case in cases if has_small_form(case))
    without = [case.id for case in cases if case.id in named and case not in left]
    if without or not left:
        raise BadInputError(
            f"nothing is left of {', '.join(without) or 'these cases'} in a small form: each needs "
            "a greedy request that runs in lockstep, and no grammar; compare them with "
            "--pair v1,mrv2"
        )
    return left


def _checked_model(folder: Path | None) -> Path | None:
    from mrv2_diff.models import ModelFolderError, check_model_folder

    if folder is not None:
        try:
            check_model_folder(folder)
        except ModelFolderError as error:
            raise BadInputError(str(error)) from error
    return folder


def _model_label(folder: Path | None) -> str:
    """Return a name of the model for the record: no path, and another for another config."""
    import zlib

    if folder is None:
        return "made from the case's seed"
    config = (folder / "config.json").read_bytes()
    return f"{folder.resolve().name} ({zlib.crc32(config):08x})"


def _read_or_refuse(folder: RecordsFolder) -> list[Record]:
    try:
        return folder.records()
    except ValueError as error:
        raise BadInputError(f"{error}; run without --resume to begin anew") from error


# ---------------------------------------------------------------- report


def _report(arguments: argparse.Namespace, harness: Harness) -> int:
    from mrv2_diff.report import parity_line, render

    if arguments.committed is not None:
        return _report_committed(arguments.committed)
    files = arguments.records or [arguments.folder / RECORDS]
    records = [record for file in files for record in _records_in(file)]
    if not records:
        raise BadInputError(f"{files[0]} holds no records; make some: mrv2-diff run")
    out = arguments.out if arguments.out is not None else files[0].parent
    tested = _tested(files[0].parent)
    try:
        render(records, out, tested)
    except OSError as error:
        raise _unwritable(out, error) from error
    print(f"wrote {out / 'index.html'}")
    print(parity_line(records), flush=True)
    return EXIT_PASSED if all(record.verdict.passes for record in records) else EXIT_FAILED


def _tested(folder: Path) -> "SelfTest | None":
    """Return what mrv2-diff mutants wrote into a folder; None where it wrote nothing."""
    from mrv2_diff.selftest import result as results

    file = folder / results.FILE
    try:
        return results.read(file) if file.exists() else None
    except OSError as error:
        raise BadInputError(f"cannot read {file}: {error.strerror or error}; remove it, or write "
                            "it again: mrv2-diff mutants") from error  # fmt: skip
    except ValueError as error:
        raise BadInputError(f"{error}; remove it, or write it again: mrv2-diff mutants") from error


def _report_committed(root: Path) -> int:
    from mrv2_diff.report.render import write_committed

    try:
        print(f"wrote {write_committed(root)}")
    except ValueError as error:
        raise BadInputError(str(error)) from error
    except OSError as error:
        raise _unwritable(root, error) from error
    return EXIT_PASSED


def _records_in(file: Path) -> list[Record]:
    from mrv2_diff import record

    try:
        return list(record.read(file))
    except OSError as error:
        raise BadInputError(
            f"cannot read records from {file}: {error.strerror}; make some: mrv2-diff run"
        ) from error
    except ValueError as error:
        raise BadInputError(f"{error}; name a file that mrv2-diff run wrote") from error


def _unwritable(folder: Path, error: OSError) -> BadInputError:
    reason = error.strerror or str(error)
    return BadInputError(
        f"cannot write to {folder}: {reason}; make room or mend its permissions, or name another "
        f"folder"
    )


# ---------------------------------------------------------------- the others


def _make_model(arguments: argparse.Namespace, harness: Harness) -> int:
    from mrv2_diff.models import ModelSpec, make_model

    try:
        spec = ModelSpec(
            seed=arguments.seed,
            layers=arguments.layers,
            sliding_window=arguments.sliding_window,
            sliding_layers=arguments.sliding_layers,
        )
        make_model(arguments.folder, spec)
    except (ValueError, FileExistsError) as error:
        raise BadInputError(str(error)) from error
    except OSError as error:
        raise _unwritable(arguments.folder, error) from error
    print(f"made {arguments.folder}; compare on it: mrv2-diff run --model {arguments.folder}")
    return EXIT_PASSED


def _cases(arguments: argparse.Namespace, harness: Harness) -> int:
    chosen = selected(harness.cases(), arguments.area, [], [])
    width = max((len(case.id) for case in chosen), default=0)
    for area in dict.fromkeys(case.area for case in chosen):
        print(area)
        for case in chosen:
            if case.area == area:
                print(f"  {case.id:<{width}}  {case.title}")
    return EXIT_PASSED


def _bench(arguments: argparse.Namespace, harness: Harness) -> int:
    out: Path | None = arguments.out
    if out is not None:
        with _telling_of(out):
            _probe_file(out)
    if arguments.runners is not None:
        return _bench_apart(arguments, harness)
    given = [name for name, option in _APART_OPTIONS.items()
             if getattr(arguments, _attribute(name)) is not None]  # fmt: skip
    if given or arguments.engine_of:
        raise BadInputError(f"--{given[0] if given else 'engine-of'} needs --runners")
    max_ratio = MAX_RATIO if arguments.max_ratio is None else arguments.max_ratio
    result = harness.bench(arguments.requests or 64, arguments.steps or 150)
    print(result.table)
    print(f"bookkeeping: mrv2 / v1 = {result.ratio:.2f} (bound {max_ratio:g})", flush=True)
    if out is not None:
        with _telling_of(out):
            out.write_text(json.dumps(result.figures, indent=1) + "\n")
    return EXIT_PASSED if result.ratio <= max_ratio else EXIT_FAILED


def _bench_apart(arguments: argparse.Namespace, harness: Harness) -> int:
    from mrv2_diff.device_bench.options import Options

    for name in ("requests", "max_ratio"):
        if getattr(arguments, name) is not None:
            raise BadInputError(f"--{name.replace('_', '-')} does not go with --runners")
    given = {
        option.field: getattr(arguments, _attribute(name))
        for name, option in _APART_OPTIONS.items()
        if getattr(arguments, _attribute(name)) is not None
    }
    if arguments.steps is not None:
        given["steps"] = arguments.steps
    try:
        given["engine_of"] = {name: _json_object(text) for name, text in arguments.engine_of}
        options = Options(runners=arguments.runners, out=arguments.out, **given)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise BadInputError(str(error)) from error
    outcome = harness.bench_apart(options, lambda line: print(line, flush=True))
    print(outcome.table, flush=True)
    return EXIT_PASSED if outcome.passes else EXIT_FAILED


def _attribute(option: str) -> str:
    return option.replace("-", "_")


def _probe_file(path: Path) -> None:
    """Open a file for writing and leave it as it is, so that a mistake shows before the work."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
    existed = path.exists()
    path.open("ab").close()
    if not existed:
        path.unlink()


@contextmanager
def _telling_of(file: Path) -> Iterator[None]:
    """Turn the system's refusal to write a file into one message."""
    try:
        yield
    except OSError as error:
        raise BadInputError(
            f"cannot write {file}: {error.strerror or error}; make room or mend its permissions, "
            f"or name another file with --out"
        ) from error


def _soak(arguments: argparse.Namespace, harness: Harness) -> int:
    out: Path = arguments.out
    with _telling_of(out):
        _probe_file(out)
    models = dict.fromkeys(arguments.model or actions.MODELS)
    seconds = 60 * arguments.minutes
    passes = True
    for model in models:
        request = Soak(seconds=seconds / len(models), model=model, seed=arguments.seed)
        result = harness.soak(request, _TellsNowAndThen())
        print(summary(result), flush=True)
        proves = seconds < LONG_SECONDS or (not result.rare and result.is_measured)
        passes = passes and result.passes and proves
        if result.failure is not None:
            print(f"{result.failure.error}", file=sys.stderr)
            with _telling_of(out):
                actions.write(result.failure.schedule, out)
            print(f"wrote {out}; play it again: mrv2-diff replay {out}", file=sys.stderr)
            break
    return EXIT_PASSED if passes else EXIT_FAILED


class _TellsNowAndThen:
    """Prints a line about a soak each time that its steps have doubled."""

    def __init__(self) -> None:
        self._next = 1000

    def __call__(self, result: SoakResult) -> None:
        if result.steps >= self._next:
            print(f"{result.steps:,} steps, {result.requests:,} requests", flush=True)
            self._next = 2 * result.steps


def _record_trace(arguments: argparse.Namespace, harness: Harness) -> int:
    program = arguments.program[arguments.program[:1] == ["--"] :]
    out: Path = arguments.out
    if not program:
        raise BadInputError("name the command that starts the engine, behind --, such as: "
                            "mrv2-diff record --out t.trace -- vllm serve MODEL")  # fmt: skip
    if out.exists():
        raise BadInputError(f"{out} is there already; remove it or name another file with --out")
    with _telling_of(out):
        _probe_file(out)
    request = Recording(
        out=out, program=tuple(program), runner=arguments.runner, private=arguments.private
    )
    try:
        outcome = harness.record(request)
    except ValueError as error:
        raise BadInputError(str(error)) from error
    print(outcome.text, flush=True)
    if outcome.exit_code:
        print(f"mrv2-diff record: {program[0]} ended with {outcome.exit_code}", file=sys.stderr)
    return EXIT_PASSED if outcome.is_whole and not outcome.exit_code else EXIT_FAILED


_OF_A_TRACE = ("runner", "forced", "free", "against", "model", "salvage")


def _replay(arguments: argparse.Namespace, harness: Harness) -> int:
    from mrv2_diff.traces.format import is_trace

    try:
        traced = is_trace(arguments.file)
    except OSError as error:
        raise _unreadable(arguments.file, error) from error
    if traced:
        return _replay_trace(arguments, harness)
    for name in _OF_A_TRACE:
        if getattr(arguments, name):
            raise BadInputError(f"--{name} is for a trace, and {arguments.file} does not begin as "
                                "one")  # fmt: skip
    try:
        schedule = actions.read(arguments.file)
    except OSError as error:
        raise _unreadable(arguments.file, error) from error
    except ValueError as error:
        raise BadInputError(f"{error}; name a file that mrv2-diff soak or mrv2-diff record "
                            "wrote") from error  # fmt: skip
    failure = harness.replay(schedule)
    print(f"replay: {len(schedule.actions)} actions: {failure or 'nothing is wrong'}", flush=True)
    return EXIT_PASSED if failure is None else EXIT_FAILED


def _shrink(arguments: argparse.Namespace, harness: Harness) -> int:
    from mrv2_diff.shrinking.request import ShrinkRequest, conclusion, table

    out: Path = arguments.out
    with _telling_of(out):
        _probe_file(out / "probe.json")
    cases, pair = _to_shrink(arguments, harness)
    request = ShrinkRequest(
        cases=cases,
        pair=pair,
        model=_checked_model(arguments.model),
        graphs=arguments.graphs,
        repeat=arguments.repeat,
        seconds=arguments.seconds,
        engine=arguments.simpler_engine,
    )
    results = []
    shrinking = harness.shrink(request, lambda line: print(line, flush=True))
    from mrv2.errors import ConfigError  # imports torch, for which the harness prepares first

    try:
        for result in shrinking:
            results.append(result)
            with _telling_of(out):
                print(_told(result, out), flush=True)
    except ConfigError as error:
        raise BadInputError(str(error)) from error
    if len(results) > 1:
        print(table(results))
    print(conclusion(results), flush=True)
    is_whole = bool(results) and all(result.shrunk is not None for result in results)
    return EXIT_PASSED if is_whole else EXIT_FAILED


def _told(result: "Result", out: Path) -> str:
    """Write what is left of a case; return what is said of it."""
    from mrv2_diff import case_file
    from mrv2_diff.shrinking import texts

    name = result.whole.fault or result.whole.id
    if result.kept is None or result.shrunk is None:
        return f"{name}: nothing to shrink: {result.why_not}\n"
    case, pair, shrunk = result.kept.case, result.kept.pair, result.shrunk
    file = out / f"{case.id}.json"
    case_file.write(result.kept, file)
    test = out / f"test_{texts.identifier(case.id)}.py"
    test.write_text(texts.pytest_module(case, pair, result.outcome))
    late = "; the time was over, give it more with --seconds" if shrunk.out_of_time else ""
    return (
        f"{texts.script(case, pair, result.outcome)}\n"
        f"seen in {shrunk.before} of the whole case ({shrunk.first_steps} steps), in "
        f"{shrunk.after} of this one ({shrunk.num_steps} steps); {shrunk.tries} runs in "
        f"{result.seconds:.0f} s of the processor{late}\n"
        f"wrote {file}; run it again: mrv2-diff run --case-file {file}\n"
        f"wrote {test}\n"
    )


def _to_shrink(
    arguments: argparse.Namespace, harness: Harness
) -> tuple[tuple[Case, ...], tuple[str, str]]:
    """Return the cases that a command line means, each with its fault, and the pair."""
    pair = None if arguments.pair is None else pair_named(arguments.pair)
    faults = _faults(arguments, harness)
    if arguments.case is None:
        if not faults:
            raise BadInputError("name a case, a case file, or a fault with --mutant")
        catalog = harness.cases()
        named = [dataclasses.replace(catalog[case], fault=fault) for fault, case in faults.items()]
        return tuple(named), pair or PAIRS[0]
    if arguments.case.endswith(".json"):
        kept = case_in(Path(arguments.case))
        case, pair = kept.case, pair or pair_named(",".join(kept.pair))
    else:
        catalog = harness.cases()
        check_known("case", [arguments.case], catalog)
        case = catalog[arguments.case]
    cases = [dataclasses.replace(case, fault=fault) for fault in faults] or [case]
    return tuple(cases), pair or PAIRS[0]


def _up_to(option: str, text: str, high: int) -> int:
    """Return a number of an option, from 0 to `high`."""
    if not text.isdecimal() or int(text) > high:
        raise BadInputError(f"{option} is {text!r}; it must be a whole number from 0 to {high}")
    return int(text)


def _mutants(arguments: argparse.Namespace, harness: Harness) -> int:
    from mrv2_diff.selftest import result as results
    from mrv2_diff.selftest.request import NUM_ALIKE, SelfTestRequest

    file: Path = arguments.out / results.FILE
    some = bool(arguments.only or arguments.kinds)
    unasked = 0 if some else NUM_ALIKE
    num_alike = unasked if arguments.aa is None else _up_to("--aa", arguments.aa, MAX_ALIKE)
    seed = _up_to("--seed", arguments.seed, MAX_SEED)
    if some:
        known = harness.fault_kinds()
        check_known("fault", arguments.only, [name for names in known.values() for name in names])
        check_known("kind of fault", arguments.kinds, known)
    with _telling_of(file):
        _probe_file(file)
    request = SelfTestRequest(
        only=tuple(arguments.only),
        kinds=tuple(arguments.kinds),
        num_alike=num_alike,
        seed=seed,
    )
    from mrv2.errors import ConfigError  # imports torch, for which the harness prepares first

    try:
        result = harness.selftest(request, lambda line: print(line, flush=True))
    except ConfigError as error:
        raise BadInputError(str(error)) from error
    print(results.table(result))
    for fault in result.faults:
        print(f"mrv2-diff mutants: {fault}", file=sys.stderr)
    with _telling_of(file):
        results.write(result, file)
    print(f"wrote {file}")
    print(results.conclusion(result), flush=True)
    return EXIT_PASSED if result.passes else EXIT_FAILED


def _faults(arguments: argparse.Namespace, harness: Harness) -> dict[str, str]:
    """Return the faults that are asked for with their cases."""
    if not arguments.mutant and arguments.mutants is None:
        return {}
    known = harness.faults()
    check_known("fault", arguments.mutant, known)
    chosen = {name: known[name] for name in arguments.mutant}
    wanted = len(chosen) + (arguments.mutants or 0)
    left = {name: case for name, case in known.items() if name not in chosen}
    while left and len(chosen) < wanted:  # the first of each case, then the second of each
        firsts = {case: name for name, case in reversed(left.items())}
        for name in [name for name, case in left.items() if firsts[case] == name]:
            if len(chosen) < wanted:
                chosen[name] = left.pop(name)
    return chosen


def _unreadable(file: Path, error: OSError) -> BadInputError:
    return BadInputError(f"cannot read {file}: {error.strerror or error}; name a file that "
                         "mrv2-diff soak or mrv2-diff record wrote")  # fmt: skip


def _replay_trace(arguments: argparse.Namespace, harness: Harness) -> int:
    asked = TraceReplay(
        trace=arguments.file,
        runner=arguments.runner or "mrv2",
        forced=not arguments.free,
        against=arguments.against,
        model=arguments.model,
        salvage=arguments.salvage,
    )
    try:
        outcome = harness.replay_trace(asked)
    except OSError as error:
        raise _unreadable(arguments.file, error) from error
    except ValueError as error:  # damaged, or of another model, vLLM or KV cache
        raise BadInputError(str(error)) from error
    print(outcome.text, flush=True)
    return EXIT_PASSED if outcome.passes else EXIT_FAILED


def _invariance(arguments: argparse.Namespace, harness: Harness) -> int:
    result = harness.invariance(arguments.requests)
    print(invariance_table(result))
    same = sum(row.num_same for row in result.rows)
    print(f"invariance: {same} of {result.num_requests * len(result.rows)} outputs as alone",
          flush=True)  # fmt: skip
    return EXIT_PASSED if result.passes else EXIT_FAILED


def _host_cost(arguments: argparse.Namespace, harness: Harness) -> int:
    out: Path | None = arguments.out
    if out is not None:
        with _telling_of(out):
            _probe_file(out)
    result = harness.host_cost(arguments.steps)
    print(result.table)
    print(
        f"1,024 / 64 requests: bookkeeping {result.growth:.2f}, with the translation "
        f"{result.translated_growth:.2f} (bounds {arguments.max_growth:g} and "
        f"{MAX_TRANSLATED_GROWTH:g})", flush=True
    )  # fmt: skip
    if out is not None:
        with _telling_of(out):
            out.write_text(result.picture)
    is_within = result.translated_growth <= MAX_TRANSLATED_GROWTH
    return EXIT_PASSED if is_within and result.growth <= arguments.max_growth else EXIT_FAILED


def _check_surface(arguments: argparse.Namespace, harness: Harness) -> int:
    try:
        unknown = harness.surface()
    except ModuleNotFoundError as error:
        raise BadInputError(str(error)) from error
    for name, places in unknown.items():
        print(f"{name}\n  " + "\n  ".join(places))
    if unknown:
        print(f"surface: {len(unknown)} unknown; give each an entry in SURFACE: served, no-op or "
              f"refused")  # fmt: skip
        return EXIT_FAILED
    print("surface: every name that vLLM touches on a runner is known")
    return EXIT_PASSED


_COMMANDS = {
    "run": _run,
    "report": _report,
    "make-model": _make_model,
    "cases": _cases,
    "bench": _bench,
    "soak": _soak,
    "record": _record_trace,
    "replay": _replay,
    "shrink": _shrink,
    "mutants": _mutants,
    "invariance": _invariance,
    "host-cost": _host_cost,
    "check-surface": _check_surface,
}


if __name__ == "__main__":
    sys.exit(main())
