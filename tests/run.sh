#!/usr/bin/env bash
# Sets up what the tests need, then runs ruff, mypy, import-linter and pytest.
# Arguments go to pytest: ./tests/run.sh tests/data -k isf
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh test

ruff check .
ruff format --check .
lint-imports
said=$(mktemp)
trap 'rm "$said"' EXIT
mypy > "$said" &  # takes a core for a minute or two: beside what leaves one idle
checking=$!
python -m tests.warm_up > /dev/null
# Two workers; those of a file share what they start. Files stay in tests/conftest.py's order: the longest first.
# A worker that dies ends the run: pytest-xdist 3.8 gives its finished files out again and then waits for them for ever.
failed=0
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@" || failed=$?
wait $checking || { cat "$said" >&2; failed=1; }  # else pytest's summary is the last line
exit $failed
