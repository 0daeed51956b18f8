"""Runs that are asked to end save and leave; runs that stand still, fail or meet what is not finite say so and end."""

import re
import signal
from pathlib import Path

import pytest
import torch

from tests.engine.cases import changed, settings
from tests.engine.launch import how_all_end, launch
from tests.engine.small import save_small_model

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder, dropout=0.1)
    config = settings(folder, num_stages=2)
    return changed(config, "run", epochs=1, max_steps=6)


def test_a_signal_to_one_rank_lets_all_save_and_leave(config, tmp_path):
    for found in launch(2, "tests.engine.stops:asked_to_end", config, str(tmp_path), 1, signal.SIGTERM):
        stopped, resumed, whole = found["steps"]
        assert 0 < stopped < resumed == whole == 6
        assert found["checkpoints"] == [f"global_step{stopped}"]
        assert not found["exported"]
        assert found["restored"]
        went_on, never_stopped = found["weights"]
        assert all(torch.equal(weight, never_stopped[name]) for name, weight in went_on.items())


# Rank 0 holds the store by which ranks leave word.
@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_and_takes_the_job_down(config, tmp_path, stopped):
    config = changed(config, "run", watchdog_seconds=3)
    said = how_all_end(2, "tests.engine.stops:stands_still", config, stopped, tmp_path, but=stopped)[1 - stopped]
    waiting = f"rank {1 - stopped}, stage {1 - stopped}"
    first = re.search(rf"omnibal: {waiting} (.*)", said)[1]
    assert first.startswith("waits for others since ") and "step " in first
    assert f"rank {stopped}, stage {stopped} does not answer: it is stopped" in first
    if stopped == 1:  # rank 0 takes along what it has said
        assert re.search(r"last seen in step \d+: ", first)
    assert "and ends with status 75" in said


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_message_of_a_rank_that_fails_in_a_pass_comes_first(config, failing):
    said = how_all_end(2, "tests.engine.stops:fails_in_a_pass", config, failing)
    reason = f"rank {failing}, stage {failing} failed: my layer fails"
    assert f"omnibal: {reason}" in said[failing]
    assert f"omnibal: rank {1 - failing} ends, for {reason}" in said[1 - failing]
    assert "Traceback" not in said[1 - failing].partition("ends, for")[0]


def test_a_rank_that_dies_while_it_saves_leaves_the_checkpoint_before(config, tmp_path):
    said = how_all_end(2, "tests.engine.stops:dies_while_saving", config, 1, tmp_path)[0]
    assert "OmnibalError: rank 0, stage 0: all ranks must take part, got " in said
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert not (Path(tmp_path) / "again").exists()


def test_what_is_not_finite_and_what_differs(config):
    for not_finite, differing in launch(2, "tests.engine.stops:refused", config):
        found = re.match(
            r"loss and gradients must be finite, got others in step \d+ \(loss nan, samples ([\d, ]+)\); the step is "
            r"skipped, weights stay, and omnibal.run.not_finite is 'error'",
            not_finite,
        )
        samples = {int(number) for number in found[1].split(", ")}
        assert 13 in samples and len(samples) < 16, samples  # a pack of the step, not all of the data
        for text, key in zip(differing, ("omnibal.run.save_every", "omnibal.packing.seed", "deepspeed"), strict=True):
            assert f"rank 1: {key} must be the same on all ranks, got " in text
