#!/bin/bash
# For a machine with one NVIDIA GPU and ten minutes: several ranks share the GPU where NCCL allows it (2.30 and newer), else one sends to
# itself. Prints one table, row by row, and keeps the logs in $OUT (default: build/gpu). Needs `make native .venv/.test` and, in the same
# environment, jaxcoll[cuda12] or [cuda13]; $PYTHON names another interpreter.  --standin PATH tries the script itself without a GPU;
# other arguments: one_gpu.py --help
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
[ -n "${PYTHON:-}" ] || { [ -x .venv/bin/python ] && PYTHON=.venv/bin/python || PYTHON=python3; }
mkdir -p "$OUT"
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-4} NCCL_DEBUG=${NCCL_DEBUG:-WARN} PYTHONUNBUFFERED=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false
LIMIT_S=${LIMIT_S:-570}
if ! "$PYTHON" -c 'import cffi, jax, ml_dtypes, numpy' 2>"$OUT/errors.log"; then
  tail -n 1 "$OUT/errors.log" >&2
  echo "$PYTHON lacks what the tests need: make native .venv/.test, or name another interpreter by PYTHON=" >&2
  exit 1
fi
command -v nvidia-smi >/dev/null && nvidia-smi >"$OUT/nvidia-smi.log" 2>&1
{
  command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  timeout "$LIMIT_S" "$PYTHON" tests/gpu/one_gpu.py "$@" 2>"$OUT/errors.log"
} | tee "$OUT/run.log"
rc=${PIPESTATUS[0]}
[ "$rc" -eq 0 ] || tail -n 40 "$OUT/errors.log" >&2
[ "$rc" -ne 124 ] || echo "cut off after $LIMIT_S s (LIMIT_S); the rows above are whole" >&2
exit "$rc"
