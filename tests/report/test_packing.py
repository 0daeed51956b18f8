import json

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.cli.lengths import packing_notes, packing_table
from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import measure_packing, mix_labels
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.data.packs import Packs
from omnibal.report.page import _by_rank, plot_rank_loads
from tests.report.printed import text_of
from tools.synthetic import patch_lengths, tiled_lengths

LENGTHS = SampleLengths([1, 2, 3, 4], [10, 20, 30, 40], source=[0, 1, 0, 1])
LIMITS = PackLimits(5, 50)
PACKS = Packs.from_lists([[0, 3], [1, 2], [], []])
STEPS = np.array([[[0], [1]], [[2], [3]]])


def figures_of(packs=PACKS, steps=STEPS, **options):
    return measure_packing("isf", LENGTHS, LIMITS, packs, steps, seconds=0.5, **options)


def test_figures_of_two_packs_on_two_ranks():
    figures = figures_of()
    assert (figures.samples, figures.packs, figures.empty_packs, figures.steps) == (4, 2, 2, 2)
    assert (figures.fewest_packs, figures.packs_over_fewest, figures.samples_per_pack) == (2, 0.0, 2.0)
    assert (figures.dist_ratio_vision, figures.dist_ratio_tokens) == (0.0, 0.0)
    cheap, dear = 50 * 24576 + 20**2 + 30**2, 50 * 24576 + 10**2 + 40**2
    assert figures.dist_ratio_cost == pytest.approx((dear - cheap) / (2 * dear) / 2)
    assert figures.dist_ratio_least == 0  # no sample costs as much as the mean pack
    assert figures.pad_ratio == 0
    assert figures.pad_ratio_if_padded == pytest.approx((30 / 80 + 10 / 60) / 2)
    assert figures.largest == {"vision_units": 5, "llm_tokens": 50, "llm_tokens_squared": 10**2 + 40**2}
    assert (figures.lost, figures.repeated, figures.over_limit, figures.seconds) == (0, 0, 0, 0.5)


def test_a_large_sample_forces_waits():
    """The sample of 400 is longer than all others together: the least is what its rank takes with it alone."""
    lengths = SampleLengths([1] * 4, [400, 10, 20, 30])
    cost = DEFAULT_COST(Load(0, [400, 10, 20, 30], [400**2, 10**2, 20**2, 30**2]))
    packs, steps = Packs.from_lists([[0, 1], [2, 3]]), np.array([[[0], [1]]])
    figures = measure_packing("isf", lengths, LIMITS, packs, steps, seconds=0)
    assert figures.dist_ratio_least == pytest.approx(1 - cost.sum() / 2 / cost[0])
    assert figures.dist_ratio_least < figures.dist_ratio_cost
    best = measure_packing("isf", lengths, LIMITS, Packs.from_lists([[0], [1, 2, 3]]), steps, seconds=0)
    assert best.dist_ratio_cost == pytest.approx(best.dist_ratio_least) == pytest.approx(figures.dist_ratio_least)


def test_faults_are_counted():
    packs = Packs.from_lists([[0, 3], [3, 2], [0, 0], []])
    figures = figures_of(packs)
    assert (figures.samples, figures.lost, figures.repeated) == (3, 1, 3)
    assert figures.over_limit == 1  # the second holds 7 vision units


def test_what_is_left_out_on_purpose_is_not_lost():
    packs = Packs.from_lists([[0], [1], [2], []])
    limits = PackLimits(3, 50)
    figures = measure_packing("isf", LENGTHS, limits, packs, STEPS, seconds=0, left_out=1)
    assert (figures.lost, figures.fewest_packs) == (0, 2)


def test_a_single_oversized_sample_is_not_over_a_limit():
    packs = Packs.from_lists([[3], [0, 1], [2], []])
    figures = measure_packing("isf", LENGTHS, PackLimits(3, 50), packs, STEPS, seconds=0)
    assert (figures.over_limit, figures.lost) == (0, 0)


def test_padding_counts_as_load():
    padded = Load([5, 5, 0, 0], [80, 60, 0, 0], [2 * 40**2, 2 * 30**2, 0, 0])
    figures = figures_of(load=padded)
    assert figures.pad_ratio == pytest.approx(figures.pad_ratio_if_padded)
    assert figures.dist_ratio_tokens == pytest.approx(20 / 160 / 2)
    assert figures.over_limit == 2
    assert figures.largest["llm_tokens"] == 80


