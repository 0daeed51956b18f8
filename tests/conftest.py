"""What all tests share."""

import os
from pathlib import Path

from hypothesis import settings

# The first call of a compiled function takes long, and so may any on a busy machine.
settings.register_profile("omnibal", deadline=None)
settings.load_profile("omnibal")

# Processes load DeepSpeed's extension under a lock. One that a test kills meanwhile leaves it, and all that come after
# wait for ever. So each worker keeps the extension for itself, and each test begins without locks.
if {"PYTEST_XDIST_WORKER", "TORCH_EXTENSIONS_DIR"} <= os.environ.keys():
    os.environ["TORCH_EXTENSIONS_DIR"] += "/" + os.environ["PYTEST_XDIST_WORKER"]


def pytest_runtest_setup():
    if "PYTEST_XDIST_WORKER" in os.environ and "TORCH_EXTENSIONS_DIR" in os.environ:
        for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
            lock.unlink(missing_ok=True)
