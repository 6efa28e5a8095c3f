"""What `--help` says: what a command does, examples, and what its exit codes mean."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpText:
    """The texts of one command."""

    short: str
    long: str
    epilog: str


PROGRAM = """\
Compare two model runners inside one vLLM engine on identical batches: tokens, logits, logprobs,
step inputs, memory and latency, value by value and step by step."""

PROGRAM_EPILOG = """\
a first comparison:
  mrv2-diff run                 every case, vLLM's V1 runner against mrv2
  mrv2-diff report              reports/latest/index.html

on live traffic, without this command (docs/shadow.md):
  MRV2_RUNNER=shadow vllm serve MODEL
                                V1 serves; mrv2 follows 1 % of the requests, and what differs is
                                appended to mrv2_shadow.jsonl and counted at /metrics

exit codes: 0 all passed, 1 something failed, 2 bad input, 130 interrupted.
`mrv2-diff COMMAND --help` tells more of each."""

RUN = HelpText(
    short="run cases and write their records",
    long="""\
Run cases: one engine, its runners in one worker. The reference drives the scheduler; the candidate
gets its own copy of every batch. A record is written as each case ends.""",
    epilog="""\
examples:
  mrv2-diff run                                    every case, on tiny models made for it
  mrv2-diff run --area sampling                    an area
  mrv2-diff run --case lifecycle.preemption        one case (mrv2-diff cases lists them)
  mrv2-diff run --pair v1,v1                       the control: V1 against itself
  mrv2-diff run --model ./checkpoint --out ./mine  your own model
  mrv2-diff run --graphs FULL_DECODE_ONLY          with CUDA graphs, on a CUDA device
  mrv2-diff run --runners v1,mrv2,vllm-v2          three runners, every pair, small cases
  mrv2-diff run --referee                          ask a third model who is right
  mrv2-diff run --layers                           name the first layer that differs
  mrv2-diff run --budgets                          fail where memory or time is over its budget
  mrv2-diff run --resume                           go on after an interruption
  mrv2-diff run --case-file ./short/a.b.json       a case that shrink or a run wrote

A case that fails is kept as DIR/failing/ID.json, for mrv2-diff shrink.
DIR/records.jsonl of a former run is kept as records.previous.jsonl, unless --resume is given. A
resumed run repeats the cases whose records are of another commit or of other changes to it, or of
another mrv2, vLLM or torch. MRV2_DIFF_TRACEBACK=1 shows what led to a message.
vllm-v2 is vLLM's own second runner. It runs on a CPU under Triton's interpreter, at 0.1 to 0.3 s a
step, so cases are cut down to 4 greedy requests of 10 tokens, all pairs of such a run alike, and
nothing is measured. V1 drives the scheduler in every pair. Three runners end in a table of cases by
pairs.

--referee holds rows of logits that differ beyond the floor against transformers' model of the same
checkpoint in a higher precision, without a KV cache, and says which runner is nearer. Where in all
of them the reference is further away than rounding and the candidate is not, the verdict is
`reference wrong`.

The noise floor is measured once for each engine and environment and kept in the user's cache,
mrv2/floors; each case's line says the spacings that it required beside it.

The last line is `parity: N cases, N match, ...`, the one before it says how budgets were kept:
within, over, or open where the 95 % interval of a ratio holds its budget.

exit codes:
  0    at least one case ran, and every case passed (match, near tie, known difference,
       reference wrong, reference crashed)
  1    a case failed, or gave no record; with --budgets, one is over its budget
  2    bad input: an unknown name, no model, a folder that cannot be written
  130  interrupted; the records written so far are whole""",
)

REPORT = HelpText(
    short="render records as a page, Markdown and JSON",
    long="""\
Render records: index.html (one file, works offline), PARITY.md and summary.json. Nothing is run;
records of another machine render here.""",
    epilog="""\
examples:
  mrv2-diff report                                      reports/latest
  mrv2-diff report ./mine                               the records of run --out ./mine
  mrv2-diff report --records a.jsonl --records b.jsonl --out ./both
  mrv2-diff report --committed                          reports/PARITY.md from reports/parity

exit codes:
  0  the report was written, and every case in it passed
  1  the report was written, and a case in it failed
  2  bad input: no records, or a folder that cannot be written""",
)

MAKE_MODEL = HelpText(
    short="make a tiny checkpoint from a seed",
    long="""\
Make a tiny checkpoint with a byte-level tokenizer: Qwen3, or EXAONE 4 where sliding and full
layers alternate. The same options give the same bytes. Its logits are spread like a trained
model's. vLLM runs a float32 checkpoint in bfloat16 unless told --dtype float32.""",
    epilog="""\
examples:
  mrv2-diff make-model ./tiny
  mrv2-diff make-model ./tiny --seed 7 --layers 4
  mrv2-diff make-model ./sliding --sliding-window 16 --sliding-layers alternate --layers 4

exit codes:
  0  the checkpoint was made
  2  bad input: a value out of bounds, a folder that holds something else or cannot be written""",
)

