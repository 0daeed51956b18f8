"""transformers.Trainer on two gloo processes that pack a stream."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate")

from omnibal.errors import ConfigError
from omnibal.integrations import trainer_streams
from omnibal.integrations.packing import PackCollator
from omnibal.integrations.transformers import balance
from tests.engine.launch import launch
from tests.integrations.test_trainer_rearranging import Endless
from tests.integrations.trainers import (
    LEARNING_RATE,
    LIMITS,
    Case,
    Weights,
    accelerate_afresh,
    assert_close,
    trainer_of,
    weights_of,
)
from tests.vlm.families import plain_backward

BUFFER = 40


class Noting(PackCollator):
    """Notes what it packs, fillers aside."""

    packs = None

    def pack(self, samples):
        self.packs.append([sample for sample in samples if (sample["labels"] != -100).any()])
        return super().pack(samples)


def trainer_on_stream(case, folder, **options):
    trainer = trainer_of(case, folder, **options)
    trainer.train_dataset = Endless(case.family)
    return trainer


def check_exact(case, folder):
    """Three steps: the weights of plain transformers on the same samples, one by one."""
    plain = case.plain()
    trainer = trainer_on_stream(case, folder, max_steps=3, logging_strategy="steps", logging_steps=1)
    weights = Weights(trainer)
    trainer.add_callback(weights)
    Noting.packs = []
    balance(trainer, LIMITS[case.family], loss_reduction=case.loss_reduction)
    trainer.train()
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, Noting.packs)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LEARNING_RATE)
    for step in range(3):
        packs = [pack for packs in of_ranks for pack in packs[2 * step : 2 * step + 2]]
        plain_backward(plain, [{"pixel_values": None, **sample} for pack in packs for sample in pack])
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights.steps[-1], weights_of(plain))
    # Every rank reads the stream, and trains on every second sample of it.
    ids = [{tuple(sample["input_ids"].tolist()) for pack in packs for sample in pack} for packs in of_ranks]
    assert len(ids[0] | ids[1]) > 1
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(0 <= entry["dist_ratio_tokens"] < 1 for entry in logged)
    assert len(logged) == 3


def check_resumes(case, folder):
    """Resumed, a run ends as it would have, and reads only what its buffer held and what follows."""
    options = {"max_steps": 20, "save_strategy": "steps", "save_steps": 17}
    whole, again = (trainer_on_stream(case, folder, **options) for _ in range(2))
    for trainer in (whole, again):
        balance(trainer, LIMITS[case.family])
    whole.train()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-17"))
    assert_close(weights_of(again.model), weights_of(whole.model))
    assert again.state.epoch == whole.state.epoch
    assert min(again.train_dataset.read) > 0


def train_cases(folder):
    """On each process."""
    kept = trainer_streams.PackCollator, trainer_streams.BUFFER, trainer_streams.SAMPLES_A_PACK
    trainer_streams.PackCollator, trainer_streams.BUFFER, trainer_streams.SAMPLES_A_PACK = Noting, BUFFER, 1
    try:
        with accelerate_afresh():
            check_exact(Case("internvl"), folder / "exact")
            check_exact(Case("qwen3_vl", "zero3", lora=True), folder / "zero3")
            check_resumes(Case("internvl"), folder / "resumed")
    finally:
        trainer_streams.PackCollator, trainer_streams.BUFFER, trainer_streams.SAMPLES_A_PACK = kept
    return True


@pytest.mark.distributed
def test_two_ranks_pack_a_stream_as_plain_transformers_would_train_it(tmp_path):
    assert launch(2, "tests.integrations.test_trainer_streams:train_cases", tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": None}, "limits must say what a pack of a stream may hold, got None"),
        ({"padded": True}, "a stream must be packed without lengths, padded, memory_gib and mixture, got one"),
    ],
)
def test_what_a_stream_cannot_have_is_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        balance(trainer_on_stream(Case("internvl"), tmp_path, max_steps=2), **{"limits": LIMITS["internvl"], **options})
