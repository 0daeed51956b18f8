"""transformers.Trainer on two gloo processes trains what plain transformers would, sample by sample."""

import os
import re
import socket
from functools import partial

import pytest
import torch
from torch.utils.data import IterableDataset

pytest.importorskip("accelerate")

from transformers import AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError, DataError
from omnibal.integrations.transformers import balance
from tests.families.models import small_config
from tests.integrations.items import Collate, items_of
from tests.vlm.families import plain_backward, plain_family_model

RANKS, LEARNING_RATE = 2, 0.05
LIMITS = {"internvl": PackLimits(7, 60), "qwen2_5_vl": PackLimits(300, 90)}


class Items(torch.utils.data.Dataset):
    """Notes what is read."""

    def __init__(self, family):
        self.items, self.read = items_of(family), []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, sample):
        self.read.append(sample)
        return self.items[sample]


class Gradients(TrainerCallback):
    """Keeps the gradients of every step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        named = model.named_parameters()
        self.steps.append({n.removeprefix("module."): p.grad.clone() for n, p in named if p.grad is not None})


def trainer_of(family, folder, **options):
    arguments = TrainingArguments(
        str(folder),
        **{
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "optim": "sgd",
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0,
            "save_strategy": "no",
            "logging_strategy": "no",
            **options,
        },
    )
    model = plain_family_model(small_config(family))
    return Trainer(model, arguments, data_collator=Collate(family), train_dataset=Items(family))


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-6)


def check_exact(family, folder):
    """Three steps: gradients and weights of plain transformers on the same samples, one by one."""
    trainer = trainer_of(family, folder, max_steps=3)
    gradients = Gradients()
    trainer.add_callback(gradients)
    sampler = balance(trainer, LIMITS[family])
    trainer.train()

    plain, items = plain_family_model(small_config(family)), items_of(family)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    assert len(gradients.steps) == 3
    for number, found in enumerate(gradients.steps):
        sampler.set_epoch(number // sampler.num_steps)
        packs = sampler.packs_of_all_ranks(number % sampler.num_steps)
        plain_backward(plain, [items[sample] for pack in packs for sample in pack])
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert_close(found, expected)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights_of(trainer.model), weights_of(plain))


def check_epochs_and_resume(family, folder):
    """Every sample once an epoch, in another order each; resumed within epoch 1, a run ends as it would have."""
    options = {"num_train_epochs": 2, "save_strategy": "steps", "gradient_accumulation_steps": 1}
    trainer = trainer_of(family, folder, **options)
    sampler = balance(trainer, LIMITS[family])
    assert sampler.num_steps > 2
    trainer.args.save_steps = trainer.state.save_steps = sampler.num_steps + 1
    dataset = trainer.train_dataset
    dataset.read.clear()
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([sampler.packs_of_all_ranks(step) for step in range(sampler.num_steps)])
    sampler.set_epoch(0)
    trainer.train()
    own = [[sample for step in order for sample in with_filler(step[sampler.rank])] for order in orders]
    assert dataset.read == own[0] + own[1]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(sample for step in order for pack in step for sample in pack) == list(range(len(dataset)))

    again = trainer_of(family, folder, **options, save_steps=trainer.args.save_steps)
    balance(again, LIMITS[family])
    again.train_dataset.read.clear()
    checkpoint = str(folder / f"checkpoint-{sampler.num_steps + 1}")
    # Trainer saves this family's weights under the names on disk, and does not find them by these names again.
    again.model.load_state_dict(AutoModelForImageTextToText.from_pretrained(checkpoint).state_dict())
    again.train(resume_from_checkpoint=checkpoint)
    rest = [sample for step in orders[1][1:] for sample in with_filler(step[sampler.rank])]
    assert again.train_dataset.read == rest
    assert_close(weights_of(again.model), weights_of(trainer.model))


def with_filler(pack):
    return [*pack, *([] if pack.filler is None else [pack.filler])]


def check_unlike_data(folder):
    """What is wrong on one rank ends all of them, none waits."""
    trainer = trainer_of("internvl", folder)
    lengths = SampleLengths([1] * 11, [20 + trainer.args.process_index] * 11)
    with pytest.raises(ConfigError, match=r"rank 1: .* must be the same on all ranks"):
        balance(trainer, LIMITS["internvl"], lengths=lengths)
    if trainer.args.process_index:
        trainer.train_dataset.items[3] = None
    with pytest.raises(DataError, match="rank 1: TypeError: 'NoneType' object"):
        balance(trainer, LIMITS["internvl"])
    if trainer.args.process_index:
        trainer.train_dataset.items.pop()
    with pytest.raises(DataError, match="train_dataset must have as many samples on all ranks"):
        balance(trainer, LIMITS["internvl"])


def work(rank, port, folder):
    torch.set_num_threads(1)
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in named.items()} | {"MASTER_ADDR": "127.0.0.1"}
    for family in LIMITS:
        check_exact(family, folder / family)
    check_epochs_and_resume("internvl", folder / "resumed")
    check_unlike_data(folder / "unlike")
    (folder / f"done{rank}").touch()
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_two_processes_train_what_plain_transformers_would(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, args=(port, tmp_path), nprocs=RANKS)
    assert len([*tmp_path.glob("done*")]) == RANKS


def test_the_line_says_what_an_epoch_becomes(tmp_path, capsys):
    trainer = trainer_of("internvl", tmp_path)
    sampler = balance(trainer, LIMITS["internvl"])
    line = capsys.readouterr().out
    packs = len(sampler)
    assert re.search(
        rf"omnibal: 11 samples in {packs} packs, {11 / packs:.1f} a pack; {packs // 2} steps an epoch", line
    )
    assert "(2 were set)" in line
    assert "random batches of 1: Dist Ratio 0.0%" in line


def test_evaluation_keeps_its_batches(tmp_path):
    trainer = trainer_of("internvl", tmp_path, per_device_eval_batch_size=3)
    items = items_of("internvl")
    trainer.eval_dataset = items[:3]
    balance(trainer, LIMITS["internvl"])
    (batch,) = trainer.get_eval_dataloader()
    assert batch["input_ids"].shape[0] == 3
    expected = plain_backward(plain_family_model(small_config("internvl")), items[:3])[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Own(Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


@pytest.mark.parametrize(
    ("options", "change", "error", "message"),
    [
        ({"train_sampling_strategy": "group_by_length"}, {}, ConfigError, "train_sampling_strategy must be random"),
        ({"remove_unused_columns": True}, {}, ConfigError, "remove_unused_columns must be False"),
        ({"label_smoothing_factor": 0.1}, {}, ConfigError, r"label_smoothing_factor must be 0.0 .* got 0.1"),
        ({}, {"compute_loss_func": min}, ConfigError, "compute_loss_func must be None"),
        ({}, {"__class__": Own}, ConfigError, "trainer must have Trainer's own get_train_dataloader, got that of Own"),
        ({}, {"train_dataset": Endless()}, DataError, "train_dataset must have a length and be read by index"),
        ({}, {"train_dataset": None}, DataError, "train_dataset must have a length and be read by index, got NoneType"),
    ],
)
def test_what_packs_would_break_is_refused(options, change, error, message, tmp_path):
    trainer = trainer_of("internvl", tmp_path, **options)
    for name, value in change.items():
        setattr(trainer, name, value)
    with pytest.raises(error, match=message):
        balance(trainer, PackLimits(7, 60))


def test_lengths_of_another_dataset_are_refused(tmp_path):
    balanced = partial(balance, trainer_of("internvl", tmp_path), PackLimits(7, 60))
    with pytest.raises(DataError, match="lengths must be those of the dataset's 11 samples, got 2"):
        balanced(lengths=SampleLengths([1, 1], [9, 9]))
