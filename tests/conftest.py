import os

from hypothesis import settings

# The first call of a compiled function takes long, and so may any on a busy machine.
settings.register_profile("omnibal", deadline=None)
settings.load_profile("omnibal")

# A process that a test kills while it loads DeepSpeed's extension leaves a lock there, for which others wait for ever.
if {"PYTEST_XDIST_WORKER", "TORCH_EXTENSIONS_DIR"} <= os.environ.keys():
    os.environ["TORCH_EXTENSIONS_DIR"] += "/" + os.environ["PYTEST_XDIST_WORKER"]
