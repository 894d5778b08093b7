#!/usr/bin/env bash
# Everything that needs a GPU, in one command: build, tests, benchmark, sanitizers. Under 8 minutes; downloads nothing.
#
#     bench/gpu.sh             on a machine with a GPU, nvcc, a C++ compiler, and a Python that has torch and pytest
#     bench/gpu.sh --dry-run   the same steps on the CPU, to try this script; its times mean nothing
#
# Environment: PYTHON (python3), OUT (where results go; bench/results/gpu). A step that fails or runs out of time does not
# stop the others; the last lines say what became of each, and the exit status is 1 if one failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -f setup.py ]] || { echo "bench/gpu.sh belongs to a checkout: there is no setup.py in $PWD"; exit 2; }

TOTAL=470 # seconds for all steps
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/bench/results/gpu}
[[ $# == 0 || $* == --dry-run ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
dry_run=$#
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
summary=$OUT/summary.txt
failed=0

say() { printf "$@" | tee -a "$summary"; }

# step NAME SECONDS LOG COMMAND...: the command, its output in LOG, for so long at most, and no longer than what is left.
step() {
  local name=$1 limit=$2 log=$OUT/$3 start=$SECONDS left=$((TOTAL - SECONDS)) status
  shift 3
  if ((limit > left)); then limit=$left; fi
  if ((left < 5)); then say '%-10s left out: no time left\n' "$name"; failed=1; return 1; fi
  printf '\n=== %s (%ss, at most %ss more)\n' "$name" "$SECONDS" "$limit"
  # Enough to read and never too much to keep.
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tail -c 4000000 > "$log"
  status=${PIPESTATUS[0]}
  tail -n 12 "$log" | cut -c 1-180
  case $status in
    0) say '%-10s ok, %ss\n' "$name" $((SECONDS - start)) ;;
    124 | 137) say '%-10s out of time after %ss\n' "$name" $((SECONDS - start)) ;;
    *) say '%-10s FAILED (%s), %ss: see %s\n' "$name" "$status" $((SECONDS - start)) "$(basename "$log")" ;;
  esac
  if ((status != 0)); then failed=1; fi
}

# ---- what is here ----------------------------------------------------------------------------------------------------

if ((dry_run)); then
  export POSENC_TEST_DEVICE=cpu POSENC_NO_CUDA=1
  arch=none
else
  arch=$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())' 2> /dev/null | tail -n 1)
  if [[ ! $arch =~ ^[0-9]+\.[0-9]+$ ]]; then
    echo "torch finds no GPU (--dry-run tries this script on the CPU)"
    exit 2
  fi
  export POSENC_FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST=$arch
  unset POSENC_TEST_DEVICE POSENC_NO_CUDA # nothing else may stand in for the GPU
  export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
fi
mkdir -p "$OUT" || exit 2
{
  echo "architecture $arch, commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv 2> /dev/null
  nvcc --version 2> /dev/null | tail -n 2
} 2>&1 | tee "$summary"
"$PYTHON" -m torch.utils.collect_env > "$OUT/environment.txt" 2>&1

# ---- the steps -------------------------------------------------------------------------------------------------------

step build 150 build.log "$PYTHON" setup.py build_ext --inplace

step tests 200 tests.log "$PYTHON" -m pytest -m cuda -p no:cacheprovider -o faulthandler_timeout=60 --tb=short \
  --durations=8 -rs --junitxml="$OUT/tests.xml" tests/test_cuda.py tests/test_cuda_errors.py tests/test_cuda_streams.py
grep -qE '[0-9]+ passed' "$OUT/tests.log" || { say 'tests      FAILED: none passed\n'; failed=1; }

bench=(--seconds 150 --json "$OUT/gpu.json")
if ((dry_run)); then bench+=(--dry-run --quick); fi
step benchmark 190 table.txt "$PYTHON" -m bench.gpu "${bench[@]}"

check=("$PYTHON" tests/cuda_sanitize.py)
sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2> /dev/null)
if ((dry_run)); then
  step memcheck 60 memcheck.log "${check[@]}"
  step racecheck 60 racecheck.log "${check[@]}" --every 3
elif [[ -z $sanitizer ]]; then
  say '%-10s skipped: compute-sanitizer is not installed\n' memcheck racecheck
else
  run=("$sanitizer" --error-exitcode 9 --print-limit 20 --tool)
  # Without torch's cache every tensor is an allocation, so that a step past its end is seen.
  step memcheck 90 memcheck.log env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${run[@]}" memcheck "${check[@]}"
  step racecheck 90 racecheck.log "${run[@]}" racecheck "${check[@]}" --every 3
fi

printf '\n'
cat "$summary"
printf '\nwhat only a GPU can tell (docs/cuda.md):\n'
"$PYTHON" -m bench.ticks "$OUT" | tee "$OUT/ticks.txt"
printf 'results in %s after %ss\n' "$OUT" "$SECONDS"
exit "$failed"
