"""The contract of every family: a Hugging Face model as a list of pipeline layers, each built on its own."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnibal.errors import ConfigError, said
from omnibal.families import family_of
from omnibal.families.base import LayerRecord
from omnibal.families.parts import Cut, Slice
from omnibal.formats.collate import Positions
from omnibal.vlm.attention import PACKED_ATTENTION, ExactRotary
from omnibal.vlm.payload import SentTensors

# Names within peft: the only set of adapters, the prefix of names in its file, and the linear layer inside the module
# that adds an adapter to it.
ADAPTER = "default"
ADAPTER_PREFIX = "base_model.model."
BASE_LAYER = ".base_layer."
ADAPTER_STREAM = 1  # random numbers of adapters come from a stream of their own, beside that of a layer's weights


@dataclass(frozen=True)
class LayerRecipe:
    """How to make one pipeline layer out of a Hugging Face model."""

    layer_class: type[nn.Module]  # called with the model's config and the parts, by the names of its arguments
    # From the name of each part to the path of a module, or of a parameter, in the Hugging Face model:
    parts: Mapping[str, str]


class PartsLayer(nn.Module):
    """A pipeline layer whose parts of the Hugging Face model are its attributes, by the names of its recipe."""

    # The part ``rotary`` becomes an `ExactRotary`.

    def __init__(self, config: Any, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.config = config
        for name, part in parts.items():
            setattr(self, name, ExactRotary(part) if name == "rotary" else part)


class VisionLanguageModel:
    """A Hugging Face vision-language model as a list of pipeline layers.

    Args:
        skeleton: The whole Hugging Face model on the meta device: its modules and names, no memory.
        pixel_shape: Channels, height and width of a tile; how many values a patch has.
        image_integers: What the vision layers read of images beside their pixels, by the names of the Hugging Face
            model's arguments: the shape of one entry, such as ``(2,)`` of each image's size. Packs hold all entries.
        image_tokens: From these of a sample to how many tokens its images bring; None where each tile brings as many.
        made_images: From a number of vision units to made-up images, to measure layers on: how many units they have, as
            many as possible and no more, and these integers. None where each tile brings as many tokens.
        positions: Of a sample's tokens, from its token ids and these integers; None where they just count.
        features: Names of the features that a cut before each layer sends, and last those that the model gives.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        records: tuple[LayerRecord, ...],
        recipes: tuple[LayerRecipe, ...],
        *,
        pixel_shape: tuple[int, ...],
        image_integers: Mapping[str, tuple[int, ...]] | None = None,
        image_tokens: Callable[[Mapping[str, Tensor]], int] | None = None,
        made_images: Callable[[int], tuple[int, Mapping[str, Tensor]]] | None = None,
        positions: Positions | None = None,
        features: Sequence[tuple[str, ...]] | None = None,
    ) -> None:
        assert len(records) == len(recipes)
        self.config: PreTrainedConfig = skeleton.config
        self.skeleton = skeleton
        self.pixel_shape = pixel_shape
        self.image_integers = image_integers or {}
        self.image_tokens = image_tokens
        self.made_images = made_images
        self.positions = positions
        self.adapters: Any = None  # peft's configuration of the adapters that `omnibal.vlm.lora` has put in
        self.family = family_of({"model_type": skeleton.config.model_type})
        self._features = features or [()] * (len(records) + 1)
        assert len(self._features) == len(records) + 1
        self._recipes = recipes
        self._names: dict[int, dict[str, str]] = {}  # as `weight_names` found them
        # Records of a family know sizes alone; here the model is known, and the names of its weights.
        self.records = tuple(replace(record, weights=self.trained_weights(i)) for i, record in enumerate(records))

    def sent_tensors(self, boundary: int) -> SentTensors:
        """What a cut before layer ``boundary`` sends; at 0 the model's input, behind the last layer its output."""
        assert 0 <= boundary <= len(self.records)
        read_later = any(record.module != "language" for record in self.records[boundary:])
        images = self.image_integers if read_later else ()
        return SentTensors(self._features[boundary], ("input_ids", "position_ids", *images, "cu_seq_lens"))

    def layer_class(self, index: int) -> type[nn.Module]:
        return self._recipes[index].layer_class

    def build_layer(
        self, index: int, *, seed: int | None, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> nn.Module:
        """Build one layer, with transformers' initial weights; buffers such as rotary frequencies keep float32."""
        # The weights depend on the seed and the layer's index alone (for tied layers, the first index of their key).
        # Without a seed every weight is NaN, for a layer whose weights are loaded and whose adapters are drawn next.
        # Weights depend on nothing else that is built, nor on dtype, device or the random state outside. They are drawn
        # in float32 on the CPU, since a GPU's generator gives other numbers.
        recipe = self._recipes[index]
        parts = {name: deepcopy(self._part(path)) for name, path in recipe.parts.items()}
        layer = recipe.layer_class(self.config, **parts)
        # Without initial weights the layer is made in its final dtype: its memory never exceeds what it needs later.
        if seed is None:
            layer = layer.to(dtype=dtype)
        layer = layer.to_empty(device="cpu")
        _forget(layer)  # what nothing initialises stays NaN, and is noticed below
        with _forked_generator(seed, self.first_tied(index)):
            for name, path in recipe.parts.items():
                part = parts[name]
                if isinstance(part, nn.Module):
                    _initialise(part, self._initialiser(path), weights=seed is not None)
                elif seed is not None:
                    self._initialise_parameter(path, layer.get_parameter(name))
        if seed is not None:
            self.begin_adapters(index, layer, seed=seed)
        assert seed is None or not any(tensor.isnan().any() for tensor in layer.state_dict().values())
        return layer.to(device=device, dtype=dtype)

    def begin_adapters(self, index: int, layer: nn.Module, *, seed: int) -> None:
        """Give a layer of `build_layer` adapters with peft's initial weights, under which they add nothing yet."""
        with _forked_generator(seed, self.first_tied(index), ADAPTER_STREAM), torch.no_grad():
            for name, parameter in layer.named_parameters():
                # peft's own start: B is zero, so that A · B adds nothing.
                if ".lora_A." in name:
                    parameter.copy_(nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5)))
                elif ".lora_B." in name:
                    parameter.zero_()

    def paths(self, index: int) -> dict[str, str]:
        """From names in layer ``index``'s ``state_dict()`` to those in the Hugging Face model's."""
        found: dict[str, str] = {}
        for name, path in self._recipes[index].parts.items():
            part = self._part(path)
            inner = [f".{key}" for key in part.state_dict()] if isinstance(part, nn.Module) else [""]
            found |= {name + key: path + key for key in inner}
        return found

    def weight_names(self, index: int) -> Mapping[str, str]:
        """From names in layer ``index``'s ``state_dict()`` to names in a Hugging Face folder, or in peft's file."""
        if index not in self._names:  # of all layers each layer that is loaded asks for them
            self._names[index] = {name: self.disk_name(path) for name, path in self.paths(index).items()}
        return self._names[index]

    def begin_names(self) -> None:
        """Find names anew, since the skeleton has other weights."""
        self._names.clear()

    def cuts(self, index: int) -> dict[str, Cut]:
        """The modules of layer ``index`` that tensor ranks share, by their names in the layer."""
        found: dict[str, Cut] = {}
        for name, path in self._recipes[index].parts.items():
            part = self._part(path)
            modules = part.named_modules() if isinstance(part, nn.Module) else ()
            for inner in [inner for inner, module in modules if any(True for _ in module.parameters())]:
                end = f".{inner}" if inner else ""
                patterns = self.family.cuts.items()
                cut = next((cut for pattern, cut in patterns if fnmatchcase(f".{path}{end}", f"*.{pattern}")), None)
                if cut is not None:
                    found[name + end] = cut
        return found

    def slices(self, index: int, num_tensor: int, rank: int) -> dict[str, Slice]:
        """What a tensor rank holds of each weight of layer ``index``, by its name there; whole ones are left out."""
        cuts = self.cuts(index) if num_tensor > 1 else {}
        found = dict[str, Slice]()
        for name, path in self.paths(index).items() if cuts else ():
            cut = next((cut for module, cut in cuts.items() if name.startswith(f"{module}.")), None)
            # Of a row layer the bias is whole, and so is B of its adapter; of a column layer's adapter A is.
            is_whole = ".lora_B." in name or path.endswith("bias") if cut and cut.dim else ".lora_A." in name
            if cut is not None and not is_whole:
                width = self.shape(path)[cut.dim]
                found[name] = cut.slice(self.records[index].sizes, width, num_tensor, rank)
        return found

    def shape(self, path: str) -> tuple[int, ...]:
        part = self._part(path)
        assert isinstance(part, Tensor), "a weight's path"
        return tuple(part.shape)

    def parts(self, index: int) -> dict[str, nn.Module]:
        """The modules that layer ``index`` consists of, by their paths in the skeleton."""
        found = {path: self._part(path) for path in self._recipes[index].parts.values()}
        return {path: part for path, part in found.items() if isinstance(part, nn.Module)}

    def trained_weights(self, index: int) -> dict[str, int]:
        # A layer's constructor may set requires_grad: ask a layer on the meta device.
        recipe, names = self._recipes[index], self.weight_names(index)
        layer = recipe.layer_class(self.config, **{name: deepcopy(self._part(at)) for name, at in recipe.parts.items()})
        return {names[name]: weight.numel() for name, weight in layer.named_parameters() if weight.requires_grad}

    @cached_property
    def spare_names(self) -> tuple[str, ...]:
        """Names on disk of weights that no layer has, such as ViT blocks behind the last one whose output is read."""
        # They are neither computed nor trained, and exported as they were loaded.
        of_layers = {name for index in range(len(self.records)) for name in self.weight_names(index).values()}
        known = of_layers | self.tied_names.keys()
        return tuple(name for name in map(self.disk_name, self.skeleton.state_dict()) if name not in known)

    @property
    def tied_names(self) -> dict[str, str]:
        """From the name on disk of each tied weight to the name of the weight that it shares; empty if untied."""
        # transformers' own record of its ties, made when the model is.
        tied: dict[str, str] = self.skeleton.all_tied_weights_keys
        return {self.disk_name(name): self.disk_name(source) for name, source in tied.items()}

    def disk_name(self, name: str) -> str:
        """The name on disk of a parameter of the Hugging Face model; names on disk stay as they are."""
        if is_adapter(name):
            return adapter_name(name)
        name = name.replace(BASE_LAYER, ".")
        for prefix, disk_prefix in self.family.disk_prefixes.items():  # the first one that fits counts
            if name.startswith(prefix):
                return disk_prefix + name.removeprefix(prefix)
        return name

    def first_tied(self, index: int) -> int:
        """The first layer that holds the weights of layer ``index``: itself, unless it is tied to an earlier one."""
        key = self.records[index].tied_key
        return index if key is None else [record.tied_key for record in self.records].index(key)

    def shapes(self) -> dict[str, torch.Size]:
        return {self.disk_name(name): tensor.shape for name, tensor in self.skeleton.state_dict().items()}

    def _part(self, path: str) -> nn.Module | nn.Parameter:
        owner, _, name = path.rpartition(".")
        part: nn.Module | nn.Parameter = getattr(self.skeleton.get_submodule(owner), name)
        return part

    def _initialise_parameter(self, path: str, parameter: nn.Parameter) -> None:
        # transformers initialises whole modules: give it a copy of the module that has this parameter only.
        owner, _, name = path.rpartition(".")
        stand_in = copy(self.skeleton.get_submodule(owner))
        stand_in._parameters = {name: parameter}
        stand_in._modules = {}
        with torch.no_grad():
            initialiser: Any = self._initialiser(owner)
            initialiser._init_weights(stand_in)

    def _initialiser(self, path: str) -> PreTrainedModel:
        """The innermost transformers model around ``path``, whose config decides how its modules are initialised."""
        # Parts such as the ViT are PreTrainedModels of their own, with an initializer_range of their own.
        names = path.split(".")
        ancestors = (self.skeleton.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1))
        return next(ancestor for ancestor in ancestors if isinstance(ancestor, PreTrainedModel))


