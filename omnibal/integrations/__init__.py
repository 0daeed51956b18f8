"""Drop-ins: balanced packs for training loops that exist already."""

import os

if "LOCAL_RANK" in os.environ:  # a process of a launch; on a CPU, TrainingArguments already load an extension
    from omnibal.processes import remove_dead_locks

    remove_dead_locks()
