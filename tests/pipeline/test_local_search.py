import numpy as np

from omnibal.pipeline.local_search import descend, neighbours


def test_neighbours_move_one_boundary_far_or_several_in_a_row_by_one():
    moved = {tuple(row[1:-1]) for row in neighbours((0, 5, 8, 12), reach=2).tolist()}
    one = {(5 + d, 8) for d in (-2, -1, 1, 2)} | {(5, 8 + d) for d in (-2, -1, 1, 2)}
    assert moved == one | {(4, 7), (6, 9)}


def test_neighbours_leave_every_stage_a_layer():
    assert neighbours((0, 1, 2), reach=3).tolist() == []
    assert neighbours((0, 5), reach=3).tolist() == []


class Hills:
    """Distance to a target as seconds; counts what it evaluates."""

    def __init__(self, target):
        self.target, self.evaluated = np.array(target), []

    def evaluate(self, partitions):
        self.evaluated += [tuple(row) for row in partitions.tolist()]
        return np.abs(partitions - self.target).sum(axis=1).astype(float)

    def bound(self, partitions):
        return np.zeros(len(partitions))


def test_a_descent_reaches_the_bottom_and_evaluates_nothing_twice():
    hills = Hills((0, 20, 23, 40, 50))
    starts = [(0, 1, 2, 3, 50), (0, 30, 31, 32, 50)]
    known = dict(zip(starts, hills.evaluate(np.array(starts)).tolist(), strict=True))
    seconds = descend(starts, known, hills.evaluate, hills.bound)
    assert seconds[0, 20, 23, 40, 50] == 0
    assert len(hills.evaluated) == len(set(hills.evaluated)) == len(seconds)
    assert known.keys() <= seconds.keys()


def test_partitions_whose_bound_is_no_better_are_not_evaluated():
    hills = Hills((0, 9, 10))
    seconds = descend([(0, 5, 10)], {(0, 5, 10): 4.0}, hills.evaluate, lambda p: np.where(p[:, 1] > 6, 4.0, 0.0))
    assert set(seconds) == {(0, 2, 10), (0, 3, 10), (0, 4, 10), (0, 5, 10), (0, 6, 10)}
