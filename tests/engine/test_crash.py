"""Runs whose processes are killed at random moments end as the run that nobody killed."""

import pytest

from tools.faults.crash import PROCESSES, crash

pytestmark = pytest.mark.distributed


@pytest.mark.slow
@pytest.mark.parametrize("layout", PROCESSES)
def test_kills_change_nothing(layout):
    assert crash(layout, kills=20, seed=1).kills == 20


def test_a_kill_changes_nothing():
    assert crash("pipeline", kills=1, seed=3).kills == 1
