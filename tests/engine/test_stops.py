"""Runs that are asked to end save and leave; runs that stand still, fail or meet what is not finite say so and end."""

import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import InternVLForConditionalGeneration

from omnibal.engine.checkpoint import latest_checkpoint
from tests.engine.cases import changed, settings
from tests.engine.launch import how_all_end, launch
from tests.engine.small import plain_results, save_small_model, small_samples

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder, dropout=0.1)
    config = settings(folder, num_stages=2)
    return changed(config, "run", epochs=1, max_steps=6)


@pytest.mark.cluster(2)
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


@pytest.mark.cluster(2)
@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_message_of_a_rank_that_fails_in_a_pass_comes_first(config, failing):
    said = how_all_end(2, "tests.engine.stops:fails_in_a_pass", config, failing)
    reason = f"rank {failing}, stage {failing} failed: my layer fails"
    assert f"omnibal: {reason}" in said[failing]
    assert f"omnibal: rank {1 - failing} ends, for {reason}" in said[1 - failing]
    assert "Traceback" not in said[1 - failing].partition("ends, for")[0]


@pytest.mark.cluster(2)
def test_a_rank_that_dies_while_it_saves_leaves_the_checkpoint_before(config, tmp_path):
    said = how_all_end(2, "tests.engine.stops:dies_while_saving", config, 1, tmp_path)[0]
    assert "OmnibalError: rank 0, stage 0: all ranks must take part, got " in said
    assert "; rank 0 was there last, rank 1 does not answer" in said
    assert latest_checkpoint(tmp_path).name == "global_step1"
    assert not (Path(tmp_path) / "again").exists()


@pytest.fixture(scope="module")
def skipping(tmp_path_factory):
    """Two stages, two tensor ranks and two replicas that leave out what cannot be read, and whose weights stay."""
    folder = tmp_path_factory.mktemp("plain")
    save_small_model(folder)
    staged = changed(settings(folder, num_stages=2), "data", broken="skip")
    staged["optimizer"] = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}}
    del staged["scheduler"]
    alone = changed(staged, "pipeline", num_stages=1)
    return folder, [staged, changed(alone, "pipeline", num_tensor=2), alone]


@pytest.fixture(scope="module")
def refused(config, skipping):
    return launch(2, "tests.engine.stops:refused", config, skipping[1])


def test_samples_that_a_rank_cannot_read_are_left_out_on_all_and_the_rest_of_their_packs_is_trained(refused, skipping):
    model = InternVLForConditionalGeneration.from_pretrained(skipping[0], attn_implementation="sdpa")
    samples, named = small_samples() * 4, {2: "no picture 2", 5: "no picture 5", 12: "no picture 12"}
    for _, _, runs in refused:
        for number, (steps, left_out, evaluation, said) in enumerate(runs):
            # A replica meets only what it reads itself.
            expected = named if number < 2 else left_out
            assert left_out == expected and 5 in left_out and left_out.items() <= named.items()
            whole = 0
            for loss, packs, step in steps:
                rest = [sample for sample in packs if sample not in left_out]
                whole += len(packs)
                assert step.num_samples == len(rest) and step.left_out == len(packs) - len(rest)
                assert step.llm_tokens == sum(len(samples[sample]["input_ids"]) for sample in rest)
                assert loss == pytest.approx(plain_results(model, [samples[sample] for sample in rest])[0], rel=1e-5)
            assert whole == 32 and sum(step.left_out for *_, step in steps) == len(left_out)
            assert evaluation.samples == 29 or number == 2
            assert re.search(
                r"a step must have a sample that can be read, got none of \d+: sample \d+, no picture", said
            )
    assert all(runs[number][1] == refused[0][2][number][1] for _, _, runs in refused for number in range(3))


def test_what_is_not_finite_and_what_differs(refused):
    for not_finite, differing, _ in refused:
        found = re.match(
            r"loss and gradients must be finite, got others in step \d+ \(loss nan, samples ([\d, ]+)\); the step is "
            r"skipped, weights stay, and omnibal.run.not_finite is 'error'",
            not_finite,
        )
        samples = {int(number) for number in found[1].split(", ")}
        assert 13 in samples and len(samples) < 16, samples  # a pack of the step, not all of the data
        for text, key in zip(differing, ("omnibal.run.save_every", "omnibal.packing.seed", "deepspeed"), strict=True):
            assert f"rank 1: {key} must be the same on all ranks, got " in text
