"""What the processes of test_agreement.py run; each function returns plain data."""

import logging
import os
import shutil
import signal
from pathlib import Path
from time import sleep

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from omnibal import ranks
from omnibal.errors import DataError, OmnibalError
from omnibal.integrations.lengths import kept_lengths
from omnibal.ranks import (
    Meeting,
    any_rank,
    check_shared,
    gather,
    rank_zero_first,
    rank_zero_only,
    run_on_all_ranks,
)
from omnibal.ranks.failures import HEARD, SAID, _own_store, watch


def work_of_all_kinds(folder):
    """What each kind of common work gives or says on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "LATEST_SIGHT_SECONDS", 0)
        patch.setattr(ranks, "SILENT_SECONDS", 0)
        return _work_of_all_kinds(dist.get_rank(), Path(folder))


def _work_of_all_kinds(rank, folder):
    return {
        "gathered": gather({"rank": rank}),
        "one fails": _said(lambda: run_on_all_ranks(lambda: _fail_on(1), where=f"rank {rank}")),
        "rank 0 fails first": _said(lambda: rank_zero_first(lambda: _fail_on(0), doing="fails", where=f"rank {rank}")),
        "another fails later": _said(lambda: rank_zero_first(lambda: _fail_on(2), doing="fails", where=f"rank {rank}")),
        "rank 0 alone fails": _said(lambda: rank_zero_only(lambda: _fail_on(0), doing="fails", where=f"rank {rank}")),
        "only rank 0 works": _said(lambda: rank_zero_only(lambda: _fail_on(1), doing="works", where=f"rank {rank}")),
        "shared": _said(lambda: check_shared(folder / "shared", name="run.output", where=f"rank {rank}")),
        "each its own": _said(lambda: check_shared(folder / str(rank), name="run.output", where=f"rank {rank}")),
        "not a folder": _said(lambda: check_shared(Path(os.devnull) / "x", name="run.output", where=f"rank {rank}")),
        "extremes": Meeting().extremes((7, rank == 1), (5 - rank,)),
        "left": sorted(path.name for path in folder.rglob("*")),
        **lengths_that_ranks_keep(folder / "kept"),
        "said": long_work_of_rank_zero(),
    }


def lengths_that_ranks_keep(folder):
    """How many samples all ranks measure where a folder is missing, whole, half written, or damaged on rank 1."""
    rank, counted = dist.get_rank(), {}

    class Collator:
        def measure(self, _, numbers):
            self.read = getattr(self, "read", 0) + len(numbers)
            return [(0, 10 + number, 5) for number in numbers]

    def count(case, path):
        collator = Collator()
        lengths, _ = kept_lengths(collator, range(6), path, saves=rank == 0, num_workers=0)
        assert lengths.llm_tokens.tolist() == [10, 11, 12, 13, 14, 15]
        whole = sum(gather(collator.read))  # each rank reads all six to check lengths that it has found
        counted[case] = whole - 6 * dist.get_world_size() if whole > 6 else whole

    count("nothing", folder)
    count("kept", folder)
    rank_zero_only((folder / "lengths.json").unlink, doing="removes the summary")
    count("without a summary", folder)
    own = folder.parent / f"own-{rank}"  # as on hosts without a common file system
    shutil.copytree(folder, own)
    if rank == 1:
        (own / "lengths.json").write_text('{"format":')
    count("damaged on rank 1", own)
    return {
        "measured anew": counted,
        "cannot be kept": _said(
            lambda: kept_lengths(Collator(), range(6), Path(os.devnull) / "x", saves=rank == 0, num_workers=0)
        ),
    }


def long_work_of_rank_zero():
    """What is said while rank 0 works, which it does until rank 1 has said something: so nobody is in a collective."""
    said, store, where = [], _get_default_store(), f"rank {dist.get_rank()}"
    handler = logging.Handler()
    handler.emit = lambda record: (said.append(record.getMessage()), store.set("said", record.getMessage()))
    logging.getLogger(ranks.__name__).addHandler(handler)
    rank_zero_only(lambda: store.wait(["said"]), doing="measures the samples", where=where)
    logging.getLogger(ranks.__name__).removeHandler(handler)
    return said


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise DataError("line 5 must be JSON, got nothing")


def _said(work):
    try:
        work()
    except OmnibalError as error:
        return f"{type(error).__name__}: {error}"
    return None


def exchange_with_a_lost_rank(kind, killed):
    """Exchange once, and again behind the end of a rank."""
    watch()
    for turn in range(2):
        if turn and dist.get_rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "any_rank":
            any_rank(False, torch.device("cpu"))
        else:
            rank_zero_only(lambda: None, doing="works")


def fail_after_another():
    """This rank hears that rank 7 has failed, and fails before it is ended."""
    heard, store = watch(), _own_store()
    store.set(SAID, "rank 7 failed: it is gone")
    while not store.add(HEARD, 0):
        sleep(0.05)
    heard.tell(OmnibalError("rank 7 is gone"))
    raise OmnibalError("rank 7 is gone")