CASES = HelpText(
    short="list the cases",
    long="List the cases by area, with what each is about.",
    epilog="""\
examples:
  mrv2-diff cases
  mrv2-diff cases --area lifecycle

exit codes: 0, or 2 for an unknown area.""",
)

BENCH = HelpText(
    short="measure runners' host time, or whole engines side by side",
    long="""\
Without --runners: the host time of steady decode steps in both runners, interleaved in one engine
on the CPU. Bookkeeping is a runner's step less the model, the sampler and the attention metadata,
which neither owns.

With --runners: engines side by side on one device, each runner's in a process of its own. They take
turns, in orders that balance a drift, until the 95 % confidence interval of every ratio of medians
is narrower than 3 %, or the time is over (INCONCLUSIVE). All must be sent the same steps. Host time
is what execute_model, sample_tokens and reading the output take, less every wait for an event.

parts:
  memory      each engine alone: KV tokens, memory by phase (CUDA)
  steady      decode steps of whole engines, a batch that stays
  churn       the same, while a part of the batch leaves and arrives in each step
  replay      decode steps of the runner alone, without a scheduler
  throughput  256 requests, prompts and outputs of 100 to 1,024 tokens; time to the first token
  growth      by batch, context and arrivals, with a plot; a few rounds each
  profile     busy time, kernels, driver calls and uploads, from torch's profiler (CUDA)

Run it on an idle machine.""",
    epilog="""\
examples:
  mrv2-diff bench                              64 requests
  mrv2-diff bench --requests 8 --steps 100     a smaller batch
  mrv2-diff bench --out ./bench.json           keep the figures
  mrv2-diff bench --runners v1,mrv2,vllm-v2 --out ./device.json
  mrv2-diff bench --runners v1,mrv2 --parts steady,profile --batches 256 --limit 300
  mrv2-diff bench --runners v1,mrv2 --engine-of mrv2 '{"enforce_eager": true}'

With --runners, --out FILE.json is written anew after each measurement; beside it FILE.txt (tables),
FILE.svg (growth) and FILE.RUNNER.log (what a process printed). A runner that fails or hangs is
ended and named; the others go on.

exit codes:
  0    mrv2's bookkeeping is within the bound; with --runners: all was measured, and well enough
  1    it is above the bound; with --runners: a runner failed, a ratio is INCONCLUSIVE, steps
       differ, or a part was skipped
  2    bad input: a number out of bounds, a file that cannot be written
  130  interrupted""",
)

SOAK = HelpText(
    short="play random schedules until the time is over",
    long="""\
Play random schedules through vLLM's scheduler: arrivals with shared prefixes, chunks, aborts,
preemptions, resumes, ids used again, sessions, loads that fail. With the model `hash` every
request must return what it returns alone; with `tiny`, a checkpoint, what V1 returns, with and
without steps queued ahead; with `lockstep` every value of every step is compared with V1's. What
happened is counted, and memory must stay flat. A soak of 30 minutes or more also fails where a
kind of event that can happen did so less than 100 times, or where memory was looked at less than
10 times. A failing schedule is made short and written as JSON.""",
    epilog="""\
examples:
  mrv2-diff soak --minutes 30
  mrv2-diff soak --model tiny --seed 7

exit codes:
  0    no request noticed anything, and memory stayed flat
  1    one did, or memory grew, or 30 minutes had too little of an event or of measuring
  2    bad input: a number out of bounds, a file that cannot be written
  130  interrupted""",
)

RECORD = HelpText(
    short="record what a live engine is sent and draws, into a trace",
    long="""\
Run a program that starts a vLLM engine, such as `vllm serve`, with MRV2_TRACE=FILE: every
SchedulerOutput, grammar mask and drawn token goes into one file, with the configuration, versions
and hashes that a replay needs. Setting the variable by hand does the same. Steps are not held up:
if something cannot be recorded, recording ends and the log says why.""",
    epilog="""\
examples:
  mrv2-diff record --out load.trace --runner mrv2 -- vllm serve ./checkpoint --port 8000
  mrv2-diff record --out batch.trace --private -- python my_script.py
  MRV2_RUNNER=v1 MRV2_TRACE=load.trace vllm serve ./checkpoint

The file must not be there yet, and one engine writes it. With --private (MRV2_TRACE_PRIVATE=1) it
holds nothing of what people wrote or were answered, and a replay compares runners. Interrupt the
program to end it; of an engine that is killed, the last half second may be missing.

exit codes: 0 the trace is whole and the program ended with 0, 1 either is not so, 2 bad input.""",
)

