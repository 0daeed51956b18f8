"""Plugins as their hosts load them; tools/hosts runs the real ones in environments of their own."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import omnibal
from omnibal.errors import ConfigError
from omnibal.integrations.plugins.llama_factory import use_packs
from omnibal.packs.collator import PER_IMAGE
from tests.integrations.items import Collate, config_of, items_of, items_of_kinds
from tests.vlm.families import plain_backward, plain_family_model

KINDS = {"images": "pixel_values", "videos": "pixel_values_videos", "audios": "input_features"}
PLUGINS = Path(omnibal.__path__[0]) / "integrations" / "plugins"


class Mixin:
    """Of ms-swift's trainers."""


class Factory:
    """LLaMA-Factory's collator takes fields out of what it gets, and hides a blank image or sound behind others."""

    def __init__(self, family, hidden):
        self.family, self.hidden = family, hidden

    def __call__(self, items):
        has = {kind for kind in KINDS if any([item.pop(kind) for item in items])}
        batch = Collate(self.family)(items) | {"position_ids": torch.zeros(1, 8)}
        batch.pop("mm_token_type_ids", None)
        for kind, item in self.hidden.items():
            if not has & ({"images", "videos"} if kind == "images" else {kind}):
                blank = Collate(self.family)([item])
                blank |= {
                    "attention_mask": 0 * blank["attention_mask"],
                    "labels": torch.full_like(blank["labels"], -100),
                }
                for name in ("input_ids", "labels", "attention_mask"):
                    batch[name] = torch.cat([batch[name], blank.pop(name)], dim=1)
                batch |= {name: value for name, value in blank.items() if name in PER_IMAGE}
        return batch


@pytest.fixture
def swift(monkeypatch):
    """The plugin, loaded by path beside a stand-in of the package."""
    for name in ("swift", "swift.trainers", "swift.trainers.mixin"):
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["swift.trainers.mixin"].DataLoaderMixin = Mixin
    spec = importlib.util.spec_from_file_location("plugin", PLUGINS / "ms_swift.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture
def trainer(tmp_path):
    numbers = {"gradient_accumulation_steps": 2, "seed": 0, "dataloader_num_workers": 0, "dataloader_pin_memory": False}
    numbers |= {"per_device_train_batch_size": 2, "num_train_epochs": 1, "max_steps": -1, "data_seed": None}
    numbers |= {"output_dir": str(tmp_path), "device": torch.device("cpu"), "gradient_checkpointing": False}
    trainer, model = Mixin(), plain_family_model(config_of("internvl"))
    accelerator = SimpleNamespace(split_batches=False, gradient_accumulation_steps=1, unwrap_model=lambda model: model)
    vars(trainer).update(args=SimpleNamespace(**numbers), train_dataset=items_of("internvl"), data_collator=list)
    vars(trainer).update(accelerator=accelerator, is_deepspeed_enabled=False, is_fsdp_enabled=False, model=model)
    trainer.compute_loss = None
    return trainer


def test_the_plugin_of_swift_replaces_the_loader_for_good(swift, trainer, monkeypatch):
    monkeypatch.setenv("OMNIBAL_LIMITS", "7,60")
    args = trainer.args
    loader = trainer.get_train_dataloader()
    assert sum(len(pack) for pack in loader.pack_sampler) == 11
    assert trainer.args is args  # training has begun with them
    assert args.gradient_accumulation_steps == loader.pack_sampler.micro_batches
    assert trainer.get_train_dataloader(skip_batches=3) is loader


@pytest.mark.parametrize("limits", [None, "7", "7,many"])
def test_limits_are_two_numbers(swift, trainer, monkeypatch, limits):
    monkeypatch.delenv("OMNIBAL_LIMITS", raising=False)
    if limits is not None:
        monkeypatch.setenv("OMNIBAL_LIMITS", limits)
    with pytest.raises(ConfigError, match="OMNIBAL_LIMITS must be the vision units and LLM tokens of a pack, such as"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize(
    ("family", "kinds", "hidden", "limits"),
    [
        ("internvl", None, {"images": 0}, "4,40"),
        ("qwen2_5_vl", ("video", "", "image+video", "image", "video+video", ""), {"images": 3}, "300,60"),
        ("qwen2_5_omni_thinker", ("sound", "", "image+sound", "image"), {"images": 3, "audios": 0}, "80,60"),
    ],
)
def test_llama_factory_trains_samples_as_they_are(family, kinds, hidden, limits, trainer, monkeypatch):
    monkeypatch.setenv("OMNIBAL_LIMITS", limits)
    items = items_of(family) if kinds is None else items_of_kinds(family, kinds)
    own = Factory(family, {kind: items[number] for kind, number in hidden.items()})
    model = plain_family_model(config_of(family))
    trainer.train_dataset = [
        item | {kind: ["a file"] if item.get(name) is not None else [] for kind, name in KINDS.items()}
        for item in items
    ]
    trainer.data_collator, trainer.model = own, model
    use_packs(trainer)
    assert trainer.data_collator is own
    loader = trainer.get_train_dataloader()
    packs = [
        pack for step in range(loader.pack_sampler.num_steps) for pack in loader.pack_sampler.packs_of_all_ranks(step)
    ]
    batches = [batch for batch, _ in zip(loader, packs, strict=True)]
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    found = 0
    for batch in batches:
        labels = batch.pop("labels")
        found += trainer.compute_loss_func(model(**batch), labels, num_items_in_batch=targets).item()
    expected = plain_backward(model, [items[sample] for pack in packs for sample in pack])[0]
    assert found == pytest.approx(expected, rel=1e-5)
