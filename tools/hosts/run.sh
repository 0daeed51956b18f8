#!/usr/bin/env bash
# Trains under hosts that pin other versions than ours, each in an environment of its own: minutes, and some gigabytes.
#
#   tools/hosts/run.sh [FOLDER]
#
# Environments and runs go to a temporary folder, or stay in the one that is named and are used again. Run it where
# omnibal[test] is installed. LLaMA-Factory loads torchaudio, whose newest is 2.11 and refuses another torch.
set -euo pipefail
cd "$(dirname "$0")/../.."

folder=${1:-}
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

# environment PACKAGE ...: makes it where it is missing, with what omnibal itself needs
environment() {
    local venv=$folder/$1
    shift
    [ -x "$venv/bin/python" ] && return
    "${OMNIBAL_PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet "$@" numba scipy pydantic typer rich tqdm
}

environment swift ms-swift==4.6.0 transformers==5.19.0 trl==0.29.1 torch==2.13.0 accelerate
environment factory llamafactory==0.9.5 transformers==5.6.0 torch==2.11.0 torchvision==0.26.0 torchaudio==2.11.0
python tools/hosts/model.py "$folder"
python tools/hosts/images.py "$folder"

# 96 samples: without the plugin, an epoch of batches of one would have 48 steps.
cd "$folder"
OMNIBAL_LIMITS=1,300 swift/bin/swift sft --model model --model_type qwen2 --template chatml --dataset data.jsonl \
    --external_plugins "$PYTHONPATH/omnibal/integrations/plugins/ms_swift.py" --strict true --tuner_type full \
    --num_train_epochs 2 --gradient_accumulation_steps 2 --per_device_train_batch_size 1 --torch_dtype float32 \
    --use_cpu true --dataloader_num_workers 0 --logging_steps 1 --save_strategy steps --save_steps 5 \
    --output_dir run --add_version false
# 81 samples, 24 of them with a clip, 11 with neither picture nor clip.
OMNIBAL_LIMITS=400,400 factory/bin/python -m omnibal.integrations.plugins.llama_factory \
    "$PYTHONPATH/tools/hosts/llama_factory.yaml"
python - <<'PYTHON'
import json

swift = [json.loads(line) for line in open("run/logging.jsonl")]
last = [step for step in swift if "global_step/max_steps" in step][-1]["global_step/max_steps"]
done, planned = map(int, last.split("/"))
assert done == planned < 96, last
print(f"ms-swift: {done} steps of packs in two epochs, where batches of one sample take 96")
done = json.load(open("factory_run/trainer_state.json"))["global_step"]
assert done < 81, done
print(f"LLaMA-Factory: {done} steps of packs in two epochs, where batches of one sample take 81")
PYTHON
