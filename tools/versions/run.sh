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
        rows+="$set|not installed|-|-|-|-"$'\n' failed=1
        continue
    fi
    rm -f "$environments/$set.xml"
    PATH=$venv/bin:$PATH \
        "$venv/bin/python" -m pytest -p no:cacheprovider --junit-xml="$environments/$set.xml" "$@" || failed=1
    rows+="$set|$("$venv/bin/python" - "$environments/$set.xml" <<'PYTHON'
import sys
from xml.etree import ElementTree

suite = ElementTree.parse(sys.argv[1]).getroot().find("testsuite")
kinds = {kind: [case for case in suite if case.find(kind) is not None] for kind in ("skipped", "failure", "error")}
counts = [len(suite.findall("testcase")) - sum(map(len, kinds.values())), *map(len, kinds.values())]
wrong = [f"{case.get('classname')}.{case.get('name')}" for kind in ("failure", "error") for case in kinds[kind]]
print(*counts, " ".join(wrong) or "-", sep="|")
PYTHON
)"$'\n'
done
printf 'set|passed|skipped|failed|errors|which\n%s' "$rows" | column -t -s '|'
exit $failed
