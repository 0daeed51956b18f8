import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
from tqdm import tqdm

from omnibal.formats import measured as module
from omnibal.formats.measured import survey
from omnibal.formats.rows import Problem


def measure(items):
    """Loads of an item are its number and its square; every seventh is broken."""
    return [Problem(Path("file"), n, "seventh") if n % 7 == 0 else (n, n * n) for n in items.tolist()]


@pytest.mark.parametrize("processes", [1, 3])
def test_items_stay_in_order(monkeypatch, processes):
    monkeypatch.setattr(module, "ITEMS_WORTH_A_PROCESS", 10)
    monkeypatch.setattr(module, "CHUNK_ITEMS", 4)
    items = np.arange(1, 101)
    found = survey(measure, items, 2, processes=processes)
    assert found.loads[found.usable].tolist() == [[n, n * n] for n in range(1, 101) if n % 7]
    assert found.usable.tolist() == [n % 7 != 0 for n in range(1, 101)]
    assert [problem.line for problem in found.problems] == list(range(7, 101, 7))


def test_a_killed_process_ends_the_pass(monkeypatch):
    monkeypatch.setattr(module, "ITEMS_WORTH_A_PROCESS", 10)
    with pytest.raises(BrokenProcessPool):
        survey(lambda items: os.kill(os.getpid(), signal.SIGKILL), np.arange(20), 2, processes=2)


def test_workers_are_forked_before_a_bar_starts_its_thread(monkeypatch):
    happened = []

    class Executor(ProcessPoolExecutor):
        def map(self, *arguments):
            happened.append("workers")
            return super().map(*arguments)

    monkeypatch.setattr(module, "ProcessPoolExecutor", Executor)
    monkeypatch.setattr(module, "tqdm", lambda **options: happened.append("bar") or tqdm(disable=True))
    assert survey(measure, np.arange(1, 5), 2, workers=1).loads[:, 0].tolist() == [1, 2, 3, 4]
    assert happened == ["workers", "bar"]
