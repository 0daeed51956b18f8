#!/usr/bin/env bash
# Sets up what the tests need, then runs ruff, mypy, import-linter and pytest.
# Arguments go to pytest: ./tests/run.sh tests/data -k isf
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh test

ruff check .
ruff format --check .
mypy
lint-imports
# Two workers: one runs the tests that start processes, the other all the rest.
exec python -m pytest -n 2 --dist loadgroup "$@"
