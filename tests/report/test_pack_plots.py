import matplotlib.image
import numpy as np
import pytest

from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.synthetic import patch_lengths, tiled_lengths
from omnibal.report.packing import Arranged, plot_rank_loads


def arranged_of(lengths, limits, **options):
    epoch = arrange_epoch(lengths, limits, method="isf", **options)
    return Arranged(epoch.packs.load(lengths), epoch.steps)


def ink(path):
    """Share of pixels that are not white: what is drawn."""
    image = matplotlib.image.imread(path)[..., :3]
    return float((image.min(axis=-1) < 0.98).mean())


def test_micro_batches_that_run_at_the_same_time_share_a_row():
    arranged = Arranged(Load(np.arange(8), np.arange(8)), np.arange(8).reshape(2, 2, 2))
    assert arranged.by_rank(arranged.load.vision_units).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    ("lengths", "limits"),
    [
        (tiled_lengths(500, seed=1), PackLimits(16, 4096)),
        (patch_lengths(200, seed=1), PackLimits(20_000, 8192)),
        (tiled_lengths(50, seed=1, text_share=1.0), PackLimits(0, 4096)),
        (SampleLengths([3], [50]), PackLimits(2, 40)),
        (SampleLengths([0, 0], [0, 0]), PackLimits(0, 1)),
    ],
)
def test_plots_are_drawn_of_any_lengths(tmp_path, lengths, limits):
    arranged = {"one": arranged_of(lengths, limits, num_replicas=2, micro_batches=2)}
    plot_rank_loads(arranged, tmp_path / "loads.png")
    assert ink(tmp_path / "loads.png") > 0.01


def test_more_methods_make_a_wider_picture(tmp_path):
    lengths, limits = tiled_lengths(300, seed=2), PackLimits(16, 4096)
    entry = arranged_of(lengths, limits, num_replicas=4)
    for count in (1, 3):
        plot_rank_loads({f"method {number}": entry for number in range(count)}, tmp_path / f"{count}.png")
    widths = [matplotlib.image.imread(tmp_path / f"{count}.png").shape[1] for count in (1, 3)]
    assert widths == [widths[0], 3 * widths[0]]
