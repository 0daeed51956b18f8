"""Measured trials: candidate plans, each run for a few steps on the user's hardware."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from omnibal.engine.distributed import free_port
from omnibal.errors import ConfigError
from omnibal.plan import Plan

LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning")
ERROR_MARKS = ("Error:", "OutOfMemory")


@dataclass(frozen=True)
class Trial:
    """How one plan did.

    Attributes:
        plan: What was run.
        step_seconds: Of each timed step, behind one to warm up; empty where the trial failed.
        peak_bytes: Most memory that was allocated on a device of each stage; zeros where the device does not count.
        error: Why it failed; None where it did not.
    """

    plan: Plan
    step_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    error: str | None

    @property
    def median_seconds(self) -> float:
        """Of the timed steps; infinite where the trial failed."""
        return median(self.step_seconds) if self.step_seconds else float("inf")


def run_trials(
    config: dict[str, Any],
    plans: Sequence[Plan],
    *,
    launcher_options: Sequence[str] = (),
    steps: int = 3,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Train a few steps under each plan with DeepSpeed's real engine and launcher.

    Every trial is a launch of its own, so a plan that runs out of memory or crashes is a row of the result and not
    the end. All trials train on the same packs.

    Args:
        config: Content of a ds_config whose "omnibal" section names model and data.
        plans: Candidates.
        launcher_options: For the deepspeed launcher, such as ``["--num_gpus", "4"]``.
        steps: Timed steps of each trial.
        on_trial: Called with each result as it comes.

    Returns:
        The trials, fastest first, failed ones last. Source: Yao et al., OmniBal, ICML 2025 (3 steps per candidate).

    Raises:
        ConfigError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}")
    trials = []
    for plan in plans:
        trials.append(_run_trial(config, plan, launcher_options, steps))
        on_trial(trials[-1])
    return sorted(trials, key=lambda trial: trial.median_seconds)


def _run_trial(config: dict[str, Any], plan: Plan, launcher_options: Sequence[str], steps: int) -> Trial:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        section = config["omnibal"]
        pipeline = section.get("pipeline", {}) | {"plan": str(folder / "plan.json"), "num_stages": plan.num_stages}
        (folder / "config.json").write_text(json.dumps(config | {"omnibal": section | {"pipeline": pipeline}}))
        command = [*LAUNCHER, "--master_port", str(free_port()), *launcher_options, "--module", "omnibal.engine.trial"]
        options = ["--deepspeed_config", folder / "config.json", "--output", folder / "out.json", "--steps", steps]
        done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not (folder / "out.json").exists():
            return Trial(plan, (), (), reason_of(done.stdout + done.stderr))
        result = json.loads((folder / "out.json").read_text())
        return Trial(plan, tuple(result["step_seconds"]), tuple(result["peak_bytes"]), None)


def reason_of(output: str) -> str:
    """The line of a failed launch that says most: its last error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if any(mark in line for mark in ERROR_MARKS) and "ChildFailedError" not in line]
    return (errors or lines or ["the launcher gave no output"])[-1]
