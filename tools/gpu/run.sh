#!/usr/bin/env bash
# Runs the tests marked gpu and measures, in under ten minutes; what was found lies in one folder, also where parts fail.
#
#   tools/gpu/run.sh [--wheels FOLDER] [--out FOLDER] [--minutes 7]
#
# It needs a CUDA device and a python3 with torch 2.11 or newer, and no network: packages that are missing come from a
# folder of wheels that tools/gpu/wheels.sh made. Nothing is installed into the machine's own environment.
set -uo pipefail
cd "$(dirname "$0")/../.."

wheels="" out="runs/gpu" minutes=7
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels) wheels=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --minutes) minutes=$2; shift 2 ;;
        *) sed -n '2,7s/^# \?//p' "$0"; exit 2 ;;
    esac
done
mkdir -p "$out"
python=${OMNIBAL_PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -n "$wheels" ]; then
    packages=$(mktemp -d)
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$wheels"/*.whl || exit 1
    export PYTHONPATH=$packages:$PYTHONPATH
fi

echo "== tests"
timeout 150 "$python" -m pytest -q -m gpu -p no:cacheprovider tests 2>&1 | tee "$out/tests.log"
tests=${PIPESTATUS[0]}
echo "== measurements"
"$python" -m tools.gpu.measure --out "$out" --minutes "$minutes" 2>&1 | tee "$out/measure.log"
measured=${PIPESTATUS[0]}
echo "tests ended with $tests, measurements with $measured; all lies in $out"
[ "$tests" -eq 0 ] && [ "$measured" -eq 0 ]
