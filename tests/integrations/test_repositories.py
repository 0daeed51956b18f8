"""Training code that cannot be installed: transformers' classes, and stand-ins for the data and collators of its own.

Each stand-in keeps the contract of the original: the fields of its items, what its collator makes of a list of them,
and what its model does with that.
"""

import importlib
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments

from omnibal.data.limits import PackLimits
from omnibal.errors import DataError
from omnibal.formats.collate import MropeRule, mrope_positions
from tests.families.models import PATCH, TILE, small_config
from tests.integrations.items import items_of
from tests.vlm.families import IMAGE_TOKEN, plain_backward, plain_family_model, plain_inputs

EXAMPLES = Path(__file__).parents[2] / "launch" / "examples"
LEARNING_RATE, MICRO_BATCHES, EPOCHS = 0.02, 2, 2


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


class Noting(list):
    """A dataset that notes what is read."""

    def __init__(self, items):
        super().__init__(items)
        self.read = []

    def __getitem__(self, sample):
        self.read.append(sample)
        return super().__getitem__(sample)


def trainer_of(model, items, collate, folder, kind=Trainer, **options):
    options = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False, "optim": "sgd",
        "gradient_accumulation_steps": MICRO_BATCHES, "learning_rate": LEARNING_RATE, "max_grad_norm": 0,
        "per_device_train_batch_size": 2,
        "lr_scheduler_type": "constant", "num_train_epochs": EPOCHS, "save_strategy": "no", "logging_strategy": "no",
        **options,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **options)
    return kind(model, arguments, data_collator=collate, train_dataset=Noting(items))


def check_steps(trainer, backward):
    """Train, and compare with a plain loop; ``backward(model, packs)`` adds the gradients of a step."""
    sampler = trainer.get_train_dataloader().pack_sampler
    trainer.train_dataset.read.clear()
    trainer.train()
    plain = plain_family_model(small_config(trainer.model.config.model_type))
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    read = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        steps = [sampler.packs_of_all_ranks(step) for step in range(sampler.num_steps)]
        assert sorted(s for packs in steps for pack in packs for s in pack) == list(range(len(sampler.lengths)))
        for packs in steps:
            read += [s for pack in packs for s in (*pack, *pack.fillers)]
            backward(plain, packs)
            optimizer.step()
            optimizer.zero_grad()
    assert trainer.train_dataset.read == read
    expected = dict(plain.named_parameters())
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-5, msg=name)


def exact(items):
    """The mean over all target tokens of a step."""
    return lambda model, packs: plain_backward(model, [items[sample] for pack in packs for sample in pack])


# qwen-vl-finetune: rows of one sample, and a collator that flattens them and gives bounds in place of a mask.


def qwen_item(sample):
    rows = {"input_ids": sample["input_ids"][None], "labels": sample["labels"][None]}
    positions = mrope_positions(sample["input_ids"], sample, MropeRule(IMAGE_TOKEN, 2))
    images = {name: sample[name] for name in ("pixel_values", "image_grid_thw") if sample.get(name) is not None}
    return rows | images | {"position_ids": positions[:, None], "attention_mask": [len(sample["input_ids"])]}


def flattened(instances):
    batch = {name: torch.cat([i[name] for i in instances], dim=1) for name in ("input_ids", "labels")}
    batch["position_ids"] = torch.cat([i["position_ids"] for i in instances], dim=2)
    sizes = torch.tensor([0, *(size for i in instances for size in i["attention_mask"])], dtype=torch.int32)
    batch["attention_mask"] = torch.cumsum(sizes, 0, dtype=torch.int32)
    for name in ("pixel_values", "image_grid_thw"):
        found = [i[name] for i in instances if name in i]
        batch[name] = torch.cat(found) if found else None
    return batch


def restarting(bounds):
    return torch.cat([torch.arange(int(size)) for size in bounds.diff()])


def read_qwen(_, args, inputs):
    """What its attention does: samples between bounds see themselves alone."""
    text = restarting(inputs["attention_mask"])[None, None]
    positions = torch.cat([text, inputs["position_ids"]])
    types = (inputs["input_ids"] == IMAGE_TOKEN).long()
    given = {"position_ids": positions, "attention_mask": None, "use_cache": False, "mm_token_type_ids": types}
    return args, inputs | given


def test_qwen_finetune(example, tmp_path):
    items = items_of("qwen2_5_vl")
    model = plain_family_model(small_config("qwen2_5_vl"))
    model.register_forward_pre_hook(read_qwen, with_kwargs=True)
    trainer = trainer_of(model, [qwen_item(item) for item in items], flattened, tmp_path)
    example("qwen_finetune").use_packs(trainer, PackLimits(200, 60))
    check_steps(trainer, exact(items))


# InternVL: a white tile where there is no image, packed buffers, and weights of tokens.


def internvl_item(sample):
    ids, pixels = sample["input_ids"], sample["pixel_values"]
    tiles = torch.ones(1, 3, 16, 16) if pixels is None else pixels
    flags = torch.full((len(tiles),), int(pixels is not None))
    tokens = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(len(ids))}
    return {"input_ids": ids, "labels": sample["labels"], **tokens, "pixel_values": tiles, "image_flags": flags}


def packed_collate(features):
    (buffer,) = features
    buffer = dict(buffer)
    for name in ("worker_state_key", "worker_state_dict", "type_ids"):
        buffer.pop(name)
    samples = buffer.pop("data_index")
    sizes = torch.bincount(samples)
    targets = buffer["labels"] != -100
    weight = torch.bincount(samples, weights=targets.double()).clamp(min=1).rsqrt()[samples]
    batch = {name: buffer[name][None] for name in ("input_ids", "labels", "position_ids")}
    batch |= {name: buffer[name] for name in ("pixel_values", "image_flags")}
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), sizes.cumsum(0).int()])
    return batch | {"attention_mask": bounds[None], "loss_weight": [torch.where(targets, weight, 0).tolist()]}


