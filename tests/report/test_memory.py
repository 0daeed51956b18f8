from dataclasses import replace

import matplotlib.image
import numpy as np

from omnibal.memory.footprint import StageMemory
from omnibal.report.memory import memory_table, plot_memory, visible_terms
from omnibal.report.style import SERIES, VERMILION
from tests.report.printed import rows_of, text_of

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


def test_a_legend_names_what_is_visible():
    small = StageMemory(GIB, 0, 0, 40 * GIB, 0, 2**20, 0, 0, GIB)
    assert visible_terms([[small, small]], (50 * GIB, 60 * GIB)) == ["parameters", "activations", "overhead"]
    assert visible_terms([[small], [WAITING]], (10 * GIB,))[4:5] == ["pending"]
