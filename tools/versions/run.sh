#!/usr/bin/env bash
# Runs the tests at the oldest and at the newest versions of what omnibal needs, each in an environment of its own.
#
#   tools/versions/run.sh [--wheels FOLDER] [--environments FOLDER] [--sets "oldest newest"] [PYTEST ARGUMENT ...]
#
# A set is the constraints file of its name beside this script. Packages come from a folder of wheels, or from the index
# where none is named. Environments go to a temporary folder, or stay in the one that is named and are used again.
# OMNIBAL_PYTHON chooses the interpreter (default: python3).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."

wheels=() environments="" sets="oldest newest"
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels) wheels=(--no-index --find-links "$2"); shift 2 ;;
        --environments) environments=$2; shift 2 ;;
        --sets) sets=$2; shift 2 ;;
        -h | --help) sed -n '2,8s/^# \?//p' "$0"; exit 2 ;;
        *) break ;;
    esac
done
if [ -z "$environments" ]; then
    environments=$(mktemp -d)
    trap 'rm -rf "$environments"' EXIT
fi
python=${OMNIBAL_PYTHON:-python3}
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

rows="" failed=0
for set in $sets; do
    venv=$environments/$set
    echo "== $set"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || exit 1
    # DeepSpeed is built without its operators: on a CPU they are compiled when first used.
    if ! DS_BUILD_OPS=0 "$venv/bin/python" -m pip --quiet --quiet install --disable-pip-version-check "${wheels[@]}" \
        --constraint "$here/$set.txt" --editable '.[test]'; then
        rows+="$set|not installed|||"$'\n' failed=1
        continue
    fi
    log=$environments/$set.log
    PATH=$venv/bin:$PATH TORCH_EXTENSIONS_DIR=$venv/torch_extensions \
        "$venv/bin/python" -m pytest -rfE -p no:cacheprovider "$@" 2>&1 | tee "$log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
    count() { grep -oE "[0-9]+ $1" "$log" | tail -1 | cut -d' ' -f1; }
    names=$(sed -nE 's/^(FAILED|ERROR) ([^ ]+).*/\2/p' "$log" | tr '\n' ' ')
    rows+="$set|$(count passed)|$(count failed)|$(count 'errors?')|$names"$'\n'
done
printf 'set|passed|failed|errors|which\n%s' "$rows" | sed 's/||/|0|/g; s/||/|0|/g' | column -t -s '|'
exit $failed
