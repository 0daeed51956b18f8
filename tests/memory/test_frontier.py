from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.memory.recompute import NOT_OFFERED, extend, start, sweep
from tests.memory.oracles import peak_bytes

OPTION = st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 60))
"""Bytes kept, time, transient bytes."""
LAYERS = st.lists(st.lists(OPTION, min_size=3, max_size=3), min_size=1, max_size=5)
HELD, FLOOR = st.integers(1, 4), st.integers(0, 40)


def arrays(layers):
    table = np.array(layers)
    return [np.ascontiguousarray(table[..., column]) for column in range(3)]


def choices(layers, held, floor):
    """Bytes kept, time and peak of every choice."""
    kept, time, transient = arrays(layers)
    for columns in product(range(3), repeat=len(layers)):
        rows = range(len(layers)), columns
        peak = peak_bytes(kept, transient, columns, held=held, least_transient=floor)
        yield int(kept[rows].sum()), int(time[rows].sum()), peak


def frontier_of(layers, held, floor, most):
    kept, time, transient = arrays(layers)
    frontier = start(floor)
    for layer in reversed(range(len(layers))):
        frontier = extend(frontier, kept[layer], time[layer], transient[layer], held, most)
    return frontier


@settings(deadline=None, max_examples=50)  # the first call compiles
@given(LAYERS, HELD, FLOOR, st.integers(0, 700))
def test_the_frontier_holds_the_best_of_all_choices_for_every_room(layers, held, floor, most):
    frontier = frontier_of(layers, held, floor, most)
    assert (np.diff(frontier.time) >= 0).all()
    every = list(choices(layers, held, floor))
    assert set(zip(frontier.kept.tolist(), frontier.time.tolist(), frontier.peak.tolist(), strict=True)) <= set(every)
    for room in range(0, most + 1, 23):
        expected = min((time for _, time, peak in every if peak <= room), default=None)
        fitting = frontier.time[frontier.peak <= room]
        assert (int(fitting[0]) if len(fitting) else None) == expected


def test_each_point_says_where_it_comes_from():
    behind = extend(start(0), np.array([5, 1]), np.array([0, 4]), np.zeros(2, dtype=int), 1, 100)
    frontier = extend(behind, np.array([10, 2]), np.array([0, 3]), np.zeros(2, dtype=int), 1, 100)
    assert frontier.kept.tolist() == [15, 7, 3] and frontier.time.tolist() == [0, 3, 7]
    assert frontier.origin.tolist() == [0, 0, 1] and frontier.level.tolist() == [0, 1, 1]


def test_a_level_that_is_not_offered_is_never_taken():
    frontier = extend(start(0), np.array([NOT_OFFERED, 3]), np.array([0, 1]), np.array([NOT_OFFERED, 0]), 2, 2**62)
    assert frontier.kept.tolist() == [3] and frontier.level.tolist() == [1]


def test_layers_that_are_alike_make_few_points():
    frontier = start(0)
    for _ in range(200):
        options = np.array([1003, 59]), np.array([0, 213]), np.array([300, 1244])
        frontier = extend(frontier, *options, 3, 10**9)
    assert len(frontier.kept) < 2 * 201


@settings(deadline=None)
@given(LAYERS, HELD, FLOOR, st.lists(st.integers(-1, 400), min_size=5, max_size=5))
def test_a_sweep_is_right_for_every_start(layers, held, floor, rooms):
    room = np.array(rooms[: len(layers)])
    best, least = sweep(*arrays(layers), held, floor, room)
    for first in range(len(layers)):
        every = list(choices(layers[first:], held, floor))
        assert best[first] == min((time for _, time, peak in every if peak <= room[first]), default=-1)
        within = min(peak for _, _, peak in every)
        assert least[first] == (within if within <= room[: first + 1].max() else NOT_OFFERED)
