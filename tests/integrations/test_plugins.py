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
from tests.families.models import small_config
from tests.integrations.items import Collate, items_of
from tests.vlm.families import IMAGE_TOKEN, plain_backward, plain_family_model

PLUGINS = Path(omnibal.__path__[0]) / "integrations" / "plugins"


class Mixin:
    """Of ms-swift's trainers."""


class Factory:
    """LLaMA-Factory's collator: it takes fields out of what it gets, and hides a blank image behind plain texts."""

    def __call__(self, items):
        blank = [torch.zeros(1, 3, 16, 16)] if not any(item.pop("images") for item in items) else []
        batch = Collate("internvl")(items) | {"position_ids": torch.zeros(1, 8)}
        if blank:
            for name, value in (("input_ids", IMAGE_TOKEN), ("labels", -100), ("attention_mask", 0)):
                batch[name] = torch.nn.functional.pad(batch[name], (0, 4), value=value)
            batch["pixel_values"] = blank[0]
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
    numbers["output_dir"] = str(tmp_path)
    trainer = Mixin()
    vars(trainer).update(args=SimpleNamespace(**numbers), train_dataset=items_of("internvl"), data_collator=list)
    return trainer


def test_the_plugin_of_swift_replaces_the_loader_for_good(swift, trainer, monkeypatch):
    monkeypatch.setenv("OMNIBAL_LIMITS", "7,60")
    loader = trainer.get_train_dataloader()
    assert sum(len(pack) for pack in loader.pack_sampler) == 11
    assert trainer.get_train_dataloader(skip_batches=3) is loader


@pytest.mark.parametrize("limits", [None, "7", "7,many"])
def test_limits_are_two_numbers(swift, trainer, monkeypatch, limits):
    monkeypatch.delenv("OMNIBAL_LIMITS", raising=False)
    if limits is not None:
        monkeypatch.setenv("OMNIBAL_LIMITS", limits)
    with pytest.raises(ConfigError, match="OMNIBAL_LIMITS must be the vision units and LLM tokens of a pack, such as"):
        trainer.get_train_dataloader()


def test_llama_factory_trains_samples_as_they_are(trainer, monkeypatch):
    monkeypatch.setenv("OMNIBAL_LIMITS", "4,40")
    items, model, own = items_of("internvl"), plain_family_model(small_config("internvl")), Factory()
    trainer.train_dataset = [item | {"images": [] if item["pixel_values"] is None else ["a.png"]} for item in items]
    trainer.data_collator, trainer.model = own, model
    use_packs(trainer)
    assert trainer.data_collator is own
    loader = trainer.get_train_dataloader()
    packs = loader.pack_sampler.packs_of_all_ranks(0)
    batches = [batch for batch, _ in zip(loader, packs, strict=False)]
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    found = 0
    for batch in batches:
        labels = batch.pop("labels")
        found += trainer.compute_loss_func(model(**batch), labels, num_items_in_batch=targets).item()
    expected = plain_backward(model, [items[sample] for pack in packs for sample in pack])[0]
    assert found == pytest.approx(expected, rel=1e-5)
