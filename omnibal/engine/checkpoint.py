"""Checkpoints: what lies beside DeepSpeed's files, which ones are kept, and the way back to a Hugging Face folder."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omnibal.data.sources.folder import said
from omnibal.errors import ConfigError
from omnibal.vlm import load_model
from omnibal.vlm.weights import save_model

LAYOUT_FILE = "omnibal.json"
MODEL_FOLDER = "model"
MODEL_FILES = (
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
"""What a checkpoint takes from the model's folder, where anything may lie: other weights, checkpoints themselves."""


def write_side_files(checkpoint: Path, layout: Mapping[str, Any], model_source: Path | None, config: Any) -> None:
    """Lay beside DeepSpeed's files what a resume checks and an export needs.

    Args:
        checkpoint: Folder of one checkpoint.
        layout: How the model was cut, as JSON.
        model_source: Hugging Face folder of the model; of it MODEL_FILES are copied.
        config: The model's transformers configuration.
    """
    folder = checkpoint / MODEL_FOLDER
    folder.mkdir(exist_ok=True)
    if model_source is not None:
        for path in {path for pattern in MODEL_FILES for path in model_source.glob(pattern) if path.is_file()}:
            target = folder / path.relative_to(model_source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    config.save_pretrained(folder)
    (checkpoint / LAYOUT_FILE).write_text(json.dumps(layout) + "\n")


def check_layout(checkpoint: Path, layout: Mapping[str, Any]) -> None:
    """Refuse to resume where optimizer states would land on other layers.

    Raises:
        ConfigError: The checkpoint is incomplete, or was written under another layout; the message names what differs.
    """
    try:
        saved = json.loads((checkpoint / LAYOUT_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"checkpoint must be a folder that omnibal wrote completely, got {checkpoint}: {error}"
        ) from error
    for key, value in layout.items():
        if saved.get(key, value) != value:  # an older omnibal wrote fewer keys
            raise ConfigError(
                f"{key} must be that of the checkpoint {checkpoint} ({saved.get(key)}) to resume, got {value}; "
                "to go on under another one, export the checkpoint and start from the exported model"
            )


def latest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint in a folder of checkpoints.

    Raises:
        ConfigError: There is none.
    """
    try:
        return folder / (folder / "latest").read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"checkpoints must hold a file 'latest' that names the newest one, got none in {folder}"
        ) from error


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the newest ``count`` checkpoints of a folder; never the one that ``latest`` names."""
    found = [path.parent for path in folder.glob(f"*/{LAYOUT_FILE}")]
    found.sort(key=lambda path: (path / LAYOUT_FILE).stat().st_mtime_ns, reverse=True)
    for path in found[count:]:
        if path != latest_checkpoint(folder):
            shutil.rmtree(path)


def export(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint as an ordinary Hugging Face model folder.

    Layers are read one at a time: the memory that it takes is that of one output shard.

    Args:
        checkpoint: Folder of one checkpoint, as ``OmnibalEngine.save_checkpoint`` wrote it.
        folder: Where the model goes: config, weights, tokenizer and preprocessor files.

    Raises:
        ConfigError: The checkpoint is incomplete.
    """
    source = checkpoint / MODEL_FOLDER
    if not (checkpoint / LAYOUT_FILE).is_file() or not source.is_dir():
        raise ConfigError(f"checkpoint must be a folder that omnibal wrote completely, got {checkpoint}")
    model = load_model(source)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    save_model(model, lambda index: _layer_state(checkpoint, index), folder)


def _layer_state(checkpoint: Path, index: int) -> dict[str, Tensor]:
    files = sorted(checkpoint.glob(f"layer_{index:02d}-*model_states.pt"))
    if len(files) != 1:
        raise ConfigError(f"checkpoint must hold one file for layer {index}, got {len(files)} in {checkpoint}")
    try:
        state: dict[str, Tensor] = torch.load(files[0], map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise what they trip over
        raise ConfigError(f"{files[0]} must be a whole file of a layer's weights, got {said(error)}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{files[0]} must hold a layer's weights by name, got {type(state).__name__}")
    return state