class InternVLTrainer(Trainer):
    """Its model drops features of white tiles, keeps to bounds, and weighs tokens within a micro-batch."""

    def compute_loss(self, model, inputs, **_):
        weight = torch.tensor(inputs["loss_weight"])[:, 1:]
        real = {"pixel_values": inputs["pixel_values"][inputs["image_flags"] == 1]}
        logits = model(
            input_ids=inputs["input_ids"],
            position_ids=restarting(inputs["attention_mask"][0])[None],
            use_cache=False,
            **(real if len(real["pixel_values"]) else {}),
        ).logits
        losses = cross_entropy(logits[0, :-1], inputs["labels"][0, 1:], reduction="none")
        return (losses * weight[0]).sum() / weight.sum()


def weighted(items):
    def backward(model, packs):
        for pack in packs:
            losses, weights = 0, 0
            for sample in pack:
                labels = items[sample]["labels"]
                weight = int((labels != -100).sum()) ** -0.5
                logits = model(**plain_inputs(items[sample])).logits[0]
                losses = losses + weight * cross_entropy(logits[:-1], labels[1:], reduction="sum")
                weights += weight * int((labels[1:] != -100).sum())
            (losses / weights / len(packs)).backward()

    return backward


def test_internvl_chat(example, tmp_path):
    items = items_of("internvl")
    model = plain_family_model(small_config("internvl"))
    trainer = trainer_of(
        model, [internvl_item(item) for item in items], packed_collate, tmp_path, InternVLTrainer
    )  # fmt: skip
    trainer.model_accepts_loss_kwargs = False  # as in its transformers, which counts no tokens
    example("internvl_chat").use_packs(trainer, PackLimits(7, 60))
    check_steps(trainer, weighted(items))


# LLaVA: a mark for an image, which the model expands row by row.

MARK, EXPANDED = -200, (TILE // PATCH) ** 2


def llava_items():
    """Samples with one image or none, with its tokens and with a mark in their place."""
    plain = [item for item in items_of("llava") if item["pixel_values"] is None or len(item["pixel_values"]) == 1]
    return plain, [llava_item(item) for item in plain]


def llava_item(sample):
    ids, labels = sample["input_ids"], sample["labels"]
    kept = torch.ones_like(ids, dtype=torch.bool)
    marks = torch.where(ids == IMAGE_TOKEN)[0]
    kept[marks[1:]] = False
    image = torch.zeros(3, TILE, TILE) if sample["pixel_values"] is None else sample["pixel_values"][0]
    return {
        "input_ids": torch.where(ids == IMAGE_TOKEN, MARK, ids)[kept], "labels": labels[kept], "image": image,
    }  # fmt: skip


def llava_collate(instances):
    batch = {
        name: pad_sequence([i[name] for i in instances], batch_first=True, padding_value=value)
        for name, value in (("input_ids", 0), ("labels", -100))
    }
    images = torch.stack([i["image"] for i in instances])
    return batch | {"attention_mask": batch["input_ids"] != 0, "images": images}


class LlavaTrainer(Trainer):
    """Its model puts images into texts, makes mask and positions anew, and here takes the step's mean, as ours does."""

    def compute_loss(self, model, inputs, num_items_in_batch=None, **_):
        rows, labels, with_image = [], [], []
        for ids, own, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
            repeats = torch.where(ids == MARK, EXPANDED, 1)[mask]
            rows.append(torch.where(ids == MARK, IMAGE_TOKEN, ids)[mask].repeat_interleave(repeats))
            labels.append(own[mask].repeat_interleave(repeats))
            with_image.append(bool((ids == MARK).any()))
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        images = inputs["images"][torch.tensor(with_image)]
        logits = model(
            input_ids=pad_sequence(rows, batch_first=True),
            attention_mask=mask,
            **({"pixel_values": images} if len(images) else {}),
        ).logits
        labels = pad_sequence(labels, batch_first=True, padding_value=-100)
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return losses / num_items_in_batch


def test_llava(example, tmp_path, monkeypatch):
    plain, items = llava_items()
    trainer = trainer_of(
        plain_family_model(small_config("llava")), items, llava_collate, tmp_path, LlavaTrainer
    )  # fmt: skip
    lines = example("llava_train")
    monkeypatch.setattr(lines, "PATCHES", EXPANDED)
    lines.use_balance(trainer, PackLimits(3, 80))
    assert trainer.get_train_dataloader().pack_sampler.lengths.llm_tokens.tolist() == [
        len(item["input_ids"]) for item in plain
    ]
    check_steps(trainer, exact(plain))


def test_a_repository_that_replaces_samples_is_noticed(example, tmp_path):
    """InternVL's and Qwen's datasets put another sample in the place of one that they cannot read."""
    items = [internvl_item(item) for item in items_of("internvl")]
    trainer = trainer_of(plain_family_model(small_config("internvl")), items, packed_collate, tmp_path, InternVLTrainer)
    trainer.model_accepts_loss_kwargs = False
    example("internvl_chat").use_packs(trainer, PackLimits(7, 60))
    list.__setitem__(trainer.train_dataset, 3, items[4])
    with pytest.raises(
        DataError,
        match=r"sample 3 must have .*, got .*put another sample in the place of one: .*check_lengths=False",
    ):
        trainer.train()
