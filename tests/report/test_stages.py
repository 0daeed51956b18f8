from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest

from omnibal.cluster import Layout, Links
from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.plan import Plan
from omnibal.report.stages import memory_table, plot_memory, stage_cells, step_figures
from omnibal.report.style import SERIES, VERMILION, make_table
from tests.pipeline.profiles import layer, profile
from tests.report.printed import rows_of, text_of


def table_of_stages(stages):
    return make_table(*stage_cells(stages), words=2)


@pytest.fixture
def model():
    layers = [layer(f"vision_block.{i}", kind="vision_block", module="vision", output=4) for i in range(3)]
    layers += [layer(f"decoder_block.{i}", kind="decoder_block", output=4, optimizer_seconds=2) for i in range(2)]
    return profile(layers)


def plan_of(boundaries, recompute, micro_batches=1):
    layout = Layout(len(boundaries) - 1, precision="float32")
    return Plan(PackLimits(1, 7), micro_batches, Partition(boundaries), recompute, layout=layout)


def figures_of(model, partition, micro_batches=2, **options):
    loads = [Load([1] * micro_batches, [1] * micro_batches)]
    step = simulate_step(model, Partition(partition), loads, Links(8), **options)
    plan = plan_of(partition, ("full", "full", "none", "none", "none"), micro_batches)
    return step_figures(model, plan, step, loads[0][0]), step


def test_figures_of_stages(model):
    figures, step = figures_of(model, (0, 2, 5))
    first, second = figures["stages"]
    assert (first["first_layer"], first["last_layer"]) == ("vision_block.0", "vision_block.1")
    assert (second["vision_layers"], second["language_layers"]) == (1, 2)
    assert (first["forward_seconds"], first["backward_seconds"]) == (2, 4)
    # two activations and two gradients of 4 bytes at 8 bytes a second
    assert first["transfer_seconds"] == second["transfer_seconds"] == pytest.approx(2)
    assert first["idle_seconds"] == pytest.approx(figures["pipeline_seconds"] - 12)
    assert first["idle_ratio"] == pytest.approx(1 - 12 / figures["pipeline_seconds"])
    assert [stage["in_flight"] for stage in figures["stages"]] == [2, 1]
    assert second["optimizer_seconds"] == 4
    assert figures["step_seconds"] == pytest.approx(figures["pipeline_seconds"] + 4) == step.step_seconds


def test_no_transfer_costs_stage_time_where_they_overlap(model):
    figures, _ = figures_of(model, (0, 2, 5), mode="overlap")
    assert [stage["transfer_seconds"] for stage in figures["stages"]] == [0, 0]


def test_figures_are_of_the_slowest_replica():
    costs = replace(layer("a"), forward_seconds=CostModel(llm_tokens=1))
    model = profile([costs, replace(costs, name="b")])
    plan = plan_of((0, 1, 2), ("none", "none"))
    step = simulate_step(model, plan.partition, [Load(0, [1]), Load(0, [7]), Load(0, [3])], Links(1))
    assert step.slowest_replica == 1
    assert [stage["forward_seconds"] for stage in step_figures(model, plan, step, Load(0, 7))["stages"]] == [7, 7]


def test_the_table_has_a_row_per_stage(model):
    figures, _ = figures_of(model, (0, 1, 3, 5))
    assert [row[:4] for row in rows_of(table_of_stages(figures["stages"]))] == [
        ["0", "vision_block.0", "1+0", "1"],
        ["1", "vision_block.1", "2+0", "1"],
        ["2", "decoder_block.0", "0+2", "0"],
    ]
    wide = figures["stages"][0] | {"first_layer": "decoder_block.103", "vision_layers": 48, "language_layers": 80}
    assert len(rows_of(table_of_stages([wide] * 2), 80)) == 2


GIB = 2**30
MEMORY = [StageMemory(GIB, 2 * GIB, 3 * GIB, 4 * GIB, 0, 5 * GIB, 6 * GIB, 7 * GIB, 2 * GIB) for _ in range(2)]
WAITING = replace(MEMORY[1], pending=8 * GIB)


def test_memory_term_by_term():
    rows = rows_of(memory_table(MEMORY, (60 * GIB, 40 * GIB)))
    terms = ["1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "7.0", "2.0", "30.0"]
    assert rows == [["0", *terms, "50.0%"], ["1", *terms, "75.0%"]]
    rows = rows_of(memory_table([MEMORY[0], WAITING], (60 * GIB, 40 * GIB)))
    assert [row[5] for row in rows] == ["0.0", "8.0"]


def test_the_table_fits_a_terminal_of_80_columns():
    table = memory_table([MEMORY[0], WAITING], (60 * GIB, 40 * GIB))
    assert "…" not in text_of(table)
    assert len(rows_of(table, 80)) == 2


def test_the_picture_shows_every_term_and_the_budget(tmp_path):
    plot_memory(
        {"all recomputed": MEMORY, "plan": [MEMORY[0], WAITING]}, (60 * GIB, 40 * GIB), tmp_path / "new" / "memory.png"
    )
    image = matplotlib.image.imread(tmp_path / "new" / "memory.png")[..., :3]
    for colour in (*SERIES[:5], SERIES[6], SERIES[7], SERIES[8], SERIES[9], VERMILION):
        rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image - rgb).max(axis=-1) < 0.01).mean() > 1e-4, colour
