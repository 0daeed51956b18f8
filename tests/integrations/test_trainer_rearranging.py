"""transformers.Trainer on two gloo processes whose ranks work on each other's samples."""

from copy import deepcopy
from itertools import chain, islice

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

pytest.importorskip("accelerate")

from omnibal.errors import ConfigError
from omnibal.integrations.trainer.drawn import DatasetDraws, Stream
from omnibal.integrations.transformers import balance, rearrange
from tests.engine.launch import launch
from tests.integrations.items import collated_backward, items_of, items_of_kinds
from tests.integrations.sounds import SOUND_MODELS
from tests.integrations.trainers import (
    LEARNING_RATE,
    Case,
    Weights,
    accelerate_afresh,
    assert_close,
    check_evaluation,
    steps_of_draws,
    trainer_of,
    weights_of,
)
from tests.vlm.families import plain_backward, plain_inputs
from tests.vlm.test_weights import Payload

CASES = [Case("internvl"), Case("qwen3_vl", "zero3", lora=True), Case("qwen2_5_omni_thinker")]
MIXED = ("image", "video", "", "image+video", "video", "image", "", "video+video", "image", "", "video")
SLOW_CASES = [
    Case("qwen2_5_vl", "fsdp", frozen_vision=True, options={"gradient_checkpointing": True}),
    Case("gemma3", "zero2", padded=True),
    *(Case(family, layout) for family in SOUND_MODELS for layout in ("ddp", "zero2", "zero3", "fsdp")),
    *(Case("qwen2_5_vl", layout, kinds=MIXED) for layout in ("ddp", "zero3")),
]
PHASES = {"qwen2_audio": ["sound"], "qwen2_5_omni_thinker": ["sound", "vision"]}
SAVED = {"save_strategy": "steps", "save_steps": 4}


def check_exact(case, folder):
    """An epoch and a step of the next one: the weights of plain transformers on the same samples, one by one."""
    plain = case.plain()
    items = items_of(case.family) if case.kinds is None else items_of_kinds(case.family, case.kinds)
    options = {"per_device_train_batch_size": 2, "logging_strategy": "steps", "logging_steps": 2}
    trainer = trainer_of(case, folder, max_steps=4, eval_dataset=items[:3], **options)
    weights = Weights(trainer)
    trainer.add_callback(weights)
    rearrange(trainer, padded=case.padded)
    trainer.train()
    steps = steps_of_draws(trainer, 4)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LEARNING_RATE)
    losses = []
    for samples, (before, after) in zip(steps, zip(weights.steps, weights.steps[1:], strict=False), strict=True):
        drawn = [items[sample] for sample in samples]
        losses.append(
            float(collated_backward(plain, drawn, case.family)) if case.padded else plain_backward(plain, drawn)[0]
        )
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
        assert_close({n: (before[n] - after[n]) / LEARNING_RATE for n in before}, gradients, atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights.steps[-1], weights_of(plain))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logged] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], rel=1e-4)
    phases = [*PHASES.get(case.family, ["vision"]), "llm"]
    told = [(entry[f"imbalance_{phase}_drawn"], entry[f"imbalance_{phase}"]) for entry in logged for phase in phases]
    assert all(now <= drawn for drawn, now in told)
    assert any(now < drawn for drawn, now in told)
    if not case.padded:
        encoded = {"pixel_values", "pixel_values_videos", "input_features"}
        has = [any(item.get(name) is not None for name in encoded) for item in items]
        unlike = [[item for item, one in zip(items, has, strict=True) if one == wanted] for wanted in (True, False)]
        trainer.args.per_device_eval_batch_size = 1
        evaluated = [*chain.from_iterable(zip(*unlike, strict=False))]
        check_evaluation(trainer, plain, evaluated, case.family)


def check_resumes(case, folder, stream=None):
    """Resumed, a run ends as it would have, and reads nothing that was trained before."""
    options = {"max_steps": 6, **SAVED}
    whole, again = (trainer_of(case, folder, **options) for _ in range(2))
    for trainer in (whole, again):
        if stream is not None:
            trainer.train_dataset = stream(case.family)
        rearrange(trainer)
    whole.train()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert_close(weights_of(again.model), weights_of(whole.model))
    read, expected = again.train_dataset.read, whole.train_dataset.read
    assert 0 < len(read) < len(expected)
    return read, expected


