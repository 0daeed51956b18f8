#!/usr/bin/env bash
# Measures on two CPU processes: ./tools/partition/run.sh reality.py reality.json --slice balanced
set -euo pipefail
cd "$(dirname "$0")/../.."
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
exec python -m deepspeed.launcher.runner --num_gpus 2 --log_level warning --module "tools.partition.${1%.py}" "${@:2}"
