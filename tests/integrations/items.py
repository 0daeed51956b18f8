"""Items of a user's dataset and a user's collator, for small models of every family that packs."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from omnibal.packs.collator import PER_IMAGE
from omnibal.packs.losses import loss_per_target
from tests.families.models import DROPPED_IN, PATCH, PINPOINTS, small_config
from tests.families.models import TILE as FIRST_TILE
from tests.integrations.sounds import SOUND_MODELS, sound_config, sound_items, sound_items_of_kinds
from tests.vlm.families import IMAGE_TOKEN, VIDEO_TOKEN, family_samples

TILED = ("idefics3", "smolvlm")
"""Families that pack, and that a pipeline does not know."""
UNPACKED = ("paligemma",)
"""Families whose attention cannot be packed."""
PADDED = ("llava_next", "llava_onevision")
TILE, TOKENS_PER_TILE = 16, 4

SHAPES = [
    ([(40, 23)], 7),
    ([], 5),
    ([(13, 37), (60, 61), (9, 50)], 9),
    ([(64, 15)], 4),
    ([], 12),
    ([(12, 12), (70, 11)], 6),
    ([(67, 71)], 5),
    ([], 30),
    ([(20, 20)], 11),
    ([], 8),
    ([(30, 50)], 6),
]


def config_of(model_type):
    """A small model's configuration; with two layers of a kind, which gradients pass and processes train fast."""
    if model_type in SOUND_MODELS:
        return sound_config(model_type)
    config = small_config(model_type)
    if model_type in DROPPED_IN:
        return config
    for part in [config.text_config, *([config.vision_config] if model_type == "internvl" else [])]:
        part.num_hidden_layers = 2
        if getattr(part, "layer_types", None):
            part.layer_types = part.layer_types[:2]
    return config


def items_of(model_type):
    """Samples with several images of unequal sizes, one or none."""
    match model_type:
        case "qwen2_audio" | "qwen2_5_omni_thinker":
            return sound_items(model_type)
        case "idefics3" | "smolvlm" | "gemma3" | "aya_vision":
            rows = by_row if model_type in TILED else (lambda pixels: pixels)
            return [item | {"pixel_values": rows(item["pixel_values"])} for item in _tiled_items(TOKENS_PER_TILE)]
        case "lfm2_vl" | "mistral3" | "gemma4":
            return _sized_items(model_type)
        case "paligemma":
            return _tiled_items(TILE, most=1)
        case "qwen3_5" | "qwen3_vl_moe" | "glm4v":
            return family_samples("qwen3_vl", SHAPES)
    items = family_samples(model_type, SHAPES)
    return [_with_padded_tiles(item) for item in items] if model_type in PADDED else items


def _with_padded_tiles(item):
    """Tiles by image, as transformers' processors give them: as many for each."""
    if item["pixel_values"] is None:
        return item
    counts = [image_size_to_num_patches(size, PINPOINTS, FIRST_TILE) for size in item["image_sizes"]]
    if item.get("batch_num_images", [1])[0] > 1:
        counts = [1] * len(counts)
    tiles = pad_sequence(item["pixel_values"].split(counts), batch_first=True)
    return item | {"pixel_values": tiles}


def by_row(pixels):
    """As Idefics3 takes the tiles of a batch of one."""
    return None if pixels is None else pixels[None]


