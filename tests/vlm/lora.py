"""A model's adapters, by the names that peft gives them."""

import warnings

import torch
from peft import get_peft_model

from omnibal.vlm.layers import is_adapter


def initial_adapters(model, seed=0):
    """As its layers are built with them."""
    found = {}
    for index in range(len(model.records)):
        names = model.weight_names(index)
        state = model.build_layer(index, seed=seed).state_dict()
        found |= {names[name]: tensor for name, tensor in state.items() if is_adapter(name)}
    return found


def adapted_model(plain, model, dtype=torch.float32):
    """Peft's model on plain transformers, with the adapters that our layers are built with, as a dtype holds them."""
    with warnings.catch_warnings(action="ignore"):  # that an embedding is tied
        adapted = get_peft_model(plain, model.adapters)
    named = named_in(adapted)
    with torch.no_grad():
        for name, weight in initial_adapters(model).items():
            named[name].copy_(weight.to(dtype))
    return adapted


def named_in(adapted):
    """The parameters of peft's model, by their names without that of the set of adapters."""
    return {name.replace(".default", ""): parameter for name, parameter in adapted.named_parameters()}


def theirs(model, name):
    """The name in peft's model of a weight that is trained, by its name on disk."""
    if is_adapter(name):
        return name
    paths = [path for index in range(len(model.records)) for path in model.paths(index).values()]
    path = next(path for path in paths if model.disk_name(path) == name)
    owner = path.rpartition(".")[0]
    saved = max((part for part in model.adapters.modules_to_save if f"{owner}.".startswith(f"{part}.")), key=len)
    return f"base_model.model.{saved}.modules_to_save{path.removeprefix(saved)}"