def skeleton_of(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    # No memory is taken: tensors on the meta device have shapes only.
    with torch.device("meta"):
        try:
            skeleton: PreTrainedModel = model_class._from_config(config, attn_implementation=PACKED_ATTENTION)
        except (KeyError, RuntimeError) as error:  # an activation that does not exist, sizes beyond any memory
            raise ConfigError(f"configuration must describe a model that can be built, got {said(error)}") from error
    return skeleton


def _initialise(part: nn.Module, initialiser: Any, *, weights: bool) -> None:
    """Initialise weights if they are wanted, and always buffers that no file holds, such as rotary frequencies."""
    with torch.no_grad():
        for name, module in part.named_modules():
            if (weights and not is_adapter(name)) or module._non_persistent_buffers_set:
                initialiser._init_weights(module)
        if not weights:
            _forget(part)


def _forget(module: nn.Module) -> None:
    for tensor in module.state_dict().values():
        tensor.fill_(torch.nan)  # to_empty leaves whatever was in memory, which may look like weights


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def adapter_name(path: str) -> str:
    """The name in peft's file of a weight of the Hugging Face model that it has put adapters into."""
    return ADAPTER_PREFIX + path.removeprefix(ADAPTER_PREFIX).replace(f".{ADAPTER}.", ".")


@contextmanager
def _forked_generator(seed: int | None, *key: int) -> Iterator[None]:
    """Let the CPU's generator be a function of seed and key for a while; other devices' are left alone."""
    with torch.random.fork_rng(devices=[]):
        state = np.random.SeedSequence((seed or 0, *key)).generate_state(1, np.uint64)
        torch.default_generator.manual_seed(int(state[0]) >> 1)
        yield
