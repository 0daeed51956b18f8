r"""Datasets as LLaVA's trainer takes them: JSON arrays (or JSON lines) of conversations, and a folder of images.

    [{"id": "1", "image": "coco/1.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat?"}, …]}, …]

Format: https://github.com/haotian-liu/LLaVA/blob/main/docs/Finetune_Custom_Data.md. InternVL took its entries over.
"""

from collections.abc import Sequence
from pathlib import Path

from omnibal.data.sources.conversations import ConversationDataset, index_folder
from omnibal.data.sources.formats import open_format
from omnibal.data.sources.problems import Broken
from omnibal.data.sources.records import Records
from omnibal.data.sources.shards import Shard


class LlavaDataset(ConversationDataset):
    """LLaVA's annotation files as samples, each item once.

    Args:
        annotations: One annotation file, or several.
        image_folder: What image paths are relative to.
        processor_folder: Hugging Face folder of the model: ``config.json``, ``preprocessor_config.json``, tokenizer.
            Samples can be trained on with an InternVL model; any other known family has lengths and token ids.
        max_tiles: Most tiles of an image where the family has such a limit; what the folder says by default.
        min_tiles: Fewest tiles, likewise.
        broken: ``"error"`` or ``"skip"``, see `ConversationDataset`.
        processes: See `ConversationDataset`.
        cache: See `ConversationDataset`.
        measured: See `ConversationDataset`.

    Raises:
        DataError: If an annotation file cannot be used.
        ConfigError: If the folder does not hold a known model.
    """

    def __init__(
        self,
        annotations: str | Path | Sequence[str | Path],
        image_folder: str | Path,
        processor_folder: str | Path,
        *,
        max_tiles: int | None = None,
        min_tiles: int | None = None,
        broken: Broken = "error",
        processes: int | None = None,
        cache: str | Path | None = None,
        measured: bool = False,
    ) -> None:
        files = [annotations] if isinstance(annotations, str | Path) else annotations
        shards = [_shard(Path(file), Path(image_folder), index_folder(cache)) for file in files]
        model_format = open_format(processor_folder, max_tiles=max_tiles, min_tiles=min_tiles)
        super().__init__(shards, model_format, broken=broken, processes=processes, cache=cache, measured=measured)


def _shard(file: Path, root: Path, index: Path | None) -> Shard:
    records = Records(file, index)
    return Shard(file.stem, records, root, len(records))
