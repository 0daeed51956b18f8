"""What ranks do together fails on all of them, and nobody sits in a collective while rank 0 works."""

import pytest

from omnibal.engine.distributed import meet
from omnibal.engine.hosts import Host, check_addresses, unreachable
from omnibal.errors import ConfigError
from tests.engine.launch import launch

BROKEN = "line 5 must be JSON, got nothing"


@pytest.mark.distributed
def test_work_together(tmp_path):
    by_rank = launch(3, "tests.engine.waiting:work_of_all_kinds", str(tmp_path))
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


def test_a_process_without_a_launcher_is_told_of_it(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="processes must be started by a launcher, got no LOCAL_RANK"):
        meet("gloo")


HOSTS = [Host("node1", "10.0.0.1"), Host("node1", "10.0.0.1"), Host("node2", "10.0.0.2"), Host("node3", "10.0.0.3")]


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
