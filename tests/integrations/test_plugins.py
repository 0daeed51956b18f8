"""Plugins as their hosts load them; tools/hosts runs the real ones in environments of their own."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import omnibal
from omnibal.errors import ConfigError
from tests.integrations.items import items_of

PLUGINS = Path(omnibal.__path__[0]) / "integrations" / "plugins"


class Mixin:
    """Of ms-swift's trainers."""


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
def trainer():
    numbers = {"gradient_accumulation_steps": 2, "seed": 0, "dataloader_num_workers": 0, "dataloader_pin_memory": False}
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
