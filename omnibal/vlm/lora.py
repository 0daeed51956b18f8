"""LoRA through peft: which layers get adapters, a model built with them, and what is written of it, apart or merged."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from omnibal.config.section import LoraSection
from omnibal.errors import ConfigError, require
from omnibal.families.base import ADAPTER_SIZES, LayerRecord, common_name, is_named
from omnibal.vlm.layers import BASE_LAYER, VisionLanguageModel, adapter_name, is_adapter
from omnibal.vlm.weights import has_weights, load_layer, save_tensors

ADAPTER_CONFIG: Final = "adapter_config.json"


def adapters_of(model: VisionLanguageModel, settings: LoraSection, frozen: Collection[str] = ()) -> Any:
    """Peft's configuration of what the settings ask for: every adapted layer, and every module to save, by its path."""
    # ``frozen`` gets no adapter and is not trained whole either.
    require("peft")
    from peft import LoraConfig

    def whole(path: str) -> list[str]:  # peft saves all of a module
        return [name for name, _ in model.skeleton.get_submodule(path).named_parameters()]

    # A module that is saved whole needs no adapters within, and none of its own modules saved again.
    def has_weights(module: nn.Module) -> bool:
        return any(True for _ in module.parameters())

    found = _chosen(model, "modules_to_save", settings.modules_to_save, frozen, has_weights, whole)
    saved = [path for path in found if not _within(path, [other for other in found if other != path])]
    linear = _chosen(
        model, "targets", settings.targets, frozen, lambda module: type(module) is nn.Linear, lambda path: ["weight"]
    )
    targets = [path for path in linear if not _within(path, saved)]
    if not targets:
        named = ", ".join(settings.targets)
        raise ConfigError(f"omnibal.model.lora.targets must name a part that modules_to_save does not, got {named}")
    # Of modules that share weights peft saves copies of both.
    tied = model.skeleton.all_tied_weights_keys.items()
    twins = [name.rpartition(".")[0] for name, source in tied if source.rpartition(".")[0] in saved]
    # peft matches the ends of paths; whole paths name one module each. By default alpha is twice the rank.
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha or 2 * settings.rank,
        lora_dropout=settings.dropout,
        target_modules=targets,
        modules_to_save=[*saved, *twins] or None,
    )


