"""Any method on a task: its micro-batches, what they weigh, and the figures of both."""

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.metrics import PackingFigures, measure_packing
from omnibal.data.packing_spec import Method
from omnibal.data.packs import Packs
from tools.sampling.rules import RULES, Task

PADDED = {
    "random_batches",
    "length_grouped",
    "device_grouped",
    "transformers_random",
    "transformers_group_by_length",
    "transformers_batch_rebalance",
}
"""Methods that pad a micro-batch to its longest sample."""
SAMPLES_TO_COMPILE = 2000


@dataclass(frozen=True)
class Planned:
    """Micro-batches in running order, and how long it took to plan them."""

    packs: Packs
    seconds: float
    encoded: npt.NDArray[np.int64] | None = None
    """Vision units of each micro-batch's rank where images were sent to other ranks."""


def plan_by_rule(name: str, task: Task) -> Planned:
    """Plan by one of our statements of a published rule."""
    return _timed(RULES[name], task)


def plan_ours(method: Method, task: Task) -> Planned:
    """Plan by omnibal."""

    def arrange(part: Task) -> Packs:
        epoch = arrange_epoch(part.lengths, part.limits, num_replicas=part.num_replicas, method=method, seed=part.seed)
        return epoch.packs

    return _timed(arrange, task)


def plan_by_peers(task: Task, python: Path, names: Sequence[str] = ()) -> dict[str, Planned]:
    """Plan by peers' packages, by all of them or those named, in a process of their environment."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(
            folder / "task.npz",
            llm_tokens=task.lengths.llm_tokens,
            vision_units=task.lengths.vision_units,
            num_replicas=task.num_replicas,
            batch_size=task.batch_size,
            most_tokens=task.limits.llm_tokens,
            seed=task.seed,
        )
        script = Path(__file__).with_name("peers.py")
        subprocess.run([python, script, folder / "task.npz", folder, *names], check=True, stderr=subprocess.DEVNULL)
        found = {path.stem: np.load(path) for path in sorted(folder.glob("*.npz")) if path.stem != "task"}
        return {
            name: Planned(Packs(file["samples"], file["starts"]), float(file["seconds"]), file.get("encoded"))
            for name, file in found.items()
        }


def figures_of(name: str, planned: Planned, task: Task) -> PackingFigures:
    """The figures of a plan, padding counted where the method pads."""
    steps = np.arange(len(planned.packs)).reshape(-1, task.num_replicas, 1)
    load = padded_load(task.lengths, planned.packs) if name in PADDED else None
    return measure_packing(name, task.lengths, task.limits, planned.packs, steps, seconds=planned.seconds, load=load)


def padded_load(lengths: SampleLengths, packs: Packs) -> Load:
    """What micro-batches bring to the device when all their samples are padded to the longest."""
    longest = np.maximum.reduceat(lengths.llm_tokens[packs.samples], packs.starts[:-1]).astype(np.int64)
    return Load(packs.vision_units(lengths), packs.sizes * longest, packs.sizes * longest**2)


def _timed(plan: Callable[[Task], Packs], task: Task) -> Planned:
    """Plan once a small part, so that what is compiled is compiled, and then everything by the clock."""
    first = task.lengths.take(np.arange(min(SAMPLES_TO_COMPILE, len(task.lengths))))
    plan(Task(first, task.limits, task.num_replicas, task.batch_size, task.seed))
    started = time.perf_counter()
    packs = plan(task)
    return Planned(packs, time.perf_counter() - started)
