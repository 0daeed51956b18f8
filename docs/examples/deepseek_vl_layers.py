"""DeepSeek-VL's pipeline layers, around transformers' own modules."""

from typing import Any

from deepseek_vl import layer_records
from torch import nn
from transformers import DeepseekVLForConditionalGeneration

from omnibal.vlm import Payload, VisionLanguageModel
from omnibal.vlm.layers import LayerRecipe, PartsLayer, skeleton_of
from omnibal.vlm.text import text_recipes
from omnibal.vlm.tiled import PatchEmbedding, VisionBlock


class LastBlock(VisionBlock):
    """The ViT's last block, with its norm."""

    norm: nn.Module

    def forward(self, payload: Payload) -> Payload:
        """From (tiles, patches, width) to the same."""
        payload = super().forward(payload)
        return payload.replace(hidden=self.norm(payload.hidden))


class Aligner(PartsLayer):
    """What makes of the ViT's output something that the language model reads."""

    aligner: nn.Module

    def forward(self, payload: Payload) -> Payload:
        """From (tiles, patches, vision width) to (image tokens, language model's width)."""
        return payload.replace(hidden=self.aligner(payload.hidden).flatten(0, 1).contiguous())


def deepseek_vl(config: Any) -> VisionLanguageModel:
    """A layer for each record: its class, and the parts of the Hugging Face model that it holds."""
    records = layer_records(config.to_dict())
    blocks = [record.kind for record in records].count("vision_block")
    tower = "model.vision_model"
    recipes = (
        LayerRecipe(PatchEmbedding, {"embeddings": f"{tower}.embeddings"}),
        *(LayerRecipe(VisionBlock, {"block": f"{tower}.encoder.layers.{number}"}) for number in range(blocks - 1)),
        LayerRecipe(LastBlock, {"block": f"{tower}.encoder.layers.{blocks - 1}", "norm": f"{tower}.post_layernorm"}),
        LayerRecipe(Aligner, {"aligner": "model.aligner"}),
        *text_recipes(records),
    )
    side = config.vision_config.image_size
    return VisionLanguageModel(
        skeleton_of(DeepseekVLForConditionalGeneration, config),
        records,
        recipes,
        pixel_shape=(config.vision_config.num_channels, side, side),
    )
