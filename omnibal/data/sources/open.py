"""A dataset by what its file looks like."""

from pathlib import Path
from typing import Any

from omnibal.data.sources.conversations import ConversationDataset
from omnibal.data.sources.internvl import InternVLDataset
from omnibal.data.sources.llava import LlavaDataset
from omnibal.errors import ConfigError, DataError


def open_dataset(
    path: str | Path, processor_folder: str | Path, *, image_folder: str | Path | None = None, **options: Any
) -> ConversationDataset:
    """Opens an InternVL meta file (a ``.json`` that holds an object) or a LLaVA annotation file (any other).

    Args:
        path: The file.
        processor_folder: Hugging Face folder of the model.
        image_folder: What the images of an annotation file are relative to, by default the file's own folder; a meta
            file names its own.
        options: See `InternVLDataset` and `LlavaDataset`.

    Raises:
        DataError: If the file cannot be used.
        ConfigError: If the model's folder cannot be used, or an image folder is given for a meta file.
    """
    path = Path(path)
    if not _is_meta(path):
        return LlavaDataset(path, path.parent if image_folder is None else image_folder, processor_folder, **options)
    if image_folder is not None:
        raise ConfigError(f"image_folder must be left out for a meta file, which names its own, got {image_folder}")
    return InternVLDataset(path, processor_folder, **options)


def _is_meta(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return path.suffix == ".json" and file.read(1024).lstrip().startswith("{")
    except (OSError, ValueError) as error:
        raise DataError(f"dataset must be a readable text file, got {path} ({error})") from error