def _tiled_items(tokens_per_tile, *, most=6):
    generator = torch.Generator().manual_seed(3)
    items = []
    for sizes, words in SHAPES:
        tiles = min(sum(1 + (width > 20) for width, _ in sizes), most)
        text = torch.randint(4, IMAGE_TOKEN, (words,), generator=generator)
        ids = torch.cat([text[:1], torch.full((tiles * tokens_per_tile,), IMAGE_TOKEN), text[1:]])
        labels = torch.where(torch.arange(len(ids)) < len(ids) - words // 2, -100, ids)
        pixels = torch.randn(tiles, 3, TILE, TILE, generator=generator) if tiles else None
        items.append({"input_ids": ids, "labels": labels, "pixel_values": pixels})
    return items


def _sized_items(model_type):
    """With one image of any size at most, and what says its size."""
    generator = torch.Generator().manual_seed(3)
    items = []
    for sizes, words in SHAPES:
        rows, columns = [2 + side // 32 for side in sizes[0]] if sizes else (0, 0)
        text = torch.randint(4, IMAGE_TOKEN, (words,), generator=generator)
        ids = torch.cat([text[:1], torch.full((rows * columns,), IMAGE_TOKEN), text[1:]])
        labels = torch.where(torch.arange(len(ids)) < len(ids) - words // 2, -100, ids)
        items.append({"input_ids": ids, "labels": labels} | _sized_image(model_type, rows, columns, generator))
    return items


def _sized_image(model_type, rows, columns, generator):
    """An image of so many tokens, each of 2 × 2 patches."""
    if rows == 0:
        return {"pixel_values": None}
    if model_type == "mistral3":
        size = (2 * PATCH * rows, 2 * PATCH * columns)
        return {
            "pixel_values": torch.randn(1, 3, *size, generator=generator),
            "image_sizes": torch.tensor([size]),
        }
    patches, most = 4 * rows * columns, 64
    if model_type == "gemma4":
        places = torch.full((1, most, 2), -1)
        places[0, :patches] = torch.cartesian_prod(torch.arange(2 * columns), torch.arange(2 * rows))
        return {"pixel_values": torch.rand(1, most, 3 * PATCH**2, generator=generator), "image_position_ids": places}
    real = (torch.arange(most) < patches).long()[None]
    pixels = torch.randn(1, most, 3 * PATCH**2, generator=generator) * real[..., None]
    shape = torch.tensor([[2 * rows, 2 * columns]])
    return {"pixel_values": pixels, "spatial_shapes": shape, "pixel_attention_mask": real}


def items_of_kinds(model_type, kinds):
    """A sample of each kind, of unlike sizes, for one of Qwen's models."""
    if model_type in SOUND_MODELS:
        return sound_items_of_kinds(kinds)
    generator = torch.Generator().manual_seed(5)
    return [_item_of_kind(model_type, kind.split("+"), number, generator) for number, kind in enumerate(kinds)]


def _item_of_kind(model_type, kinds, number, generator):
    words = torch.randint(4, IMAGE_TOKEN, (7 + number % 5,), generator=generator).tolist()
    ids, fields = words[:2], {"pixel_values": None}
    values = 3 * 2 * PATCH**2
    for kind in filter(None, kinds):
        rows, columns, slices = 2 + 2 * (number % 3), 4, 1 if kind == "image" else 2 + number % 2
        tokens = [IMAGE_TOKEN if kind == "image" else VIDEO_TOKEN] * (rows * columns // 4)
        ids += [*tokens, *words[2:4]] * slices if model_type == "qwen3_vl" else [*tokens * slices, words[2]]
        pixels = torch.randn(slices * rows * columns, values, generator=generator)
        pixels_name = "pixel_values" if kind == "image" else "pixel_values_videos"
        own = {pixels_name: pixels, f"{kind}_grid_thw": torch.tensor([[slices, rows, columns]])}
        if kind == "video" and model_type == "qwen2_5_vl":
            own["second_per_grid_ts"] = torch.rand(1, generator=generator) + 0.3
        fields |= {name: torch.cat([fields[name], v]) if fields.get(name) is not None else v for name, v in own.items()}
    ids += words[4:]
    labels = [-100] * (len(ids) - 3) + ids[-3:]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), **fields}


class Collate:
    """Pads to a multiple of eight, as many collators do."""

    def __init__(self, model_type):
        self.model_type = model_type
        self.with_types = model_type not in SOUND_MODELS and ("qwen" in model_type or model_type in ("glm4v", "gemma4"))

    def __call__(self, items):
        longest = -max(len(item["input_ids"]) for item in items) // 8 * -8
        batch = {"input_ids": self.padded(items, "input_ids", 0, longest)}
        batch["labels"] = self.padded(items, "labels", -100, longest)
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        if self.model_type == "gemma3":
            batch["token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
        if self.model_type == "paligemma":  # what is to be learned sees only what lies before it
            batch["token_type_ids"] = (batch["labels"] != -100).long()
        if self.with_types:
            ids = batch["input_ids"]
            batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long() + 2 * (ids == VIDEO_TOKEN).long()
        for name in PER_IMAGE:
            found = [item[name] for item in items if item.get(name) is not None]
            if found and name == "pixel_values" and self.model_type in TILED:
                batch[name], batch["pixel_attention_mask"] = self.by_rows([item[name] for item in items])
            elif found and name == "pixel_values" and self.model_type in PADDED:
                batch[name] = pad_sequence([tiles for image in found for tiles in image], batch_first=True)
            elif found:
                batch[name] = torch.cat(found)
        return batch

    @staticmethod
    def by_rows(pixels):
        """Rows of as many tiles, and which of their pixels are real."""
        most = max(0 if tiles is None else tiles.shape[1] for tiles in pixels)
        rows, mask = torch.zeros(len(pixels), most, 3, TILE, TILE), torch.zeros(len(pixels), most, TILE, TILE)
        for row, real, tiles in zip(rows, mask, pixels, strict=True):
            if tiles is not None:
                row[: tiles.shape[1]] = tiles[0]
                real[: tiles.shape[1]] = 1
        return rows, mask.long()

    @staticmethod
    def padded(items, name, value, longest):
        rows = torch.full((len(items), longest), value)
        for row, item in zip(rows, items, strict=True):
            row[: len(item[name])] = item[name]
        return rows


def collated_backward(model, samples, model_type):
    """The loss and gradients of samples one by one as their collator makes them, types of tokens and all."""
    batches = [dict(Collate(model_type)([sample])) for sample in samples]
    labels = [batch.pop("labels") for batch in batches]
    total = sum(int((row[:, 1:] != -100).sum()) for row in labels)
    outputs = [model(**batch, use_cache=False) for batch in batches]
    losses = [loss_per_target(each, row, total) for each, row in zip(outputs, labels, strict=True)]
    sum(losses).backward()
    return sum(losses).detach()
