"""What the processes of test_distributed.py run; each function returns plain data."""

import logging
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from omnibal.engine import distributed
from omnibal.engine.distributed import check_shared, gather, rank_zero_first, rank_zero_only, run_on_all_ranks
from omnibal.engine.hosts import store
from omnibal.errors import DataError, OmnibalError


def work_of_all_kinds(folder):
    """What each kind of common work gives or says on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "LATEST_SIGHT_SECONDS", 0)
        patch.setattr(distributed, "SILENT_SECONDS", 0)
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
        "left": sorted(path.name for path in folder.rglob("*")),
        "said": long_work_of_rank_zero(),
    }


def long_work_of_rank_zero():
    """What is said while rank 0 works, which it does until rank 1 has said something: so nobody is in a collective."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: (said.append(record.getMessage()), store().set("said", record.getMessage()))
    logging.getLogger(distributed.__name__).addHandler(handler)
    rank_zero_only(lambda: store().wait(["said"]), doing="measures the samples", where=f"rank {dist.get_rank()}")
    logging.getLogger(distributed.__name__).removeHandler(handler)
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
