#!/bin/bash
# For a machine with one NVIDIA GPU and ten minutes: several ranks share the GPU where NCCL allows it (2.30 and newer). Prints one table and
# keeps the log in $OUT (default: build/gpu). Needs `make native` and jaxcoll[cuda12] or [cuda13] in the environment of $PYTHON.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-4} NCCL_DEBUG=${NCCL_DEBUG:-WARN} PYTHONUNBUFFERED=1
"${PYTHON:-python3}" tests/gpu/one_gpu.py "$@" 2>&1 | tee "$OUT/run.log"
