"""DeepSpeed's C++ extensions: a start that waits for one to be compiled says so."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

from torch.utils.cpp_extension import _get_build_directory

PATIENCE_SECONDS = 10.0
"""How long a start may take before it is explained."""


@contextmanager
def explained_wait(seconds: float = PATIENCE_SECONDS) -> Iterator[Timer]:
    """Say on standard error what is waited for, if it takes long and an extension is the reason.

    The first process of each node speaks. torch lets one process compile and all others wait for the file ``lock`` to
    go away, for ever and without a word; a process that is killed while it compiles leaves that file behind.
    """
    timer = Timer(seconds, _explain)
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def _explain() -> None:
    for lock in Path(_get_build_directory("", verbose=False)).glob("*/lock"):
        name = lock.parent.name
        spared = '; with "torch_adam": true among the optimizer\'s params it is not needed' if "adam" in name else ""
        print(
            f"Waiting for DeepSpeed's extension {name} to be compiled, which happens once and takes minutes{spared}. "
            f"If no process compiles it, one was killed meanwhile: delete {lock}",
            file=sys.stderr,
            flush=True,
        )
