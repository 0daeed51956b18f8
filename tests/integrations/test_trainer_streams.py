"""transformers.Trainer on two gloo processes that pack a stream."""

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate")

from omnibal.errors import ConfigError, DataError
from omnibal.integrations import streams
from omnibal.integrations.trainer import drawn as trainer_streams
from omnibal.integrations.transformers import balance, balance_stream, rearrange
from omnibal.packs.collator import PER_IMAGE, PackCollator
from tests.engine.launch import launch
from tests.integrations.items import items_of, items_of_kinds
from tests.integrations.sounds import SOUND_MODELS
from tests.integrations.test_trainer_rearranging import Endless
from tests.integrations.trainers import (
    LEARNING_RATE,
    LIMITS,
    Case,
    Items,
    Weights,
    accelerate_afresh,
    assert_close,
    trainer_of,
    weights_of,
)
from tests.vlm.families import plain_backward

BUFFER = 40
UNLIKE = {
    "qwen2_vl": ("video", "image", "video+video", ""),
    "qwen2_5_vl": ("video", "image", "video+video", ""),
    "qwen3_vl": ("video", "image", "video+video", ""),
    "qwen2_audio": ("sound", "", "sound+sound", ""),
    "qwen2_5_omni_thinker": ("sound", "image", "sound+sound", ""),
}
"""Kinds of samples that two ranks draw in turns: one never has what the other has."""


class Noting(PackCollator):
    """Notes what it packs, fillers aside."""

    packs = None

    def pack(self, samples):
        self.packs.append([sample for sample in samples if (sample["labels"] != -100).any()])
        return super().pack(samples)


class Unlike(Endless):
    """A stream of ``UNLIKE`` kinds, over and over."""

    def __init__(self, family):
        super().__init__(family)
        self.items = items_of_kinds(family, UNLIKE[family] * 3)

    def item(self, number):
        return self.items[number % len(self.items)]


def trainer_on_stream(case, folder, stream=Endless, **options):
    trainer = trainer_of(case, folder, **options)
    trainer.train_dataset = stream(case.family)
    return trainer


def check_exact(case, folder, stream=Endless):
    """Three steps: the weights of plain transformers on the same samples, one by one."""
    plain = case.plain()
    options = {"logging_strategy": "steps", "logging_steps": 1, "include_num_input_tokens_seen": "non_padding"}
    trainer = trainer_on_stream(case, folder, stream, max_steps=3, **options)
    weights = Weights(trainer)
    trainer.add_callback(weights)
    Noting.packs = []
    balance_stream(trainer, LIMITS[case.family], loss_reduction=case.loss_reduction)
    trainer.train()
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, Noting.packs)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LEARNING_RATE)
    for step in range(3):
        packs = [pack for packs in of_ranks for pack in packs[2 * step : 2 * step + 2]]
        plain_backward(plain, [alone(case.family, sample) for pack in packs for sample in pack])
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights.steps[-1], weights_of(plain))
    trained = [sample for packs in of_ranks for pack in packs[:6] for sample in pack]
    assert trainer.state.num_input_tokens_seen == sum(len(sample["input_ids"]) for sample in trained)
    # Every rank reads the stream, and trains on every second sample of it.
    ids = [{tuple(sample["input_ids"].tolist()) for pack in packs for sample in pack} for packs in of_ranks]
    assert len(ids[0] | ids[1]) > 1
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(0 <= entry["dist_ratio_tokens"] < 1 and entry["oversized"] >= 0 for entry in logged)
    assert len(logged) == 3
    sees_and_hears = case.family == "qwen2_5_omni_thinker"  # a model that hears alone counts sounds as vision units
    assert ("dist_ratio_sound" in logged[-1]) == (sees_and_hears and any("input_features" in each for each in trained))
    if stream is Unlike:
        kinds = [
            {name for pack in packs for sample in pack for name in sample if name in PER_IMAGE} for packs in of_ranks
        ]
        assert kinds[0]
        assert not kinds[0] & kinds[1]


def alone(family, sample):
    """A packed sample as transformers takes it; Qwen2.5-Omni counts positions in three rows only under a mask."""
    mask = {"attention_mask": torch.ones(1, len(sample["input_ids"]))} if family in SOUND_MODELS else {}
    return {"pixel_values": None, **sample, **mask}


class Passes:
    """A source that ends and does not know its place."""

    def __init__(self, family):
        self.items = items_of(family)

    def __iter__(self):
        yield from self.items[5:]


def streams_of(family):
    return {"endless": Endless(family), "indexed": Items(family), "passes": Passes(family)}


