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

if [[ ! -f setup.py ]]; then
  echo "bench/gpu.sh belongs to a checkout: there is no setup.py in $PWD"
  exit 2
fi

TOTAL=470 # seconds for all steps
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/bench/results/gpu}
dry_run=0
case "${1-}" in
  "") ;;
  --dry-run) dry_run=1 ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
summary=$OUT/summary.txt
failed=0

say() { printf '%s\n' "$*" | tee -a "$summary"; }

# step NAME SECONDS LOG COMMAND...: the command, its output in LOG, for so long at most, and no longer than what is left.
step() {
  local name=$1 limit=$2 log=$OUT/$3 start=$SECONDS left=$((TOTAL - SECONDS)) status
  shift 3
  if ((limit > left)); then limit=$left; fi
  if ((left < 5)); then
    say "$(printf '%-10s left out: no time left' "$name")"
    failed=1
    return 1
  fi
  printf '\n=== %s (%ss, at most %ss more)\n' "$name" "$SECONDS" "$limit"
  timeout --kill-after=5 "$limit" "$@" > "$log" 2>&1
  status=$?
  # Enough to read and never too much to keep.
  if (($(stat -c %s "$log") > 4000000)); then
    tail -c 4000000 "$log" > "$log.tail" && mv "$log.tail" "$log"
  fi
  tail -n 12 "$log" | cut -c 1-180
  case $status in
    0) say "$(printf '%-10s ok, %ss' "$name" $((SECONDS - start)))" ;;
    124 | 137) say "$(printf '%-10s out of time after %ss' "$name" $((SECONDS - start)))" ;;
    *) say "$(printf '%-10s FAILED (%s), %ss: see %s' "$name" "$status" $((SECONDS - start)) "$(basename "$log")")" ;;
  esac
  if ((status != 0)); then failed=1; fi
  return "$status"
}

skip() { say "$(printf '%-10s skipped: %s' "$1" "$2")"; }

# ---- what is here ----------------------------------------------------------------------------------------------------

if ((dry_run)); then
  export POSENC_TEST_DEVICE=cpu POSENC_NO_CUDA=1
  arch=none
else
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d ' ')
  if [[ ! $arch =~ ^[0-9]+\.[0-9]+$ ]]; then
    arch=$("$PYTHON" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())' 2> /dev/null | tail -n 1)
  fi
  if [[ ! $arch =~ ^[0-9]+\.[0-9]+$ ]]; then
    echo "no GPU found, neither by nvidia-smi nor by torch (--dry-run tries this script on the CPU)"
    exit 2
  fi
  export POSENC_FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST=$arch
  unset POSENC_TEST_DEVICE POSENC_NO_CUDA # nothing else may stand in for the GPU
  for home in "${CUDA_HOME:-}" /usr/local/cuda; do
    if ! command -v nvcc > /dev/null && [[ -n $home && -x $home/bin/nvcc ]]; then export PATH=$home/bin:$PATH; fi
  done
fi
mkdir -p "$OUT" || exit 2
: > "$summary"
{
  echo "architecture $arch, commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null
  nvcc --version 2> /dev/null | tail -n 2
  "$PYTHON" - << 'END'
import importlib.metadata, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
names = ("torch", "triton", "numpy", "setuptools", "ninja", "pybind11", "pytest", "hypothesis", "mpmath", "rich")
print("python", platform.python_version() + ",", ", ".join(f"{name} {version(name)}" for name in names))
END
  echo
} 2>&1 | tee -a "$summary"

# ---- the steps -------------------------------------------------------------------------------------------------------

# In a folder of its own: objects of a build for other architectures stay as they are.
step build 150 build.log "$PYTHON" setup.py build_ext --inplace --build-temp build/gpu

step tests 200 tests.log "$PYTHON" -m pytest -m cuda -p no:cacheprovider -o faulthandler_timeout=60 --tb=short \
  --durations=8 -rs tests/test_cuda.py tests/test_cuda_errors.py tests/test_cuda_streams.py
if [[ -f $OUT/tests.log ]] && ! grep -qE '[0-9]+ passed' "$OUT/tests.log"; then
  say "tests      FAILED: none passed"
  failed=1
fi

bench=(--seconds 150 --json "$OUT/gpu.json")
if ((dry_run)); then bench+=(--dry-run --quick); fi
if [[ -f csrc/cuda/sass_budget.json ]]; then bench+=(--sass csrc/cuda/sass_budget.json); fi
run_bench() { "$PYTHON" -m bench.gpu "$@" > "$OUT/table.txt" && cat "$OUT/table.txt"; }
export -f run_bench
export OUT PYTHON
step benchmark 190 bench.log bash -c 'run_bench "$@"' bench "${bench[@]}"

sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2> /dev/null)
if ((dry_run)); then
  step memcheck 60 memcheck.log "$PYTHON" tests/cuda_sanitize.py
  step racecheck 60 racecheck.log "$PYTHON" tests/cuda_sanitize.py --every 3
elif [[ -z $sanitizer ]]; then
  skip memcheck "compute-sanitizer is not installed"
  skip racecheck "compute-sanitizer is not installed"
else
  # Without torch's cache every tensor is an allocation, so that a step past its end is seen.
  step memcheck 90 memcheck.log env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool memcheck \
    --error-exitcode 9 --print-limit 20 "$PYTHON" tests/cuda_sanitize.py
  step racecheck 90 racecheck.log "$sanitizer" --tool racecheck --error-exitcode 9 --print-limit 20 \
    "$PYTHON" tests/cuda_sanitize.py --every 3
fi

printf '\n'
cat "$summary"
printf 'results in %s after %ss\n' "$OUT" "$SECONDS"
exit "$failed"
