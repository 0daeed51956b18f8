"""A run that stops and goes on is the run that never stopped; what it exports computes what it computed."""

import pytest
import torch
from transformers import InternVLForConditionalGeneration

from omnibal.engine.checkpoint import export, latest_checkpoint
from tests.engine.cases import RESUMED_COPIES, SmallDataset, changed, settings
from tests.engine.launch import launch
from tests.engine.small import plain_results, save_small_model, small_samples

pytestmark = [pytest.mark.distributed, pytest.mark.cluster(2, together=True)]
LAST_STEP, SAVED_AT, KILLED_AT = 7, 4, 6
BF16 = {"bf16": {"enabled": True}}
SETTINGS = ((True, 2, 1, {}), (False, 1, 0, {}), (False, 2, 1, BF16), (True, 1, 1, BF16))
"""Tied or not, stages, ZeRO, precision; the last one is of tensor ranks."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two stages, replicas or tensor ranks, tied or not, with dropout: uninterrupted, and resumed in new processes."""
    configs, folders = [], []
    for tied, num_stages, zero_stage, extra in SETTINGS:
        model = tmp_path_factory.mktemp("model")
        save_small_model(model, tied=tied, dropout=0.1)
        configs.append(settings(model, num_stages=num_stages, zero_stage=zero_stage, extra=extra))
        folders.append(tmp_path_factory.mktemp("checkpoints"))
    # Groups of which the second stage has some for placeholders only.
    configs[2] = changed(configs[2], "optimizer", learning_rates={"vision": 1e-3}, weight_decay="matrices")
    configs[3] = changed(configs[3], "pipeline", num_tensor=2)

    def run(first, last, *save_at, **options):
        steps = [(config, first, last, str(folder)) for config, folder in zip(configs, folders, strict=True)]
        return launch(2, "tests.engine.cases:train_all", steps, *save_at, **options)

    whole = run(0, LAST_STEP)
    run(0, KILLED_AT, SAVED_AT, ends=True)
    return whole, run(SAVED_AT, LAST_STEP), folders


def test_resumed_runs_are_bit_identical(runs):
    whole_by_rank, resumed_by_rank, _ = runs
    for whole_of_rank, resumed_of_rank in zip(whole_by_rank, resumed_by_rank, strict=True):
        for whole, resumed in zip(whole_of_rank, resumed_of_rank, strict=True):
            for key in ("losses", "rates", "samples"):
                assert whole[key][SAVED_AT:] == resumed[key]
            assert whole["seen"] == resumed["seen"] == sum(samples for _, _, samples in whole["samples"])
            assert whole["weights"].keys() == resumed["weights"].keys()
            assert all(torch.equal(weight, resumed["weights"][name]) for name, weight in whole["weights"].items())


def test_epochs_follow_one_another_and_show_every_sample(runs):
    whole, _, _ = runs
    for run in whole[0]:
        steps = run["steps_of_epochs"]
        assert 1 < steps[0] < LAST_STEP
        in_turn = [(epoch, index) for epoch, number in enumerate(steps) for index in range(number)]
        assert [step[:2] for step in run["samples"]] == in_turn[:LAST_STEP]
        assert run["steps_left"] == len(in_turn) - LAST_STEP
        assert sum(samples for epoch, _, samples in run["samples"] if epoch == 0) == len(SmallDataset(RESUMED_COPIES))


def test_only_the_first_stage_decodes_images(runs):
    whole, _, _ = runs
    assert whole[0][0]["decoded"] > 0
    assert whole[1][0]["decoded"] == 0
    assert whole[1][1]["decoded"] > 0  # the second replica of one stage


def test_the_schedule_spans_the_run(runs):
    whole, _, _ = runs
    rates = whole[0][0]["rates"]
    assert max(rates) == pytest.approx(0.01, rel=0.01)
    assert rates[-1] < rates[1]


def test_evaluation_and_export_equal_plain_transformers(runs):
    _, resumed, folders = runs
    samples = small_samples()
    for number, folder in enumerate(folders):
        export(latest_checkpoint(folder / "end"), folder / "exported")
        model = InternVLForConditionalGeneration.from_pretrained(folder / "exported", dtype=torch.float32)
        is_half = SETTINGS[number][-1] == BF16
        run = resumed[-1][number]
        loss, accuracy = plain_results(model, samples)
        assert run["held_out"] == resumed[0][number]["held_out"]
        assert run["held_out"].loss == pytest.approx(loss, rel=2e-2 if is_half else 1e-5)
        assert run["held_out"].samples == len(SmallDataset(RESUMED_COPIES))
        if not is_half:
            assert run["held_out"].accuracy == pytest.approx(accuracy)
