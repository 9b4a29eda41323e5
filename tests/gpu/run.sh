#!/bin/bash
# For a machine with one NVIDIA GPU and ten minutes: several ranks share the GPU where NCCL allows it (2.30 and newer), else one sends to
# itself. Prints one table and keeps the logs in $OUT (default: build/gpu). Needs `make native` and jaxcoll[cuda12] or [cuda13] in the
# environment of $PYTHON.  --standin PATH tries the script itself without a GPU; other arguments: one_gpu.py --help
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-4} NCCL_DEBUG=${NCCL_DEBUG:-WARN} PYTHONUNBUFFERED=1
command -v nvidia-smi >/dev/null && nvidia-smi >"$OUT/nvidia-smi.log" 2>&1
timeout "${LIMIT_S:-570}" "${PYTHON:-python3}" tests/gpu/one_gpu.py "$@" 2>"$OUT/errors.log" | tee "$OUT/run.log"
rc=${PIPESTATUS[0]}
[ "$rc" -eq 0 ] || tail -n 40 "$OUT/errors.log" >&2
exit "$rc"
