"""What processes run to test trials of memory: engine after engine, all in one launch."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import initialize
from omnibal.trials import process as trial
from omnibal.trials.four_steps import take_four_steps
from omnibal.trials.run import Trial, within_budget
from tests.engine.cases import changed


def memory_trials(config, plan, modules, share, folder):
    """The paper's four steps, each trial with an engine.

    The budget lies at a share of the way from the peaks with all blocks recomputed to those with none.
    """
    path = Path(folder) / f"plan.{dist.get_rank()}.json"

    def run(tried):
        tried.save(path)
        engine, *_ = initialize(config=changed(config, "pipeline", plan=str(path)))
        seconds, peaks = trial.measure(engine, 1)
        return Trial(tried, tuple(seconds), peaks.step, peaks.passes)

    blocks = tuple("full" if module else "none" for module in modules)
    ends = [run(replace(plan, recompute=levels)).peak_bytes for levels in (blocks, ("none",) * len(modules))]
    budgets = tuple(int(least + share * (most - least)) for least, most in zip(*ends, strict=True))
    found = take_four_steps(plan, modules, (2, 1), budgets, lambda tried: within_budget(run(tried), budgets))
    return found, ends, budgets


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
