"""What all tests share."""

import os
import shutil
import sys
from pathlib import Path

from hypothesis import settings

from omnibal.processes import remove_dead_locks

# The first call of a compiled function takes long, and so may any on a busy machine.
settings.register_profile("omnibal", deadline=None)
settings.load_profile("omnibal")

# Processes load DeepSpeed's extension under a lock. One that a test kills meanwhile leaves it, and all that come after
# wait for ever. So each environment and worker keeps the extension for itself, and each test begins without dead locks.
EXTENSIONS = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")))
if "PYTEST_XDIST_WORKER" in os.environ:
    own = EXTENSIONS / os.environ["PYTEST_XDIST_WORKER"]
    for built in EXTENSIONS.glob("deepspeed_*"):
        if not (own / built.name).exists():  # with its times, or ninja builds it again
            shutil.copytree(built, own / built.name)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(own)


def pytest_runtest_setup():
    remove_dead_locks()


def pytest_collection_modifyitems(items):
    """Let files that start processes run first: they take longest, and both workers then end together."""
    starting = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in starting)