class Endless(IterableDataset):
    """A stream that never ends and knows its place."""

    def __init__(self, family):
        self.items, self.next, self.read = items_of(family), 0, []

    def __iter__(self):
        while True:
            self.read.append(self.next)
            self.next += 1
            yield self.item(self.next - 1)

    def item(self, number):
        return self.items[number**2 % len(self.items)]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def check_faults(folder):
    trainer = trainer_of("internvl", folder, max_steps=2, **SAVED | {"save_steps": 1})
    trainer.model_init = min
    with pytest.raises(ConfigError, match="model_init must be None to rearrange samples, got one"):
        rearrange(trainer)
    trainer.model_init = None
    rearrange(trainer)
    trainer.train()
    copied = deepcopy(trainer.model)
    copied.lm_head.weight.data.zero_()
    assert not copied(**plain_inputs(items_of("internvl")[0])).logits.any()
    resumed = {"resume_from_checkpoint": str(folder / "checkpoint-1")}
    packs = trainer_of("internvl", folder, max_steps=2)
    balance(packs)
    with pytest.raises(ConfigError, match="the checkpoint must have been saved under balance as it is called now"):
        packs.train(**resumed)
    other = trainer_of("internvl", folder, max_steps=2, per_device_train_batch_size=2)
    rearrange(other)
    with pytest.raises(ConfigError, match="samples_a_draw must be as in the checkpoint, 1, got 2"):
        other.train(**resumed)
    stream = trainer_of("internvl", folder, max_steps=2)
    stream.train_dataset = Endless("internvl")
    rearrange(stream)
    with pytest.raises(ConfigError, match="samples must be as in the checkpoint, 11, got None"):
        stream.train(**resumed)
    torch.save(Payload(folder / "ran"), folder / "checkpoint-1" / f"omnibal_stream_{dist.get_rank()}.pt")
    with pytest.raises(ConfigError, match=r"omnibal_stream_0\.pt must be a rank's place .* must hold data only, got: "):
        stream.train(**resumed)
    assert not (folder / "ran").exists()


def train_cases(folder):
    """On each process."""
    with accelerate_afresh():
        for number, case in enumerate(CASES):
            check_exact(case, folder / f"case{number}")
        check_resumes(Case("internvl"), folder / "epochs")
        read, expected = check_resumes(Case("internvl"), folder / "stream", Endless)
        # Four steps of two micro-batches; two further steps are read ahead.
        assert read[0] >= 4 * 2 * dist.get_world_size() - 1
        assert read == expected[-len(read) :] or read[: len(expected)] == expected[read[0] :]
        check_faults(folder / "faults")
    return True


def train_slow_cases(folder):
    with accelerate_afresh():
        for number, case in enumerate(SLOW_CASES):
            check_exact(case, folder / f"case{number}")
        check_resumes(Case("internvl", "zero2"), folder / "epochs")
    return True


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_share_samples_do_so_under_fsdp_and_zero_2(tmp_path):
    assert launch(2, "tests.integrations.test_trainer_rearranging:train_slow_cases", tmp_path) == [True, True]


@pytest.mark.distributed
def test_ranks_that_share_samples_train_what_plain_transformers_would(tmp_path):
    assert launch(2, "tests.integrations.test_trainer_rearranging:train_cases", tmp_path) == [True, True]


def test_one_process_has_nobody_to_share_with(tmp_path):
    with pytest.raises(ConfigError, match="world_size must be above 1 to rearrange samples, got 1"):
        rearrange(trainer_of("internvl", tmp_path))


def drawn_by(ranks, draws):
    """What ranks' first draws hold, a list of samples for each rank."""
    return [[sample for batch in islice(rank, draws) for sample in batch] for rank in ranks]


def test_ranks_draw_each_sample_once_an_epoch():
    ranks = [DatasetDraws(range(11), 2, rank, 3, 7, {}) for rank in range(3)]
    first = drawn_by(ranks, 9)
    for rank in ranks:
        rank.set_epoch(1)
    second, again = drawn_by(ranks, 9), [DatasetDraws(range(11), 2, rank, 3, 7, {}) for rank in range(3)]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(11))
    assert first != second
    for rank in again:
        rank.load_state_dict({"epoch": 1, "drawn": 1})
    assert drawn_by(again, 9) == [samples[2:] for samples in second]
    assert [rank.state_dict() for rank in again] == [rank.state_dict() for rank in ranks]


class Counting(IterableDataset):
    """0, 1, 2, …, and where it stands."""

    next = 0

    def __iter__(self):
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def streams(kind):
    if kind == "plain":
        return [Stream(Counting(), 2, rank, 3, {}) for rank in range(3)]
    shards = pytest.importorskip("datasets").IterableDataset.from_generator(numbers, gen_kwargs={"first": [0, 20, 40]})
    return [Stream(shards, 2, rank, 3, {}) for rank in range(3)]


def numbers(first):
    for number in first:
        yield from range(number, number + 20)


@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_ranks_share_a_stream_and_go_on_in_it(kind):
    ranks = streams(kind)
    iterators = [iter(rank) for rank in ranks]
    first = drawn_by(iterators, 3)
    states = [rank.state_dict() for rank in ranks]
    rest = drawn_by(iterators, 4)
    found = sorted(chain(*first, *rest))
    assert len(set(found)) == len(found) == 3 * 2 * 7
    if kind == "plain":
        assert found == list(range(42))
    again = streams(kind)
    for rank, state in zip(again, states, strict=True):
        rank.load_state_dict(state)
    assert drawn_by([iter(rank) for rank in again], 4) == rest
