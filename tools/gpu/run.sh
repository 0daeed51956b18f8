#!/usr/bin/env bash
# Measures on a GPU, part by part. Results are on disk as they come, also where a part fails or its time is up.
#
#   tools/gpu/run.sh [PART ...] [--wheels FOLDER] [--out FOLDER] [--minutes 7.5] [--small]
#
# Parts: cluster ladder profile ranks layers tests (by default all, in this order); --minutes is the time of each.
# It needs a CUDA device and a python3 with torch 2.11 or newer, and no network: packages that are missing come from a
# folder of wheels that tools/gpu/wheels.sh made. Nothing is installed into the machine's own environment. --small tries
# every part on a CPU, with tiny models: figures then mean nothing.
set -uo pipefail
cd "$(dirname "$0")/../.."

wheels="" out="runs/gpu" minutes=7.5 small=() parts=()
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels) wheels=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --minutes) minutes=$2; shift 2 ;;
        --small) small=(--small); shift ;;
        cluster | ladder | profile | ranks | layers | tests) parts+=("$1"); shift ;;
        *) sed -n '2,9s/^# \?//p' "$0"; exit 2 ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=(cluster ladder profile ranks layers tests)
mkdir -p "$out"
python=${OMNIBAL_PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
if [ -n "$wheels" ]; then
    packages=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$wheels"/*.whl || exit 1
    export PYTHONPATH=$packages:$PYTHONPATH
fi

failed=()
limit=$(awk "BEGIN { print int(60 * $minutes) + 30 }")  # for a part that cannot end by itself
for part in "${parts[@]}"; do
    timeout --kill-after=15 "$limit" "$python" -m tools.gpu.measure "$part" --out "$out" --minutes "$minutes" \
        ${small[@]+"${small[@]}"} 2>&1 | tee "$out/$part.log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$part")
done
"$python" -m tools.gpu.report "$out"
echo "all lies in $out; parts with failures: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
