"""Measured trials: candidate plans, each run for a few steps on the user's hardware, in processes of its own.

deepspeed --module omnibal.trials --deepspeed_config config.json --output result.json

is such a trial: timed on rank 0, and written as JSON.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from omnibal.errors import ENGINE_MODULES, require
from omnibal.plan import Plan
from omnibal.processes import LAUNCHER, free_port, let_segments_grow, reason_of

require(*ENGINE_MODULES)

if TYPE_CHECKING:
    from omnibal.engine.engine import OmnibalEngine


STEPS: Final = 3  # steps that are timed (Yao et al., OmniBal, ICML 2025: 3 per candidate)


@dataclass(frozen=True)
class Trial:
    """The measurements of one plan, or why it failed."""

    plan: Plan
    step_seconds: tuple[float, ...] = ()  # one per timed step, after a step to warm up; empty where the trial failed
    peak_bytes: tuple[int, ...] = ()  # most that a device of each stage held; empty where the trial ended before
    error: str | None = None
    missing_bytes: tuple[int, ...] = ()  # per stage; empty where the trial did not run out of memory
    # ``missing_bytes`` of the trial that failed before and whose plan was eased into this one; empty for a first trial.
    retreat_bytes: tuple[int, ...] = ()

    @property
    def median_seconds(self) -> float:
        return median(self.step_seconds) if self.step_seconds else float("inf")


def run_trials(
    config: dict[str, Any], plan: Plan, budget_bytes: Sequence[int], retreat: Callable[[Trial], Plan | None]
) -> Iterator[Trial]:
    """Train a few steps under a plan with DeepSpeed's real engine and launcher, or under one that fits in its place.

    ``config`` is the content of a ds_config with model and data; the plan's micro-batches replace the ds_config's. A
    stage that held more than ``budget_bytes`` counts as out of memory: a CPU has no other bound. ``retreat`` gives the
    plan to try in place of one that ran out, or None.
    """
    # Every trial is a launch of its own, so that one that runs out of memory or crashes is a result and not the end.
    candidate: Plan | None = plan
    missing: tuple[int, ...] = ()
    while candidate is not None:
        trial = replace(within_budget(_run_trial(config, candidate), budget_bytes), retreat_bytes=missing)
        yield trial
        candidate, missing = retreat(trial) if any(trial.missing_bytes) else None, trial.missing_bytes


def within_budget(trial: Trial, budget_bytes: Sequence[int]) -> Trial:
    """The trial, failed if a stage held more than its budget; without budgets or peaks it stays as it is."""
    missing = tuple(max(peak - budget, 0) for peak, budget in zip(trial.peak_bytes, budget_bytes, strict=False))
    if not any(missing):
        return trial
    return replace(trial, step_seconds=(), error=_out_of_memory(missing), missing_bytes=missing)


def _out_of_memory(missing_bytes: Sequence[int]) -> str:
    stages = (f"stage {stage} by {size} bytes" for stage, size in enumerate(missing_bytes) if size)
    return f"out of memory: {', '.join(stages)}"


def _run_trial(config: dict[str, Any], plan: Plan) -> Trial:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        section = config["omnibal"]
        of_plan = {"num_stages": plan.num_stages, "num_tensor": plan.layout.num_tensor}
        pipeline = section.get("pipeline", {}) | {"plan": str(folder / "plan.json"), **of_plan}
        batch = {"gradient_accumulation_steps": plan.micro_batches, "train_batch_size": "auto"}
        (folder / "config.json").write_text(json.dumps(config | batch | {"omnibal": section | {"pipeline": pipeline}}))
        launch = ["--master_port", free_port(), "--num_gpus", plan.layout.num_devices, "--module", "omnibal.trials"]
        options = ["--deepspeed_config", folder / "config.json", "--output", folder / "out.json"]
        command = [*LAUNCHER, *map(str, (*launch, *options))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        missing = read_missing(folder, plan.num_stages)
        if any(missing):
            return Trial(plan, error=_out_of_memory(missing), missing_bytes=missing)
        if done.returncode != 0 or not (folder / "out.json").exists():
            return Trial(plan, error=reason_of(done.stdout + done.stderr))
        result = json.loads((folder / "out.json").read_text())
        return Trial(plan, tuple(result["step_seconds"]), tuple(result["peak_bytes"]))


def missing_bytes(message: str) -> int:
    """What torch's allocator says is missing: what was asked for beyond what was free; 1 where it does not say.

    >>> missing_bytes("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    ...               "which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.65 GiB in use.")
    536870912
    """
    size, units = r"([\d.]+) (bytes|KiB|MiB|GiB)", {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    found = (re.search(pattern, message) for pattern in (f"Tried to allocate {size}", f"of which {size} is free"))
    asked, free = (int(float(each[1]) * units[each[2]]) if each else 0 for each in found)
    return max(asked - free, 1)


def write_missing(folder: Path, stage: int, rank: int, message: str) -> None:
    (folder / f"missing.{stage}.{rank}").write_text(str(missing_bytes(message)))


def read_missing(folder: Path, num_stages: int) -> tuple[int, ...]:
    """The bytes that each stage was short of, the most of its ranks; zeros where it was not."""
    return tuple(
        max((int(path.read_text()) for path in folder.glob(f"missing.{stage}.*")), default=0)
        for stage in range(num_stages)
    )


def main() -> None:
    """Time the steps that follow one to warm up, from barrier to barrier, and measure the memory of one more."""
    let_segments_grow()
    import torch

    from omnibal.engine.initialize import initialize

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    arguments = parser.parse_args()
    engine, *_ = initialize(config=arguments.deepspeed_config)
    try:
        seconds, peak_bytes = _measure(engine)
    except torch.OutOfMemoryError as error:
        write_missing(arguments.output.parent, engine.stage_id, engine.global_rank, str(error))
        raise
    if engine.global_rank == 0:
        arguments.output.write_text(json.dumps({"step_seconds": seconds, "peak_bytes": peak_bytes}))


def _measure(engine: "OmnibalEngine") -> tuple[list[float], tuple[int, ...]]:
    """Seconds of some steps, and the most bytes that a device of each stage held in another one."""
    import torch.distributed as dist

    engine.train_batch()
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        started = perf_counter()
        engine.train_batch().item()
        dist.barrier()
        seconds.append(perf_counter() - started)
    return seconds, engine.measured_batch()[1].step


if __name__ == "__main__":
    main()
