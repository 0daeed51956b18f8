"""What processes run to test trials that run out of memory."""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from omnibal.engine.engine import OmnibalEngine
from omnibal.trials import process as trial


def run_out_of_memory(config, folder):
    """A trial whose first step ends as an accelerator's allocator ends it."""
    file = Path(folder) / f"config.{dist.get_rank()}.json"
    file.write_text(json.dumps(config))

    def train_batch(engine):
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {2 + engine.stage_id}.00 GiB. GPU 0 has a total capacity of 79.15 "
            "GiB of which 1.50 GiB is free."
        )

    options = {"--deepspeed_config": file, "--output": file.parent / "out.json", "--steps": 1}
    arguments = ["trial", *(str(word) for option in options.items() for word in option)]
    with patch.object(OmnibalEngine, "train_batch", train_batch), patch.object(sys, "argv", arguments):
        try:
            trial.main()
        except torch.OutOfMemoryError:
            return
        raise AssertionError("a trial that runs out of memory must fail")
