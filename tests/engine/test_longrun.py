"""A run of some hundred steps holds at its end what it held early on."""

import pytest

from tools.longrun.rank import LAYOUTS
from tools.longrun.run import measure

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_grows(layout, tmp_path):
    grown = measure(layout, 160, tmp_path)
    # Caches still fill up in so short a run: what a step computes with is larger by far.
    most = {"threads": 0, "handles": 0, "children": 0, "objects": 5, "bytes": 150_000}
    assert {name: slope for name, slope in grown.slopes.items() if slope > most.get(name, slope)} == {}
    assert grown.epochs > 2
