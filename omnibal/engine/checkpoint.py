"""Checkpoints: what lies beside DeepSpeed's files, and the way back to a Hugging Face folder."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omnibal.config import RunFiles
from omnibal.engine.resolve import ResolvedRun
from omnibal.engine.saved_files import (
    BASE_WEIGHTS,
    MANIFEST,
    fingerprint,
    latest_checkpoint,
    layer_files,
    offer,
    problem_of,
    read_manifest,
)
from omnibal.errors import ConfigError, said
from omnibal.records import load_json
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.lora import ADAPTER_CONFIG, StateOf, add_adapters, base_of, load_adapters, merged_states, save_adapters
from omnibal.vlm.weights import has_weights, other_names, save_model, spare_weights, whole_state

MODEL_FOLDER: Final = "model"  # within a checkpoint
SPARE_FILE: Final = "spare.safetensors"  # in the model's folder: weights that no layer has
# In the model's folder: names of weights in the folder that the run began with, where they are not the published ones.
NAMES_FILE: Final = "weight_names.json"
# What a checkpoint takes from the model's folder, where anything may lie: other weights, checkpoints themselves.
MODEL_FILES: Final = (
    "*config.json",  # of the model, its tokenizer and processors, generation
    "tokenizer.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "tokenization_*.py",  # tokenizers and processors that come with their own code
    "*processing_*.py",
    "configuration_*.py",
)


def write_model_files(checkpoint: Path, resolved: ResolvedRun, spare: Mapping[str, Tensor]) -> list[Path]:
    """Lay into a checkpoint what an export needs beside layers: MODEL_FILES, ``spare`` weights, how adapters lie."""
    folder = checkpoint / MODEL_FOLDER
    folder.mkdir(exist_ok=True)
    if resolved.folder is not None:
        found = {path for pattern in MODEL_FILES for path in resolved.folder.glob(pattern) if path.is_file()}
        for path in found - {resolved.folder / ADAPTER_CONFIG}:
            target = folder / path.relative_to(resolved.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        if has_weights(resolved.folder):
            names = other_names(load_model(resolved.vlm.config), resolved.folder)
            (folder / NAMES_FILE).write_text(json.dumps(names))
    resolved.vlm.config.save_pretrained(folder)
    if resolved.vlm.adapters is not None:
        # peft reads the base model by this name. Of random weights there is none.
        in_folder = resolved.base and resolved.base.absolute()
        base = resolved.vlm.config.name_or_path if resolved.folder is None else in_folder
        replace(resolved.vlm.adapters, base_model_name_or_path=str(base) if base else None).save_pretrained(folder)
    if spare and resolved.base is None:
        save_file(dict(spare), folder / SPARE_FILE)
    return [path for path in folder.rglob("*") if path.is_file()]


def export(checkpoint: Path, folder: Path, *, merged: bool = False) -> None:
    """Write a checkpoint as an ordinary Hugging Face model folder; of adapters, as peft's.

    ``merged`` adds adapters to the weights that they were trained beside, and writes the whole model.
    """
    problem = problem_of(checkpoint, lambda name, saved: name.startswith(("layer_", f"{MODEL_FOLDER}/")))
    if problem is not None:
        raise ConfigError(problem + offer(checkpoint.parent, without=checkpoint.name))
    if merged and not (checkpoint / MODEL_FOLDER / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"checkpoint must hold adapters to be merged, got {checkpoint} without any")
    saved, base = read_manifest(checkpoint), base_of(load_adapters(checkpoint / MODEL_FOLDER)) if merged else None
    if BASE_WEIGHTS in saved and base is not None and has_weights(base) and fingerprint(base) != saved[BASE_WEIGHTS]:
        raise ConfigError(
            f"{base} must hold the weights that the adapters of {checkpoint} were trained beside, got others"
        )
    join_layers(checkpoint, folder, merged=merged)


def export_newest(files: RunFiles) -> Path:
    """Write a run's newest checkpoint as a Hugging Face folder, unless it is there already; the folder."""
    checkpoint = latest_checkpoint(files.checkpoints)
    manifest = checkpoint / MANIFEST
    # The time tells it from a checkpoint of the same name that a run which began anew has written since.
    source = {"checkpoint": checkpoint.name, "written": manifest.stat().st_mtime_ns if manifest.is_file() else None}
    kept: Any = None
    with suppress(OSError, ValueError):
        kept = load_json(files.exported)
    if not files.model.is_dir() or kept != source:
        files.exported.unlink(missing_ok=True)
        export(checkpoint, files.model)
        files.exported.write_text(json.dumps(source) + "\n")
    return files.model


def join_layers(layers: Path, folder: Path, *, merged: bool = False) -> None:
    """As ``export``, of a folder that only this run has written; ``merged`` matters to adapters only."""
    # Layers are read one at a time, when save_model asks for their state. Of adapters: either peft's files alone, or
    # each layer's weights from the base model with what the adapters add.
    source = layers / MODEL_FOLDER
    model, adapters = load_model(source), load_adapters(source)
    state_of: StateOf = partial(_layer_state, layers, model)
    own = shutil.ignore_patterns(SPARE_FILE, NAMES_FILE, ADAPTER_CONFIG)
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=own)
    spare = load_file(source / SPARE_FILE) if (source / SPARE_FILE).is_file() else {}
    if adapters is not None:
        adapted, base = load_model(source), base_of(adapters)
        add_adapters(adapted, adapters)
        state_of = partial(_layer_state, layers, adapted)
        if not merged:
            save_adapters(adapted, state_of, folder)
            return
        state_of, spare = merged_states(adapted, state_of, base), spare or spare_weights(model, base, seed=0)
    names = load_json(source / NAMES_FILE) if (source / NAMES_FILE).is_file() else {}
    save_model(model, state_of, folder, spare=spare, names=names)


def _layer_state(checkpoint: Path, model: VisionLanguageModel, index: int) -> dict[str, Tensor]:
    """The whole weights of a layer, which is in one file, or in one file for each tensor rank."""
    return whole_state(model, index, [_read_layer(path) for path in layer_files(checkpoint, index)])


def _read_layer(path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise what they trip over
        raise ConfigError(f"{path} must be a whole file of a layer's weights, got {said(error)}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{path} must hold a layer's weights by name, got {type(state).__name__}")
    return state