def add_adapters(model: VisionLanguageModel, config: Any) -> None:
    """Let a model build its layers with adapters by peft's configuration; else only modules to save are trained."""
    from peft import LoraConfig, inject_adapter_in_model

    # peft replaces modules of the skeleton in place: layers are copies of its parts, so they get adapters too.
    options = {"r": config.r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    try:
        inject_adapter_in_model(LoraConfig(**options, target_modules=config.target_modules), model.skeleton)
        for path in config.modules_to_save or ():
            model.skeleton.get_submodule(path).requires_grad_(True)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{ADAPTER_CONFIG} must be of this model, got {error}") from error
    model.begin_names()
    model.adapters = config
    model.records = tuple(_adapted(model, index, record) for index, record in enumerate(model.records))


def load_adapters(folder: str | Path) -> Any:
    if not (Path(folder) / ADAPTER_CONFIG).is_file():
        return None
    require("peft")
    from peft import LoraConfig

    return LoraConfig.from_pretrained(str(folder))


def base_of(adapters: Any) -> Path | None:
    return Path(adapters.base_model_name_or_path) if adapters.base_model_name_or_path else None


def _adapted(model: VisionLanguageModel, index: int, record: LayerRecord) -> LayerRecord:
    # An adapter is two matrices, in × rank and rank × out; under dropout it keeps an input of its own.
    found = [module for part in model.parts(index).values() for module in part.modules() if hasattr(module, "lora_A")]
    adapters: list[Any] = [module for module in found if module.lora_A]
    ranks = [module.lora_A["default"].out_features for module in adapters]
    numbers = sum(
        rank * (module.in_features + module.out_features) for rank, module in zip(ranks, adapters, strict=True)
    )
    inputs = sum(module.in_features for module in adapters) if model.adapters.lora_dropout else 0
    trained = model.trained_weights(index)
    parameters = record.sizes["parameters"] + numbers
    sizes = {"parameters": parameters, "untrained": parameters - sum(trained.values())}
    sizes |= dict(zip(ADAPTER_SIZES, (numbers, sum(ranks), inputs), strict=True))
    return replace(record, weights=dict.fromkeys(record.weights, 0) | trained, sizes={**record.sizes, **sizes})


def _chosen(
    model: VisionLanguageModel,
    key: str,
    words: Sequence[str],
    frozen: Collection[str],
    fits: Callable[[nn.Module], bool],
    deciding: Callable[[str], Sequence[str]],
) -> list[str]:
    """Paths of the modules that a setting's words stand for and that are not frozen, in the model's order."""
    # ``deciding`` goes from the path of a module to the names of its weights of which none may be frozen.
    # Only modules of the model's layers count, not what lies behind the features that it reads.
    modules = [(record, path) for record, path, module in _modules(model) if fits(module)]
    for word in words:
        if not any(_stands_for(word, record, path) for record, path in modules):
            raise ConfigError(_unknown(key, word, modules))
    wanted = [(record, path) for record, path in modules if any(_stands_for(word, record, path) for word in words)]
    free = [
        path
        for record, path in wanted
        if not any(record.freezes(model.disk_name(f"{path}.{name}"), frozen) for name in deciding(path))
    ]
    if words and not free:
        raise ConfigError(
            f"omnibal.model.lora.{key} must name a part that is not frozen, got {', '.join(words)} with "
            f"{', '.join(frozen)} frozen"
        )
    return list(dict.fromkeys(free))


def _modules(model: VisionLanguageModel) -> Iterator[tuple[LayerRecord, str, nn.Module]]:
    for index, record in enumerate(model.records):
        for path, part in model.parts(index).items():
            for inner, module in part.named_modules():
                yield record, f"{path}.{inner}" if inner else path, module


def _stands_for(word: str, record: LayerRecord, path: str) -> bool:
    """Whether a setting's word means a module of a layer; a whole module of the model never means its head."""
    if is_named(record, (word,)):
        return word != record.module or record.kind != "head"
    return path == word or path.endswith(f".{word}")


def _unknown(key: str, word: str, modules: Sequence[tuple[LayerRecord, str]]) -> str:
    ends = dict.fromkeys(end for _, path in modules if not (end := path.rpartition(".")[2]).isdecimal())
    known = dict.fromkeys(name for record, _ in modules for name in (record.module, common_name(record), record.kind))
    nearest = get_close_matches(word, [*known, *ends, *(path for _, path in modules)], n=3, cutoff=0.4)
    kind = "linear layers" if key == "targets" else "modules"
    known_names = [*known, *ends]
    remedy = f"did you mean {' or '.join(map(repr, nearest))}?" if nearest else f"known are {', '.join(known_names)}"
    return f"omnibal.model.lora.{key} must name {kind} of the model's layers, got {word!r}; {remedy}"


def _within(path: str, others: Sequence[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in others)


ADAPTER_FILE: Final = "adapter_model.safetensors"
# From a layer's index to the state of the layer with adapters; weights that are not trained may be missing.
StateOf = Callable[[int], Mapping[str, Tensor]]


def save_adapters(model: VisionLanguageModel, state_of: StateOf, folder: Path) -> None:
    """Write adapters and modules that were trained whole, as ``PeftModel.from_pretrained`` reads them."""
    # Peft's model ties no module that it saves: a tied weight is written under both names.
    tied: Mapping[str, str] = model.skeleton.all_tied_weights_keys
    copies = {source: name for name, source in tied.items()}
    found = {}
    for index in range(len(model.records)):
        if model.first_tied(index) != index:
            continue
        state = state_of(index)
        for name, path in model.paths(index).items():
            if name in state and (is_adapter(path) or _within(path, model.adapters.modules_to_save or ())):
                found[adapter_name(path)] = state[name].contiguous()
                if path in copies:
                    found[adapter_name(copies[path])] = state[name].clone()
    # As peft's own save does, the configuration is for inference.
    save_tensors(found, folder / ADAPTER_FILE)
    replace(model.adapters, inference_mode=True).save_pretrained(folder)


def merged_states(model: VisionLanguageModel, state_of: StateOf, base: Path | None) -> StateOf:
    """The states of layers without adapters, which are added to the weights; ``base`` has weights that states lack."""
    from peft.tuners.lora import LoraLayer

    dtype = next(tensor.dtype for index in range(len(model.records)) for tensor in state_of(index).values())

    def merged(index: int) -> dict[str, Tensor]:
        # Added in float32, rounded once.
        layer, state = model.build_layer(index, seed=None), state_of(index)
        if layer.state_dict().keys() - state.keys():
            if base is None or not has_weights(base):
                raise ConfigError(
                    f"model of the adapters must be in the folder that they name, got no weights in {base}"
                )
            load_layer(model, index, layer, base)
        layer.load_state_dict(state, strict=False)
        for module in layer.modules():  # peft's own merge: weight += B · A · alpha / rank
            if isinstance(module, LoraLayer):
                module.merge()
        weights = {name: tensor for name, tensor in layer.state_dict().items() if not is_adapter(name)}
        return {name.replace(BASE_LAYER, "."): tensor.to(dtype) for name, tensor in weights.items()}

    return torch.no_grad()(merged)
