"""What processes run to test trials."""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from omnibal import trials
from omnibal.engine.engine import OmnibalEngine


def run_trials(config, folder):
    """A trial that runs, and one whose first step ends as an accelerator's allocator ends it; what the first wrote."""
    file, output = Path(folder) / f"config.{dist.get_rank()}.json", Path(folder) / "out.json"
    file.write_text(json.dumps(config))

    def train_batch(engine):
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {2 + engine.stage_id}.00 GiB. GPU 0 has a total capacity of 79.15 "
            "GiB of which 1.50 GiB is free."
        )

    options = {"--deepspeed_config": file, "--output": output}
    with patch.object(sys, "argv", ["trial", *(str(word) for option in options.items() for word in option)]):
        trials.main()
        with patch.object(OmnibalEngine, "train_batch", train_batch):
            try:
                trials.main()
            except torch.OutOfMemoryError:
                return json.loads(output.read_text()) if dist.get_rank() == 0 else None
    raise AssertionError("a trial that runs out of memory must fail")
