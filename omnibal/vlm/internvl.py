"""InternVL as pipeline layers, around transformers' own modules."""

from typing import Any

from torch import Tensor, nn
from transformers import InternVLConfig, InternVLForConditionalGeneration

from omnibal.families.internvl import FAMILY, layer_records
from omnibal.vlm.layers import LayerRecipe, VisionLanguageModel, skeleton_of
from omnibal.vlm.payload import Payload
from omnibal.vlm.text import text_recipes


class PatchEmbedding(nn.Module):
    """Pixels to patch embeddings with CLS and positions."""

    def __init__(self, config: Any, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        if embeddings.mask_token is not None:
            embeddings.mask_token.requires_grad_(False)  # for masked image modelling; here it never gets a gradient

    def forward(self, payload: Payload) -> Payload:
        """From pixels (tiles, channels, height, width) to (tiles, tokens_per_tile, width)."""
        return payload.replace(hidden=self.embeddings(payload.hidden).contiguous())


class VisionBlock(nn.Module):
    """One block of the ViT; the last one may have the ViT's final norm behind it."""

    def __init__(self, config: Any, block: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block
        self.norm = norm

    def forward(self, payload: Payload) -> Payload:
        """From (tiles, tokens_per_tile, width) to the same."""
        hidden = self.block(payload.hidden)
        return payload.replace(hidden=(hidden if self.norm is None else self.norm(hidden)).contiguous())


class Projector(nn.Module):
    """From patches to what the language model reads."""

    def __init__(self, config: Any, projector: nn.Module) -> None:
        super().__init__()
        self.shuffle = round(1 / config.downsample_ratio)
        self.projector = projector

    def forward(self, payload: Payload) -> Payload:
        """From (tiles, tokens_per_tile, vision width) to (image tokens of all tiles, language model's width)."""
        features = self.projector(pixel_shuffle(payload.hidden[:, 1:], self.shuffle)).flatten(0, 1)
        return payload.replace(hidden=features.contiguous())


def pixel_shuffle(patches: Tensor, factor: int) -> Tensor:
    """Join each square of ``factor × factor`` neighbouring patches into one wide patch, as InternVL does.

    Args:
        patches: Of shape (tiles, side², width), any number of tiles, none included; ``factor`` divides ``side``.
        factor: How many patches, in each direction, become one.

    Returns:
        Of shape (tiles, (side / factor)², width × factor²).
    """
    tiles, area, width = patches.shape
    side = round(area**0.5)
    squares = patches.reshape(tiles, side // factor, factor, side // factor, factor, width)
    return squares.transpose(2, 3).reshape(tiles, area // factor**2, factor**2 * width)


def internvl(config: InternVLConfig) -> VisionLanguageModel:
    """An InternVL model as pipeline layers.

    Raises:
        ConfigError: If the configuration has a setting that the layers do not serve.
    """
    records = layer_records(config.to_dict())
    skeleton = skeleton_of(InternVLForConditionalGeneration, config)
    tower = "model.vision_tower"
    blocks = [record for record in records if record.kind == "vision_block"]
    norms = [{"norm": f"{tower}.layernorm"} if "final_norms" in block.sizes else {} for block in blocks]
    recipes = (
        LayerRecipe(PatchEmbedding, {"embeddings": f"{tower}.embeddings"}),
        *(LayerRecipe(VisionBlock, {"block": f"{tower}.encoder.layer.{i}"} | norm) for i, norm in enumerate(norms)),
        LayerRecipe(Projector, {"projector": "model.multi_modal_projector"}),
        *text_recipes(records),
    )
    vision: Any = config.vision_config
    pixel_shape = (vision.num_channels, *vision.image_size)
    return VisionLanguageModel(skeleton, records, recipes, disk_prefixes=FAMILY.disk_prefixes, pixel_shape=pixel_shape)
