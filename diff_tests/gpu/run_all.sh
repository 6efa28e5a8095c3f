#!/usr/bin/env bash
# Everything that needs a CUDA device: kernels, the draw, engines, times of a step, and benchmarks of
# sampling and logprobs beside vLLM's own.
#
#   OUT=/tmp/gpu PYTHON=python3 bash diff_tests/gpu/run_all.sh
#
# Writes logs and figures into the folder OUT, goes on after a part that failed, and ends with a
# summary; status 1 where a part failed. Needs a vLLM for CUDA and this project's entry points in
# PYTHON's environment; the code that runs is this tree's. PARTS names the parts to run, all but
# `bench`, `lockstep` and `shadow` by default, which takes about eight minutes. `bench` sets whole
# engines side by side for BENCH_LIMIT seconds, with the options BENCH_OPTIONS of `mrv2-diff bench`.
# `lockstep` runs every case beside V1, eagerly and with CUDA graphs, for most of ten minutes, with the
# options LOCKSTEP of run_lockstep.py. `shadow` follows requests beside engines and servers of V1.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
export OUT=${OUT:-reports/latest/gpu}
export PYTHONPATH="$root:$root/compat:$root/diff_tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
mkdir -p "$OUT" || exit 1
parts=${PARTS:-environment kernels engines times sampling logprobs}
failed=()

# part NAME SECONDS COMMAND...: run with a limit, the output in OUT/NAME.log.
part() {
  local name=$1 limit=$2
  shift 2
  [[ " $parts " == *" $name "* ]] || return 0
  local began=$SECONDS
  timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local status=$?
  echo "($name: status $status, $((SECONDS - began)) s)" >>"$OUT/$name.log"
  return $status
}

part environment 90 "$python" -c '
import importlib.metadata as metadata, sys, torch
print("python", sys.version.split()[0], "on", torch.cuda.get_device_name())
for name in ("torch", "triton", "vllm", "mrv2", "numpy", "transformers"):
    print(name, metadata.version(name))
import mrv2, mrv2_compat, vllm
print(mrv2.__file__, mrv2_compat.__file__, vllm.__file__)
' || failed+=(environment)

test="$python -m pytest -m gpu --tb=short --durations=5 --continue-on-collection-errors"
part kernels 330 $test diff_tests/test_ops.py diff_tests/unit diff_tests/gpu/test_draw.py &
kernels=$!
part engines 300 $test diff_tests/gpu/test_engines.py || failed+=(engines)
wait $kernels || failed+=(kernels)
part shadow 580 $python -m pytest --tb=short --durations=5 \
  diff_tests/test_shadow.py diff_tests/test_shadow_serve.py || failed+=(shadow)
part times 220 "$python" diff_tests/gpu/step_times.py "$OUT/step_times.json" || failed+=(times)
part sampling 200 "$python" diff_tests/gpu/bench_sampling.py "$OUT/sampling.json" \
  || failed+=(sampling)
part logprobs 150 "$python" diff_tests/gpu/bench_logprobs.py "$OUT/logprobs.json" \
  || failed+=(logprobs)

part bench "$((${BENCH_LIMIT:-480} + 30))" "$python" -m mrv2_diff.cli bench \
  --runners v1,mrv2,vllm-v2 --limit "${BENCH_LIMIT:-480}" --out "$OUT/bench.json" \
  ${BENCH_OPTIONS:-} || failed+=(bench)
part lockstep 590 "$python" diff_tests/gpu/run_lockstep.py "$OUT" ${LOCKSTEP:-} \
  || failed+=(lockstep)

for name in $parts; do
  echo "== $name"
  tail -n 25 "$OUT/$name.log"
done
[ ${#failed[@]} -eq 0 ] && echo "gpu: all parts passed" && exit 0
echo "gpu: failed: ${failed[*]}"
exit 1
