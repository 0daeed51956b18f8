"""Kills a random process of a run at a random moment, again and again, and lets the run go on each time.

    python -m tools.faults.crash pipeline tensor units spread drop-in --kills 20 --seed 1

Each layout trains a small model on CPU processes, once without a kill and then until enough kills have hit. Weights
behind the last step, and the samples of each step of each rank, must be those of the run without a kill, bit by bit.
"""

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from omnibal.engine.checkpoint import UNFINISHED, has_all_files, newest_first
from tests.engine.launch import _Group
from tests.engine.small import save_small_model
from tools.bench import machine, print_table
from tools.faults.runs import MET

PROCESSES = {"pipeline": 2, "tensor": 2, "units": 3, "spread": 2, "drop-in": 2}
MOST_KILLS = 3  # of a run, before it is left to come to its end
MOST_SECONDS = 240  # until a run has ended, or those that were not killed have


class Outcome:
    """What kills did to a layout."""

    def __init__(self) -> None:
        self.kills, self.runs, self.slowest_end = 0, 0, 0.0


def _function(layout: str) -> str:
    return "tools.faults.drop_in:run" if layout == "drop-in" else "tools.faults.runs:run"


def whole_run(layout: str, model: str, folder: Path) -> tuple[float, float]:
    """Run without a kill; seconds in all, and until the first step."""
    folder.mkdir()
    group = _Group(PROCESSES[layout], "cpu")
    started = time.monotonic()
    try:
        first = group.run(_function(layout), (layout, model, str(folder)), 300, ends=True)
    finally:
        group.end()
    return time.monotonic() - started, max(first)


def killed_run(layout: str, model: str, folder: Path, rank: int, after: float) -> tuple[bool, float, float]:
    """Start or resume a run, kill one rank after a time; whether it was hit, how long others stayed, all seconds."""
    folder.mkdir(exist_ok=True)
    (folder / MET).unlink(missing_ok=True)
    group = _Group(PROCESSES[layout], "cpu")
    victim = group.processes[rank]
    killed_at = 0.0
    started = time.monotonic()

    def due() -> bool:
        nonlocal killed_at
        if not killed_at and time.monotonic() - started >= after and victim.is_running():
            victim.kill()
            killed_at = time.monotonic()
        return bool(killed_at)

    try:
        results = group.start(_function(layout), (layout, model, str(folder)), ends=True)
        while not all(path.exists() for path in results):
            # Before ranks have met none can notice that another one ends: there a launcher ends the others, and here
            # ``group.end`` below.
            if due() and (not (folder / MET).exists() or not psutil.wait_procs(group.processes, 0.05)[1]):
                break
            has_ended = not killed_at and not any(process.is_running() for process in group.processes)
            if has_ended and all(path.exists() for path in results):
                break
            if has_ended or time.monotonic() - (killed_at or started) > MOST_SECONDS:
                said = "\n".join(group._output(each) for each in range(len(group.processes)))
                raise AssertionError(f"processes end without a kill, or stay behind one of rank {rank}:\n{said}")
            time.sleep(0.02)
        ended = time.monotonic()
        return bool(killed_at), ended - killed_at if killed_at else 0.0, ended - started
    finally:
        group.end()


def check_left(layout: str, folder: Path) -> None:
    """Whatever was killed when, what is called a checkpoint is one."""
    if layout != "drop-in":
        checkpoints = folder / "run" / "checkpoints"
        for path in newest_first(checkpoints):
            assert has_all_files(path) is None, has_all_files(path)
        named = {path.name for path in checkpoints.glob("*/") if not path.name.endswith(UNFINISHED)}
        assert named == {path.name for path in newest_first(checkpoints)}, named


def check_equal(layout: str, folder: Path, whole: Path) -> None:
    """Weights and samples are those of the run without a kill."""
    for rank in range(PROCESSES[layout]):
        weights, expected = (torch.load(each / f"final{rank}.pt") for each in (folder, whole))
        assert weights.keys() == expected.keys() != set()
        differing = [name for name, weight in weights.items() if not torch.equal(weight, expected[name])]
        assert not differing, f"{layout}, rank {rank}: other weights {differing[:3]}"
        lines = (each / f"samples{rank}.jsonl" for each in (whole, folder))
        steps, again = ([json.loads(line) for line in file.read_text().splitlines()] for file in lines)
        assert {step for step, _ in again} <= {step for step, _ in steps}
        # A step whose checkpoint a kill prevented is trained again, on the same samples; a line may be lost in a kill.
        assert all(dict((step, packs) for step, packs in steps)[step] == packs for step, packs in again)


def crash(layout: str, kills: int, seed: int) -> Outcome:
    """Kill so often, and compare each run that came to its end."""
    rng, outcome = random.Random(f"{layout} {seed}"), Outcome()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_small_model(place / "model", dropout=0.1)
        model = str(place / "model")
        seconds, first = whole_run(layout, model, place / "whole")
        while outcome.kills < kills:
            outcome.runs += 1
            folder = place / "killed"
            begin = 0.3 * min(first, seconds)
            moments = [rng.uniform(begin, 1.05 * seconds) for _ in range(rng.randint(1, MOST_KILLS))]
            for after in [*moments[: kills - outcome.kills], math.inf]:  # the last one is left alone
                is_hit, stayed, taken = killed_run(layout, model, folder, rng.randrange(PROCESSES[layout]), after)
                outcome.kills += is_hit
                outcome.slowest_end = max(outcome.slowest_end, stayed)
                check_left(layout, folder)
                if not is_hit:
                    seconds = min(seconds, taken)  # the first run may have compiled what others found
                    break
            check_equal(layout, folder, place / "whole")
            shutil.rmtree(folder)
    return outcome


def main() -> None:
    """Print a table with a row for each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="+", choices=PROCESSES)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{machine('torch', 'deepspeed', 'transformers')}; seed {arguments.seed}\n")

    def rows() -> Iterator[tuple[object, ...]]:
        for layout in arguments.layouts:
            found = crash(layout, arguments.kills, arguments.seed)
            yield layout, PROCESSES[layout], found.kills, found.runs, f"{found.slowest_end:.1f}", "equal"

    names = ("layout", "processes", "kills", "runs to the end", "s until the others ended", "weights and samples")
    print_table(names, rows())


if __name__ == "__main__":
    main()
