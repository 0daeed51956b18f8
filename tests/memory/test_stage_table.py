import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.cluster import Layout
from omnibal.cost import Load
from omnibal.memory.footprint import Footprint
from omnibal.memory.recompute import recompute_seconds
from omnibal.memory.stage_table import StageTable
from tests.memory.models import generator, random_model, random_schedule
from tests.memory.oracles import fastest_levels, least_total

LOADS = Load([3, 5], [100, 200])


def stage_places(num_layers, num_stages):
    """Every (stage, layers) that leaves the other stages a layer."""
    for stage in range(num_stages):
        for a in range(stage, num_layers) if stage else [0]:
            last = num_layers - num_stages + stage + 1
            for b in range(a + 1, last + 1) if stage < num_stages - 1 else [num_layers]:
                if b > a:
                    yield stage, range(a, b)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_every_entry_is_that_of_its_stage_alone(seed):
    rng = generator(seed)
    profile = random_model(rng, max_blocks=3)
    num_stages = int(rng.integers(1, 4))
    schedule = random_schedule(rng, num_stages)
    footprint = Footprint(profile, LOADS[1], schedule, Layout(num_stages), target_share=0.1)
    budgets = rng.integers(200, 1500, num_stages).tolist()
    seconds = [recompute_seconds(profile, LOADS, stage) for stage in range(num_stages)]
    table = StageTable(footprint, budgets)
    least, missing = table.least_seconds(seconds), table.missing_bytes()
    seen = np.zeros(least.shape, dtype=bool)
    for stage, layers in stage_places(len(profile.layers), num_stages):
        entry = (stage, layers.start, layers.stop)
        seen[entry] = True
        best = fastest_levels(footprint, stage, layers, seconds[stage], budgets[stage])
        assert least[entry] == pytest.approx(best, abs=1e-9)
        assert missing[entry] == least_total(footprint, stage, layers) - budgets[stage]
    assert np.isinf(least[~seen]).all() and (missing[~seen] > 10**15).all()
