#!/usr/bin/env bash
# From nothing to a trained vision-language model: installs omnibal into .venv, makes a small data set of pictures and
# questions, plans how to train a small InternVL on it, trains it that way, asks it about pictures that it has not seen,
# and measures what balanced packs gain. On GPUs where there are any, else on two processes of the CPU.
# It begins anew each time; ./launch/quickstart.sh --resume goes on where a run was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh train
exec python launch/quickstart.py "$@"
