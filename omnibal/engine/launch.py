"""What starts the processes of a launch, and what must stand in their environment before torch is imported."""

import os
import socket
import sys
from pathlib import Path

LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning")
ERROR_MARKS = ("Error:", "OutOfMemory")


def free_port() -> int:
    """A port that a launch can take for its processes to meet: launches side by side must not share one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def reason_of(output: str) -> str:
    """The line of a failed launch that says most: its last error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if any(mark in line for mark in ERROR_MARKS) and "ChildFailedError" not in line]
    return (errors or lines or ["the launcher gave no output"])[-1]


def let_segments_grow() -> None:
    """Keep a GPU's memory in one piece, though packs differ in size from step to step; before torch is imported.

    What the user says about torch's allocator stays.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which torch reads too
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def keep_extensions_apart() -> None:
    """Let this process and those that it starts keep compiled extensions within their virtual environment.

    By default all environments of a user share a folder, and compile for each other whenever their torch or DeepSpeed
    differ. What the user says in ``TORCH_EXTENSIONS_DIR`` stays; outside virtual environments nothing changes.
    """
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
