"""What the examples train: a tiny InternVL with random weights, on made-up pictures and questions."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from omnibal import PackLimits
from omnibal.demo import write_demo
from omnibal.formats.conversations import ConversationDataset, open_dataset

LIMITS = PackLimits(vision_units=12, llm_tokens=512)
ADAM = {"lr": 1e-3}


def demo(folder: Path, samples: int = 200) -> tuple[PreTrainedModel, ConversationDataset]:
    """A model and a dataset of ``{"input_ids", "labels", "pixel_values"}``, the same in all processes."""
    paths = write_demo(folder / f"data{os.environ.get('RANK', '0')}", samples=samples, held_out=20)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(paths.model))
    return model, open_dataset(paths.meta, paths.model)


def own_device() -> torch.device:
    """This process's GPU where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """A collator as people have it: it pads texts to the longest, and lays tiles one after another."""
    longest = max(len(item["input_ids"]) for item in items)
    missing = [longest - len(item["input_ids"]) for item in items]
    padded = {
        name: torch.stack(
            [torch.nn.functional.pad(item[name], (0, n), value=v) for item, n in zip(items, missing, strict=True)]
        )
        for name, v in (("input_ids", 0), ("labels", -100))
    }
    mask = torch.arange(longest) < longest - torch.tensor(missing)[:, None]
    tiles = [item["pixel_values"] for item in items if item["pixel_values"] is not None]
    return padded | {"attention_mask": mask.long()} | ({"pixel_values": torch.cat(tiles)} if tiles else {})
