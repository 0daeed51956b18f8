"""What ranks do together fails on all of them, and nobody sits in a collective while rank 0 works."""

import subprocess
import sys

import pytest

from omnibal import ranks
from omnibal.errors import ConfigError, DataError, OmnibalError
from omnibal.ranks import (
    Host,
    check_addresses,
    gather,
    new_gloo_group,
    rank_zero_first,
    rank_zero_only,
    run_on_all_ranks,
    unreachable,
)
from tests.engine.launch import how_all_end, launch

BROKEN = "line 5 must be JSON, got nothing"


@pytest.mark.distributed
def test_work_together(tmp_path):
    by_rank = launch(3, "tests.ranks.waiting:work_of_all_kinds", str(tmp_path))
    assert [result.pop("said") for result in by_rank] == [
        [],
        ["All ranks wait for rank 0, which measures the samples"],
        [],
    ]
    for result in by_rank:
        message = "ConfigError: run.output must be a folder that all hosts share, got "
        assert result.pop("each its own").startswith(message)
    first = by_rank[0]
    assert by_rank == [first] * 3
    assert first["extremes"] == ([7, 0, 3, 2], [7, 1, 4, 1])
    assert first["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert first["one fails"] == f"DataError: rank 1: {BROKEN}"
    assert first["rank 0 fails first"] == first["rank 0 alone fails"] == f"DataError: rank 0: {BROKEN}"
    assert first["another fails later"] == f"DataError: rank 2: {BROKEN}"
    assert first["only rank 0 works"] is None
    assert first["shared"] is None
    assert first["not a folder"].startswith(
        "ConfigError: rank 0: /dev/null/x must be a folder that can be written, got "
    )
    assert first["left"] == ["0", "shared"]
    assert first["measured anew"] == {"nothing": 6, "kept": 0, "without a summary": 6, "damaged on rank 1": 6}
    assert first["cannot be kept"].startswith("DataError: rank 0: ")
    assert "must be a folder that lengths can be written to, got " in first["cannot be kept"]


HOSTS = [Host("node1", "10.0.0.1"), Host("node1", "10.0.0.1"), Host("node2", "10.0.0.2"), Host("node3", "10.0.0.3")]


def test_work_before_processes_meet_counts_no_turn(monkeypatch):
    monkeypatch.setattr(ranks, "_turns", iter(()))
    assert rank_zero_first(lambda: 4, doing="works") == rank_zero_only(lambda: 4, doing="works") == 4


def test_a_process_alone_agrees_with_itself():
    assert gather(3) == [3]
    assert rank_zero_first(lambda: 4, doing="works") == 4
    assert new_gloo_group() is None
    with pytest.raises(DataError, match=f"^rank 0: {BROKEN}$") as raised:
        gather(DataError(BROKEN))
    assert str(raised.value.__cause__) == BROKEN
    with pytest.raises(OmnibalError, match=r"^rank 5, stage 1: ValueError: invalid literal .*$"):
        run_on_all_ranks(lambda: int("x"), where="rank 5, stage 1")


def test_a_host_whose_name_leads_to_itself_is_refused():
    check_addresses(HOSTS)
    check_addresses([Host("laptop", "127.0.1.1")] * 4)
    with pytest.raises(
        ConfigError,
        match=r"rank 2: the name of host node2 must lead to an address that node1 can .*"
        r"got 127\.0\.1\.1; set GLOO_SOCKET_IFNAME",
    ):
        check_addresses([*HOSTS[:2], Host("node2", "127.0.1.1"), HOSTS[3]])


def test_a_host_that_cannot_be_reached_is_named():
    reason = "Gloo connectFullMesh failed with timed out connecting: Connection refused, remote=[10.0.0.3]:48016"
    assert unreachable(0, range(4), HOSTS, reason) == (
        f"rank 0: host node1 must reach the processes on node3, got {reason}; "
        "set GLOO_SOCKET_IFNAME on every host to the network interface that leads to the others"
    )
    assert "host node1 must reach the processes on node2, got " in unreachable(
        1, [1, 2], HOSTS, "Connect timeout [none]"
    )


GONE = "rank 0, which keeps the store by which the ranks met, has ended: its last lines say why"
THERE = "ranks 0 and 2 were there last, rank 1 does not answer: its last lines say why"


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "killed", "named"), [("any_rank", 1, THERE), ("rank_zero_only", 0, GONE)])
def test_a_rank_that_is_killed_is_named_in_one_line_whatever_the_exchange(kind, killed, named):
    logs = how_all_end(3, "tests.ranks.waiting:exchange_with_a_lost_rank", kind, killed, timeout_seconds=60)
    del logs[killed]
    for log in logs:
        (line,) = (line for line in log.splitlines() if line.startswith("omnibal: rank "))
        assert "all ranks must take part, got " in line
        assert named in line
        assert "Exception raised from" not in line


@pytest.mark.distributed
def test_a_rank_that_hears_of_a_failure_and_then_fails_says_why_once():
    (log,) = how_all_end(1, "tests.ranks.waiting:fail_after_another", timeout_seconds=60)
    said = [line for line in log.splitlines() if line.startswith("omnibal: rank ")]
    assert said == ["omnibal: rank 0 ends, for rank 7 failed: it is gone"]


ENDS_WHILE_WATCHED = """
import torch, torch.distributed as dist
from time import sleep
from omnibal.ranks import failures
class InNative:  # nearly always within C++, where Python would end the thread
    def check(self, keys):
        torch.randn(1_000_000).sort()
        return False
failures.LOOK_SECONDS, failures.RANKS_A_SECOND, failures._own_store = 0, 1e9, InNative
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
failures.watch()
sleep(0.3)
"""


@pytest.mark.distributed
def test_a_process_ends_in_peace_while_a_thread_looks_at_the_store():
    ended = subprocess.run([sys.executable, "-c", ENDS_WHILE_WATCHED], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
