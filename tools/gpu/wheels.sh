#!/usr/bin/env bash
# Puts the packages that a machine without network lacks into a folder of wheels, for tools/gpu/run.sh --wheels.
#
#   tools/gpu/wheels.sh FOLDER [PACKAGE ...]
#
# Without names: DeepSpeed, built here without its operators, transformers as the tests run with, and what these and
# omnibal need beside torch and what comes with it. OMNIBAL_GPU_PYTHON is the other machine's Python (default 3.12).
set -euo pipefail
folder=${1:?"say which folder to fill"}
shift
mkdir -p "$folder"
version=${OMNIBAL_GPU_PYTHON:-3.12}
python=${OMNIBAL_PYTHON:-python3}
constraints=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt

DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --no-build-isolation --no-binary deepspeed \
    --constraint "$constraints" --wheel-dir "$folder" deepspeed
packages=("$@")
[ ${#packages[@]} -gt 0 ] || packages=(hjson pydantic typing-inspection annotated-types soundfile cffi pycparser transformers)
platforms=()
for glibc in 28 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --constraint "$constraints" --dest "$folder" "${packages[@]}"
# Pydantic works with one version of its core only.
for wheel in "$folder"/pydantic-*.whl; do
    [ -e "$wheel" ] || continue
    core=$(unzip -p "$wheel" '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core==\([^ ;]*\).*/\1/p')
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
        "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$folder" "pydantic-core==$core"
done
du -sh "$folder"
