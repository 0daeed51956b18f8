"""From the states of layers with adapters to peft's file, or to the weights of the model that they are merged into."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from omnibal.errors import ConfigError
from omnibal.vlm.layers import BASE_LAYER, VisionLanguageModel, adapter_name, is_adapter
from omnibal.vlm.lora import trained_name
from omnibal.vlm.weights import has_weights, load_layer

ADAPTER_FILE: Final = "adapter_model.safetensors"
StateOf = Callable[[int], Mapping[str, Tensor]]
"""From a layer's index to the state of the layer with adapters; weights that are not trained may be missing."""


def save_adapters(model: VisionLanguageModel, state_of: StateOf, folder: Path) -> None:
    """Write adapters and modules that were trained whole, as ``PeftModel.from_pretrained`` reads them.

    Args:
        model: With adapters.
        state_of: Called once per layer.
        folder: Where the two files go.
    """
    tied: Mapping[str, str] = model.skeleton.all_tied_weights_keys
    copies = {source: name for name, source in tied.items()}
    found = {}
    for index in range(len(model.records)):
        if model.first_tied(index) != index:
            continue
        state = state_of(index)
        for name, path in model.paths(index).items():
            if name in state and trained_name(model, path):
                found[adapter_name(path)] = state[name].contiguous()
                if path in copies:  # a copy in peft's model, which ties no module that it saves
                    found[adapter_name(copies[path])] = state[name].clone()
    save_file(found, folder / ADAPTER_FILE, metadata={"format": "pt"})
    replace(model.adapters, inference_mode=True).save_pretrained(folder)


def merged_states(model: VisionLanguageModel, state_of: StateOf, base: Path | None) -> StateOf:
    """The states of layers without adapters, which are added to the weights; computed in float32, rounded once.

    Args:
        model: With adapters.
        state_of: The states of its layers.
        base: Folder of the weights that the states do not hold.

    Raises:
        ConfigError: The states do not hold all weights, and nor does the folder.
    """
    from peft.tuners.lora import LoraLayer

    dtype = next(tensor.dtype for index in range(len(model.records)) for tensor in state_of(index).values())

    def merged(index: int) -> dict[str, Tensor]:
        layer, state = model.build_layer(index, seed=None), state_of(index)
        if layer.state_dict().keys() - state.keys():
            if base is None or not has_weights(base):
                raise ConfigError(
                    f"model of the adapters must be in the folder that they name, got no weights in {base}"
                )
            load_layer(model, index, layer, base)
        layer.load_state_dict(state, strict=False)
        for module in layer.modules():
            if isinstance(module, LoraLayer):
                module.merge()
        weights = {name: tensor for name, tensor in layer.state_dict().items() if not is_adapter(name)}
        return {name.replace(BASE_LAYER, "."): tensor.to(dtype) for name, tensor in weights.items()}

    return torch.no_grad()(merged)
