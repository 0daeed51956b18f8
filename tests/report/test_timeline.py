from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from PIL import Image

from omnibal.pipeline.schedule import one_f_one_b
from omnibal.pipeline.simulate import simulate
from omnibal.report.stages import COLOURS, TRANSFER, plot_timeline
from omnibal.report.style import short
from tests.pipeline.oracles import schedule_of

UNUSED = Path("unused.png")


def simulation(num_stages=2, micro_batches=3, **options):
    shape = (micro_batches, num_stages)
    return simulate(one_f_one_b(num_stages, micro_batches), np.ones(shape), 2 * np.ones(shape), **options)


@pytest.fixture
def figures(monkeypatch):
    """Figures that were drawn, instead of written."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **options: drawn.append(figure))
    return drawn


def test_a_picture_is_written(tmp_path):
    plot_timeline({"": simulation()}, tmp_path / "new" / "timeline.png")
    with Image.open(tmp_path / "new" / "timeline.png") as picture:
        assert picture.format == "PNG"
        assert np.asarray(picture).std() > 0


def test_every_instruction_is_a_bar_in_its_stages_row(figures):
    simulated = simulation(transfer_seconds=0.5 * np.ones((3, 1)))
    plot_timeline({"": simulated}, UNUSED)
    (axes,) = figures[0].axes
    bars = [path.get_extents() for c in axes.collections if isinstance(c, PolyCollection) for path in c.get_paths()]
    drawn = sorted((round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in bars)
    expected = sorted((event.stage, event.start_seconds, event.end_seconds) for event in simulated.events)
    np.testing.assert_allclose(drawn, expected)


def test_idle_time_and_bubble_are_written_beside_the_bars(figures):
    simulated = simulation()
    plot_timeline({"uniform": simulated}, UNUSED)
    (axes,) = figures[0].axes
    # (3 + 1) micro-batches of 3 s; each stage computes 9 s of them
    assert axes.get_title(loc="left") == "uniform: 12 seconds, bubble ratio 25.0%"
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("idle 3 (25%)") == 2
    assert sorted(text for text in texts if text.isdecimal()) == sorted("001122" * 2)


def test_panels_share_the_time_axis(figures):
    plot_timeline({"short": simulation(micro_batches=1), "long": simulation(num_stages=3, micro_batches=5)}, UNUSED)
    short_one, long_one = figures[0].axes
    assert short_one.get_xlim() == long_one.get_xlim() == (0, 21)
    assert [label.get_text() for label in long_one.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]
    assert long_one.get_ylim()[0] > long_one.get_ylim()[1]  # stage 0 above the others


def test_the_legend_names_what_occurs(figures):
    def legend(simulated):
        plot_timeline({"": simulated}, UNUSED)
        return [text.get_text() for text in figures[-1].legends[0].get_texts()]

    split = schedule_of("F0 F1 B0 W0 B1 W1\nF0 B0 F1 B1 W0 W1")
    ones = np.ones((2, 2))
    assert legend(simulation(mode="overlap")) == ["forward", "backward"]
    assert legend(simulation(transfer_seconds=np.ones((3, 1)))) == ["forward", "backward", "transfer"]
    assert legend(simulation(transfer_seconds=np.full((3, 1), 1e-4))) == ["forward", "backward"]  # too short to see
    assert legend(simulate(split, ones, ones, ones, mode="overlap")) == [
        "forward", "backward to inputs", "backward to weights",
    ]  # fmt: skip


def test_a_large_pipeline_is_few_collections(figures):
    plot_timeline({"": simulation(num_stages=16, micro_batches=64, mode="overlap")}, UNUSED)
    assert len([c for c in figures[0].axes[0].collections if isinstance(c, PolyCollection)]) == 16 * 2


def test_numbers_are_short():
    assert [short(value) for value in (0, 0.5, 99.94, 1234.6, 1e6)] == ["0", "0.5", "99.9", "1,235", "1,000,000"]


def test_kinds_of_work_are_told_apart_by_colour():
    assert len({colour for _, colour in (*COLOURS.values(), TRANSFER)}) == len(COLOURS) + 1
