import math

import pytest

from omnibal.cluster import Links
from omnibal.errors import ConfigError


def test_replicas_talk_as_fast_as_stages_unless_said_otherwise():
    assert Links(10.0).between_replicas == 10.0
    assert Links(10.0, reduce_bandwidth_bytes_per_second=3.0).between_replicas == 3.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bandwidth_bytes_per_second": 0}, "bandwidth_bytes_per_second must be at least 1 byte per second, got 0"),
        ({"bandwidth_bytes_per_second": -1}, "must be at least 1 byte per second, got -1"),
        ({"bandwidth_bytes_per_second": 1e-291}, "must be at least 1 byte per second, got 1e-291"),
        ({"bandwidth_bytes_per_second": math.nan}, "must be at least 1 byte per second, got nan"),
        ({"reduce_bandwidth_bytes_per_second": 0}, "reduce_bandwidth_bytes_per_second must be at least 1 byte"),
        ({"latency_seconds": -1}, "latency_seconds must lie between 0 and 3600, got -1"),
        ({"latency_seconds": 3601}, "latency_seconds must lie between 0 and 3600, got 3601"),
        ({"latency_seconds": math.nan}, "latency_seconds must lie between 0 and 3600, got nan"),
    ],
)
def test_links_without_end_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Links(**{"bandwidth_bytes_per_second": 1.0} | given)