def test_micro_batches_are_compared_one_by_one():
    together = np.array([[[0, 2], [1, 3]]])
    figures = figures_of(steps=together)
    assert figures.dist_ratio_vision == 0
    apart = np.array([[[0, 2], [3, 1]]])
    assert figures_of(steps=apart).dist_ratio_vision == 0.5


@pytest.mark.parametrize("source", [None, np.zeros(800, dtype=int)])
def test_with_one_source_randomness_is_measured_on_classes_of_length(source):
    tokens = np.random.default_rng(0).permutation(800)
    lengths = SampleLengths(np.ones(800, dtype=int), tokens, source=source)
    labels = mix_labels(lengths)
    assert np.bincount(labels).tolist() == [100] * 8
    assert (np.diff(labels[np.argsort(tokens)]) >= 0).all()


def test_sources_are_what_randomness_is_measured_on():
    assert mix_labels(LENGTHS) is LENGTHS.source


@given(st.integers(1, 60), st.integers(1, 4), st.sampled_from(["isf", "random"]), st.integers(0, 3))
def test_nothing_is_lost_by_our_methods_and_records_are_json(count, ranks, method, seed):
    lengths = tiled_lengths(count, seed=seed)
    limits = PackLimits(6, 4096)
    epoch = arrange_epoch(lengths, limits, num_replicas=ranks, method=method, seed=seed)
    figures = measure_packing(method, lengths, limits, epoch.packs, epoch.steps, seconds=0.0)
    assert (figures.lost, figures.repeated, figures.over_limit) == (0, 0, 0)
    assert figures.packs >= figures.fewest_packs
    assert 0 <= figures.dist_ratio_least <= figures.dist_ratio_cost + 1e-12
    assert figures.packs + figures.empty_packs == figures.steps * ranks
    record = json.loads(json.dumps(figures.to_record(), allow_nan=False))
    assert record["samples_per_pack"] == count / figures.packs


def test_the_table_holds_methods_side_by_side_in_80_columns():
    text = text_of(packing_table([figures_of(), figures_of(Packs.from_lists([[0], [1], [2], [3]]))]))
    rows = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    assert rows["packs"] == ["2", "4"]
    assert rows["Dist Ratio, vision units"] == ["0.0000", "0.1875"]
    assert rows["lost, repeated, over limit"] == ["0,", "0,", "0", "0,", "0,", "0"]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text_of(packing_table([figures_of()] * 3))
    alone = text_of(packing_table([figures_of()], 1, "tiles"))
    assert "Dist Ratio" not in alone + " ".join(packing_notes(1)) and "largest, tiles" in alone
    assert any("Dist Ratio: " in note for note in packing_notes(2))


def test_missing_randomness_is_a_dash_and_null():
    steps = STEPS[:1]
    figures = figures_of(Packs.from_lists([[0, 3], [1, 2]]), steps)
    assert figures.to_record()["randomness"] is None
    assert "–" in text_of(packing_table([figures])).split("shuffled)")[1].splitlines()[0]


def loads_of(lengths, limits, **options):
    epoch = arrange_epoch(lengths, limits, method="isf", **options)
    return epoch.packs.load(lengths)[epoch.steps]


def ink(path):
    """Share of pixels that are not white: what is drawn."""
    image = matplotlib.image.imread(path)[..., :3]
    return float((image.min(axis=-1) < 0.98).mean())


def test_micro_batches_that_run_at_the_same_time_share_a_row():
    assert _by_rank(np.arange(8).reshape(2, 2, 2)).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


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
    arranged = {"one": loads_of(lengths, limits, num_replicas=2, micro_batches=2)}
    plot_rank_loads(arranged, tmp_path / "loads.png")
    assert ink(tmp_path / "loads.png") > 0.01


def test_more_methods_make_a_wider_picture(tmp_path):
    lengths, limits = tiled_lengths(300, seed=2), PackLimits(16, 4096)
    entry = loads_of(lengths, limits, num_replicas=4)
    for count in (1, 3):
        plot_rank_loads({f"method {number}": entry for number in range(count)}, tmp_path / f"{count}.png")
    widths = [matplotlib.image.imread(tmp_path / f"{count}.png").shape[1] for count in (1, 3)]
    assert widths == [widths[0], 3 * widths[0]]