REPLAY = HelpText(
    short="play a trace that record wrote, or a schedule that soak wrote",
    long="""\
Play what was recorded from an engine in a runner, in a process of its own, and compare the tokens
that it draws with the recorded ones. The file's beginning tells a trace from a schedule; a schedule
is played on a new runner or engine, and the command says how it fails.""",
    epilog="""\
examples:
  mrv2-diff replay load.trace                               in mrv2, each step as it was recorded
  mrv2-diff replay load.trace --runner v1 --free            in V1, which goes on with its own tokens
  mrv2-diff replay load.trace --model ./checkpoint          of a model that is not a tiny one
  mrv2-diff replay load.trace --runner mrv2 --against v1    two replays, compared with each other
  mrv2-diff replay torn.trace --salvage                     what precedes a damage
  mrv2-diff replay reports/latest/failing-schedule.json     a schedule

Compared are tokens of greedy requests, and random ones where the same runner drew them and can draw
them again. A trace of another model, another vLLM, other KV groups or for a larger machine is
refused with what differs.

exit codes: 0 nothing differs, 1 something does or the runner failed, 2 the file is neither, is
damaged, or cannot be played here.""",
)

SHRINK = HelpText(
    short="make a failing case short",
    long="""\
Leave out requests, steps, parameters and tokens of a failing case as long as it fails in the same
way: the same verdict at the same value of the step, or a crash with the same exception. One engine
runs all tries. A failure that is not seen in each of the first --repeat runs is flaky: a try then
has as many runs, and counts where at least half as many show it. Prints what is left as a script,
and writes it as a case file and as a module for pytest.

With --mutant a fault is planted in the candidate while its case runs.""",
    epilog="""\
examples:
  mrv2-diff shrink lifecycle.preemption                   a case that fails
  mrv2-diff shrink reports/latest/failing/a.b.json        a file that run wrote
  mrv2-diff shrink --mutant stale-row                     a planted fault, in its own case
  mrv2-diff shrink --mutants 10                           ten of them, with a table
  mrv2-diff run --case-file reports/latest/short/a.b.short.json

A case that V1 fails, or that runs in engines of its own, cannot be shrunk.

exit codes:
  0    every case was made short, or is as short as it can be
  1    a case does not fail
  2    bad input: an unknown name, a file that holds no case, a folder that cannot be written
  130  interrupted""",
)

MUTANTS = HelpText(
    short="test the harness: plant faults, and run cases in which nothing is wrong",
    long="""\
Plant faults into our runner from outside, one at a time, and run for each the case or the check
that was written down to find it, with the first value that must differ. Each case also runs without
a fault. Then run cases in which nothing is wrong: requests drawn at random, V1 beside itself and
our runner beside itself, one of the two with every step in another order, with other neighbours and
in other chunks, judged as any pair is. Two processes share the work; a fault that ends its process
ends nothing else.

Prints each fault with what found it, then the counts by kind, and writes mutants.json, whose
figures mrv2-diff report puts into its head.""",
    epilog="""\
examples:
  mrv2-diff mutants                                       everything; some 20 minutes on two cores
  mrv2-diff mutants --only stale-row                      one fault
  mrv2-diff mutants --kinds "penalties,block tables"      the faults of two kinds
  mrv2-diff mutants --only stale-row --aa 50              and 50 cases in which nothing is wrong

exit codes:
  0    every fault was found by what was written down, every case passes without one, and at most
       one in 2,000 cases in which nothing is wrong ended in an alarm
  1    a fault was not found, or by something else, or a case failed, or there were more alarms
  2    bad input: an unknown fault or kind, a number out of bounds, a folder that cannot be written
  130  interrupted""",
)

INVARIANCE = HelpText(
    short="schedule the same requests in many ways, and compare what they return",
    long="""\
Run requests alone, each with sampling parameters of its own drawn at random, then together: in one
batch, in chunks of three sizes, preempted at three points and for want of blocks, from a warm
prefix cache, and with steps queued ahead. Print a line for each: how many requests returned the
tokens, the logprobs' tokens and the ranks that they return alone, and the largest difference of a
logprob. vLLM's scheduler drives our runner; the model is HashLM, whose logits depend on every KV
slot and are exact, so no difference is allowed.""",
    epilog="""\
examples:
  mrv2-diff invariance
  mrv2-diff invariance --requests 48

exit codes: 0 everything is the same, 1 something differs or a way of scheduling did not come about,
2 bad input.""",
)

HOST_COST = HelpText(
    short="measure the core's host time by batch size",
    long="""\
Measure the host time of a decode step of the core, alone and with the translation of what vLLM's
scheduler says, from 1 to 1,024 requests: no model, no kernel, no copy. Bookkeeping is what queues a
step; the output's list for each request, as V1 has it, stands apart. Figures are the least of three
rounds. Run it on an idle machine.""",
    epilog="""\
examples:
  mrv2-diff host-cost
  mrv2-diff host-cost --steps 300 --out ./host-cost.svg

exit codes:
  0    both grow within their bounds
  1    one grows more
  2    bad input: a number out of bounds, a file that cannot be written
  130  interrupted""",
)

CHECK_SURFACE = HelpText(
    short="list what the installed vLLM touches on a runner and we do not know",
    long="""\
Read the installed vLLM's source for every name that it touches on a model runner, and list those
that this project has not decided about: the to-do list for a new vLLM. Nothing is run.""",
    epilog="""\
example:
  mrv2-diff check-surface

exit codes: 0 nothing is unknown, 1 something is, 2 vLLM is not installed.""",
)
