#!/usr/bin/env bash
# From nothing to a trained vision-language model: installs omnibal into .venv, makes a small data set of pictures and
# questions, measures a small InternVL and its data, plans how to train it in a pipeline and says what that gains, trains
# it that way, and asks it about pictures it has not seen.
# It begins anew each time; ./launch/quickstart.sh --resume goes on where a run was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh train

run=runs/quickstart
config=$run/ds_config.json
if [ ! -f "$run/data/model/config.json" ]; then  # the last thing that it writes
    rm -rf "$run/data"
    omnibal demo "$run/data" --samples 6000
fi

# Two processes: on GPUs of any kind, else on the CPU's cores.
read -r processes accelerator cluster < <(python - <<'PYTHON'
import json, os, torch

gpus = min(torch.cuda.device_count(), 2)
if gpus:
    device = {"name": torch.cuda.get_device_name(), "memory_bytes": torch.cuda.mem_get_info()[1]}
else:
    device = {"name": "cpu", "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4}
cluster = {"num_nodes": 1, "devices_per_node": gpus or 2, "device": device | {"link_bytes_per_second": 1e9}}
print(gpus or 2, "cuda" if gpus else "cpu", json.dumps(cluster | ({} if gpus else {"overhead_bytes": 0})))
PYTHON
)
[ "$accelerator" = cuda ] || export DS_ACCELERATOR=cpu

if [ "${1:-}" != --resume ] || [ ! -f "$config" ]; then
    cp ds_configs/quickstart.json "$config"
    omnibal plan "$config" --cluster "$cluster" --num-stages "$processes" --measure --write
fi
deepspeed --log_level warning --num_gpus "$processes" launch/train.py --deepspeed_config "$config" "${@:---restart}"

omnibal ask "$config" --count 6
