"""InternVL as pipeline layers, around transformers' own modules."""

from typing import Any

from torch import Tensor, nn
from transformers import InternVLConfig, InternVLForConditionalGeneration

from omnibal.families.internvl import FAMILY, layer_records
from omnibal.vlm.layers import LayerRecipe, VisionLanguageModel, skeleton_of
from omnibal.vlm.llava import PatchEmbedding
from omnibal.vlm.payload import Payload
from omnibal.vlm.text import text_recipes


class InternVLBlock(nn.Module):
    """One block of the ViT; the last one may have the ViT's final norm behind it."""

    def __init__(self, config: Any, block: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block
        self.norm = norm

    def forward(self, payload: Payload) -> Payload:
        """From (tiles, tokens_per_tile, width) to the same."""
        hidden = self.block(payload.hidden)
        return payload.replace(hidden=(hidden if self.norm is None else self.norm(hidden)).contiguous())


class InternVLProjector(nn.Module):
    """From patches to what the language model reads."""

    def __init__(self, config: Any, projector: nn.Module) -> None:
        super().__init__()
        self.shuffle = round(1 / config.downsample_ratio)
        self.projector = projector

    def forward(self, payload: Payload) -> Payload:
        """From (tiles, tokens_per_tile, vision width) to (image tokens of all tiles, language model's width)."""
        # The class token is dropped, as by transformers' vision_feature_select_strategy "default".
        features = self.projector(pixel_shuffle(payload.hidden[:, 1:], self.shuffle)).flatten(0, 1)
        return payload.replace(hidden=features.contiguous())


def pixel_shuffle(patches: Tensor, factor: int) -> Tensor:
    """Join squares of ``factor²`` patches: (tiles, side², width) -> (tiles, (side / factor)², width · factor²)."""
    tiles, area, width = patches.shape
    side = round(area**0.5)
    # The order of features within a joined patch is InternVL's, which its trained projector relies on.
    squares = patches.reshape(tiles, side // factor, factor, side // factor, factor, width)
    return squares.transpose(2, 3).reshape(tiles, area // factor**2, factor**2 * width)


def internvl(config: InternVLConfig) -> VisionLanguageModel:
    records = layer_records(config.to_dict())
    skeleton = skeleton_of(InternVLForConditionalGeneration, config)
    tower = "model.vision_tower"
    blocks = [record for record in records if record.kind == "vision_block"]
    # Without mean pooling transformers' ViT ends with a norm, which is the last block's.
    norms = [{"norm": f"{tower}.layernorm"} if "final_norms" in block.sizes else {} for block in blocks]
    recipes = (
        LayerRecipe(PatchEmbedding, {"embeddings": f"{tower}.embeddings"}),
        *(LayerRecipe(InternVLBlock, {"block": f"{tower}.encoder.layer.{i}"} | norm) for i, norm in enumerate(norms)),
        LayerRecipe(InternVLProjector, {"projector": "model.multi_modal_projector"}),
        *text_recipes(records),
    )
    vision: Any = config.vision_config
    pixel_shape = (vision.num_channels, *vision.image_size)
    return VisionLanguageModel(skeleton, records, recipes, disk_prefixes=FAMILY.disk_prefixes, pixel_shape=pixel_shape)
