"""Items of a user's dataset and a user's collator, for small models of every family that packs."""

from copy import deepcopy

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AyaVisionConfig,
    Gemma3Config,
    Glm4vConfig,
    Idefics3Config,
    Lfm2VlConfig,
    Mistral3Config,
    PaliGemmaConfig,
    Qwen3_5Config,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from omnibal.integrations.losses import loss_per_target
from omnibal.integrations.packing import PER_IMAGE
from tests.families.models import DEEP, MROPE, NATIVE_MLP, PATCH, PINPOINTS, TEXT, TOWER, small_config
from tests.families.models import TILE as FIRST_TILE
from tests.vlm.families import IMAGE_TOKEN, family_samples

TILED = {"idefics3": Idefics3Config, "smolvlm": SmolVLMConfig}
"""Families that pack, and that a pipeline does not know."""
UNPACKED = ("gemma3", "paligemma", "qwen3_5")
"""Families whose attention cannot be packed."""
FOREIGN = ("aya_vision", "glm4v", "lfm2_vl", "mistral3")
"""Families that nobody but ``test_rearranging`` has tried, on padded rows."""
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
    """The configuration of a small model."""
    tower, text, mrope = deepcopy((TOWER | {"image_size": TILE}, TEXT | {"pad_token_id": None}, MROPE))
    match model_type:
        case "idefics3" | "smolvlm":
            options = {"image_token_id": IMAGE_TOKEN, "scale_factor": 2}
            return TILED[model_type](vision_config=tower, text_config=text | {"model_type": "llama"}, **options)
        case "gemma3":
            options = {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": TOKENS_PER_TILE}
            return Gemma3Config(vision_config=tower | {"vision_use_head": False}, text_config=text, **options)
        case "paligemma":
            tower |= {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 24}
            options = {"image_token_index": IMAGE_TOKEN, "projection_dim": 24}
            return PaliGemmaConfig(vision_config=tower, text_config=text | {"model_type": "gemma"}, **options)
        case "qwen3_vl_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            vision = deepcopy(NATIVE_MLP | DEEP)
            return Qwen3VLMoeConfig(
                vision_config=vision, text_config=text | mrope | experts, image_token_id=IMAGE_TOKEN
            )
        case "qwen3_5":
            linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
            rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}}
            text |= linear | rope | {"linear_num_value_heads": 2, "num_hidden_layers": 4}
            vision = deepcopy(NATIVE_MLP) | {"num_position_embeddings": 16}
            return Qwen3_5Config(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    return _foreign_config(model_type, tower, text) if model_type in FOREIGN else _shallow(small_config(model_type))


def _foreign_config(model_type, tower, text):
    match model_type:
        case "aya_vision":
            tower |= {"model_type": "siglip_vision_model", "vision_use_head": False}
            options = {"image_token_index": IMAGE_TOKEN}
            return AyaVisionConfig(vision_config=tower, text_config=text | {"model_type": "cohere2"}, **options)
        case "glm4v":
            vision = deepcopy(NATIVE_MLP) | {"image_size": TILE}
            rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}}
            return Glm4vConfig(vision_config=vision, text_config=text | rope, image_token_id=IMAGE_TOKEN)
        case "lfm2_vl":
            vision = tower | {"model_type": "siglip2_vision_model", "vision_use_head": False, "num_patches": 16}
            text |= {"model_type": "lfm2", "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False}
            options = {"image_token_id": IMAGE_TOKEN, "projector_hidden_size": 32}
            return Lfm2VlConfig(vision_config=vision, text_config=text, **options)
        case _:
            vision = tower | {"model_type": "pixtral", "image_size": 4 * TILE, "head_dim": 8}
            options = {"image_token_index": IMAGE_TOKEN}
            return Mistral3Config(vision_config=vision, text_config=text | {"model_type": "mistral"}, **options)


def _shallow(config):
    """With two layers of a kind: gradients pass through them, and processes train in half the time."""
    parts = [config.text_config, *([config.vision_config] if config.model_type == "internvl" else [])]
    for part in parts:
        part.num_hidden_layers = 2
        if getattr(part, "layer_types", None):
            part.layer_types = part.layer_types[:2]
    return config


def items_of(model_type):
    """Samples with several images of unequal sizes, one or none."""
    match model_type:
        case "idefics3" | "smolvlm":
            return [item | {"pixel_values": by_row(item["pixel_values"])} for item in _tiled_items(TOKENS_PER_TILE)]
        case "gemma3" | "aya_vision":
            return _tiled_items(TOKENS_PER_TILE)
        case "lfm2_vl" | "mistral3":
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
    real = (torch.arange(most) < patches).long()[None]
    pixels = torch.randn(1, most, 3 * PATCH**2, generator=generator) * real[..., None]
    shape = torch.tensor([[2 * rows, 2 * columns]])
    return {"pixel_values": pixels, "spatial_shapes": shape, "pixel_attention_mask": real}


class Collate:
    """Pads to a multiple of eight, as many collators do."""

    def __init__(self, model_type):
        self.model_type, self.with_types = model_type, "qwen" in model_type or model_type == "glm4v"

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
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
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
    losses = [loss_per_target(model(**batch), row, total) for batch, row in zip(batches, labels, strict=True)]
    sum(losses).backward()
    return sum(losses).detach()
