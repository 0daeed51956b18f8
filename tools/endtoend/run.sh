#!/usr/bin/env bash
# Trains on two CPU processes in every way in turn: ./tools/endtoend/run.sh --stages 2 --out runs/endtoend.json
set -euo pipefail
cd "$(dirname "$0")/../.."
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
# Memory that was freed stays with the process, as with PyTorch's allocator on a GPU: C's gives it back, page by page.
export MALLOC_TRIM_THRESHOLD_=$((1 << 32)) MALLOC_MMAP_THRESHOLD_=$((1 << 25))
exec python -m deepspeed.launcher.runner --num_gpus 2 --log_level warning --module tools.endtoend.train "$@"
