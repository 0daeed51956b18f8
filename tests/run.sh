#!/usr/bin/env bash
# Sets up what the tests need, then runs ruff, mypy, import-linter and pytest.
# Arguments go to pytest: ./tests/run.sh tests/data -k isf
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh test

python -m tests.warm_up > /dev/null &  # on the core that the checks leave
warming=$!
ruff check .
ruff format --check .
mypy
lint-imports
wait $warming
# Two workers; those of a file share what they start. Files stay in tests/conftest.py's order: the longest first.
# A worker that dies ends the run: pytest-xdist 3.8 gives its finished files out again and then waits for them for ever.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"