def check_mixture(case, folder):
    """Shares are met and logged; resumed, a run ends as it would have, reads little again, and says what."""
    options = {"max_steps": 20, "save_strategy": "steps", "save_steps": 17}
    logging = {"logging_strategy": "steps", "logging_steps": 1}
    whole, again = (trainer_of(case, folder, **options, **logging) for _ in range(2))
    for trainer in (whole, again):
        trainer.train_dataset = streams_of(case.family)
        balance_stream(trainer, LIMITS[case.family], mixture={"endless": 2, "indexed": 1, "passes": 1})
    whole.train()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        again.train(resume_from_checkpoint=str(folder / "checkpoint-17"))
    assert_close(weights_of(again.model), weights_of(whole.model))
    assert again.state.epoch == whole.state.epoch
    assert min(again.train_dataset["endless"].read) > 0
    told = [str(warning.message) for warning in warned if "without state_dict" in str(warning.message)]
    assert len(told) == (dist.get_rank() == 0)
    assert all("are read again from the start of their pass" in line and "of 'passes'" in line for line in told)
    logged = [entry for entry in whole.state.log_history if "loss" in entry]
    shares = [sum(entry[f"share_{name}"] for entry in logged) / len(logged) for name in whole.train_dataset]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.05)


@contextmanager
def noting():
    with pytest.MonkeyPatch.context() as patch, accelerate_afresh():
        patch.setattr(streams, "PackCollator", Noting)
        patch.setattr(trainer_streams, "buffer_of", lambda _: BUFFER)
        yield


def train_cases(folder):
    """On each process."""
    with noting():
        check_exact(Case("internvl"), folder / "exact")
        check_exact(Case("qwen3_vl", "zero3", lora=True), folder / "zero3")
        check_exact(Case("qwen2_5_vl"), folder / "videos", Unlike)
        check_exact(Case("qwen2_5_omni_thinker", "zero3"), folder / "sounds", Unlike)
        check_mixture(Case("internvl"), folder / "mixed")
    return True


def train_unlike(folder, family):
    with noting():
        for layout in ("ddp", "zero2", "zero3", "fsdp"):
            check_exact(Case(family, layout), folder / layout, Unlike)
    return True


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("family", UNLIKE)
def test_a_rank_of_videos_or_sounds_trains_beside_one_of_images_and_texts(family, tmp_path):
    assert launch(2, "tests.integrations.test_trainer_streams:train_unlike", tmp_path, family) == [True, True]


@pytest.mark.distributed
def test_two_ranks_pack_a_stream_as_plain_transformers_would_train_it(tmp_path):
    assert launch(2, "tests.integrations.test_trainer_streams:train_cases", tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": None}, "limits must say what a pack of a stream may hold, got None"),
        ({"mixture": {"a": 1}}, "train_dataset must be streams by name, as the mixture calls them, got Endless"),
    ],
)
def test_what_a_stream_cannot_have_is_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trainer = trainer_on_stream(Case("internvl"), tmp_path, max_steps=2)
        balance_stream(trainer, **{"limits": LIMITS["internvl"], **options})


def test_balance_says_what_takes_streams(tmp_path):
    trainer = trainer_on_stream(Case("internvl"), tmp_path, max_steps=2)
    for dataset in (trainer.train_dataset, {"a": trainer.train_dataset}, None):
        trainer.train_dataset = dataset
        with pytest.raises(DataError, match=r"the dataset must be read by index .*; balance_stream\(trainer, limits\)"):
            balance(trainer, LIMITS["internvl"])


@pytest.mark.parametrize(
    ("options", "max_steps", "message"),
    [
        ({}, 2, "mixture must say what share each source gets, got none for endless, indexed, passes"),
        (
            {"mixture": {"endles": 1, "indexed": 1, "passes": 1}},
            2,
            r"mixture must name sources of the data, got 'endles'; did you mean 'endless'\?",
        ),
        ({"mixture": {"endless": 1, "indexed": 1}}, 2, "got no share of 'passes'; give it 0 to leave it out"),
        ({"mixture": {"endless": 0}}, 2, "shares must sum to more than 0"),
        ({"mixture": {"endless": 1}}, -1, "max_steps must be positive to train on a stream, got -1; it has no epochs"),
    ],
)
def test_what_a_mixture_of_streams_cannot_have_is_refused(options, max_steps, message, tmp_path):
    trainer = trainer_of("internvl", tmp_path, max_steps=max_steps)
    trainer.train_dataset = streams_of("internvl")
    with pytest.raises(ConfigError, match=message):
        balance_stream(trainer, LIMITS["internvl"], **options)


def test_streams_by_name_are_not_rearranged(tmp_path):
    trainer = trainer_of("internvl", tmp_path)
    trainer.train_dataset = streams_of("internvl")
    with pytest.raises(ConfigError, match="train_dataset must be a dataset or stream to rearrange samples, got dict"):
        rearrange(trainer)
