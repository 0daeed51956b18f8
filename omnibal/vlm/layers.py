"""The contract of every family: a Hugging Face model as a list of pipeline layers, each built on its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnibal.families.base import LayerRecord
from omnibal.vlm.payload import Layout


@dataclass(frozen=True)
class LayerRecipe:
    """How to make one pipeline layer out of a Hugging Face model.

    Attributes:
        layer_class: Called with the model's config and the parts; keeps each part under the name it came by.
        parts: From that name to the path of a module in the Hugging Face model.
    """

    layer_class: type[nn.Module]
    parts: Mapping[str, str]


class VisionLanguageModel:
    """A Hugging Face vision-language model as a list of pipeline layers.

    Attributes:
        config: The model's transformers configuration.
        records: One per layer, first to last.
        skeleton: The whole Hugging Face model on the meta device: its modules and names, no memory.
        pixel_shape: Channels, height and width of a tile.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        records: tuple[LayerRecord, ...],
        recipes: tuple[LayerRecipe, ...],
        *,
        disk_prefixes: Mapping[str, str],
        pixel_shape: tuple[int, int, int],
    ) -> None:
        """Bring together what a family knows.

        Args:
            skeleton: The Hugging Face model on the meta device.
            records: The family's layer records.
            recipes: How to make each layer.
            disk_prefixes: From prefixes of parameter names in memory to those in a folder of weights.
            pixel_shape: Channels, height and width of a tile.
        """
        assert len(records) == len(recipes)
        self.config: PreTrainedConfig = skeleton.config
        self.records = records
        self.skeleton = skeleton
        self.pixel_shape = pixel_shape
        self._recipes = recipes
        self._disk_prefixes = disk_prefixes

    def layout(self, boundary: int) -> Layout:
        """What a cut before layer ``boundary`` sends; at 0 what the model is given, at the end what it gives."""
        assert 0 <= boundary <= len(self.records)
        return Layout()

    def layer_class(self, index: int) -> type[nn.Module]:
        """The class of layer ``index``."""
        return self._recipes[index].layer_class

    def build_layer(
        self, index: int, *, seed: int | None, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """Build one layer, with transformers' initial weights.

        The weights depend on the seed and the layer's index alone (for tied layers, the first index of their key):
        not on what else is built, nor on dtype, device or the random state outside, which stays as it was. They are
        drawn in float32 on the CPU, since a GPU's generator gives other numbers.

        Args:
            index: Which layer.
            seed: Of the initial weights; None leaves every weight NaN, for a layer whose weights are loaded next.
            dtype: Of the parameters; buffers such as rotary frequencies keep float32.
            device: Where the layer ends up.
        """
        recipe = self._recipes[index]
        parts = {name: deepcopy(self.skeleton.get_submodule(path)) for name, path in recipe.parts.items()}
        layer = recipe.layer_class(self.config, **parts).to_empty(device="cpu")
        for tensor in layer.state_dict().values():
            tensor.fill_(torch.nan)
        with _forked_generator(seed, self.first_tied(index)):
            for name, path in recipe.parts.items():
                _initialise(parts[name], self._initialiser(path), weights=seed is not None)
        assert seed is None or not any(tensor.isnan().any() for tensor in layer.state_dict().values())
        return layer.to(device=device, dtype=dtype)

    def weight_names(self, index: int) -> dict[str, str]:
        """From names in layer ``index``'s ``state_dict()`` to names in a Hugging Face folder of weights."""
        return {
            f"{part}.{name}": self.disk_name(f"{path}.{name}")
            for part, path in self._recipes[index].parts.items()
            for name in self.skeleton.get_submodule(path).state_dict()
        }

    @property
    def tied_names(self) -> dict[str, str]:
        """From names on disk of weights that are another's to that other's name; empty for an untied model."""
        tied: dict[str, str] = self.skeleton.all_tied_weights_keys
        return {self.disk_name(name): self.disk_name(source) for name, source in tied.items()}

    def disk_name(self, name: str) -> str:
        """The name on disk of a parameter of the Hugging Face model; names on disk stay as they are."""
        for prefix, disk_prefix in self._disk_prefixes.items():
            if name.startswith(prefix):
                return disk_prefix + name.removeprefix(prefix)
        return name

    def first_tied(self, index: int) -> int:
        """The first layer that holds the weights of layer ``index``: itself, unless it is tied to an earlier one."""
        key = self.records[index].tied_key
        return index if key is None else [record.tied_key for record in self.records].index(key)

    def _initialiser(self, path: str) -> PreTrainedModel:
        """The innermost model around ``path``: transformers lets each initialise its own modules, by its own config."""
        names = path.split(".")
        ancestors = (self.skeleton.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1))
        return next(ancestor for ancestor in ancestors if isinstance(ancestor, PreTrainedModel))


def _initialise(part: nn.Module, initialiser: Any, *, weights: bool) -> None:
    with torch.no_grad():
        for module in part.modules():
            if weights or not any(True for _ in module.parameters()):
                initialiser._init_weights(module)


@contextmanager
def _forked_generator(seed: int | None, index: int) -> Iterator[None]:
    """Let the CPU's generator be a function of ``(seed, index)`` for a while; other devices' are left alone."""
    with torch.random.fork_rng(devices=[]):
        state = np.random.SeedSequence((seed or 0, index)).generate_state(1, np.uint64)
        torch.default_generator.manual_seed(int(state[0]) >> 1)
        yield
