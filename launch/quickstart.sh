#!/usr/bin/env bash
# From nothing to a trained vision-language model: installs omnibal into .venv, makes a small data set of pictures and
# questions, trains a small InternVL through a two-stage pipeline, and asks it about pictures it has not seen.
# It begins anew each time; ./launch/quickstart.sh --resume goes on where a run was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh train

run=runs/quickstart
if [ ! -f "$run/data/model/config.json" ]; then  # the last thing that it writes
    rm -rf "$run/data"
    omnibal demo "$run/data" --samples 6000
fi

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
    export DS_ACCELERATOR=cpu
    processes=2
else
    processes=$((gpus < 2 ? 1 : 2))
fi
deepspeed --log_level warning --num_gpus "$processes" launch/train.py --deepspeed_config ds_configs/quickstart.json "${@:---restart}"

omnibal ask ds_configs/quickstart.json --count 6
