#!/usr/bin/env bash
# Measures on two CPU processes: ./tools/memory/steps.sh --rounds 5
set -euo pipefail
cd "$(dirname "$0")/../.."
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
exec python -m deepspeed.launcher.runner --num_gpus 2 --log_level warning --module tools.memory.steps "$@"
