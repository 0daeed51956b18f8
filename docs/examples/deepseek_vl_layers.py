"""DeepSeek-VL's pipeline layers, around transformers' own modules."""

from typing import Any

from deepseek_vl import layer_records
from torch import nn
from transformers import DeepseekVLForConditionalGeneration

from omnibal.vlm import Payload, VisionLanguageModel
from omnibal.vlm.layers import LayerRecipe, skeleton_of
from omnibal.vlm.llava import PatchEmbedding, VisionBlock
from omnibal.vlm.text import text_recipes


class Aligner(nn.Module):
    """The ViT's last norm, and what makes of its output something that the language model reads."""

    def __init__(self, config: Any, norm: nn.Module, aligner: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.aligner = aligner

    def forward(self, payload: Payload) -> Payload:
        """From (tiles, patches, vision width) to (image tokens, language model's width)."""
        features = self.aligner(self.norm(payload.hidden))
        return payload.replace(hidden=features.flatten(0, 1).contiguous())


def deepseek_vl(config: Any) -> VisionLanguageModel:
    """A layer for each record: its class, and the parts of the Hugging Face model that it holds."""
    records = layer_records(config.to_dict())
    blocks = [record.kind for record in records].count("vision_block")
    tower = "model.vision_model"
    recipes = (
        LayerRecipe(PatchEmbedding, {"embeddings": f"{tower}.embeddings"}),
        *(LayerRecipe(VisionBlock, {"block": f"{tower}.encoder.layers.{number}"}) for number in range(blocks)),
        LayerRecipe(Aligner, {"norm": f"{tower}.post_layernorm", "aligner": "model.aligner"}),
        *text_recipes(records),
    )
    side = config.vision_config.image_size
    return VisionLanguageModel(
        skeleton_of(DeepseekVLForConditionalGeneration, config),
        records,
        recipes,
        disk_prefixes={},
        pixel_shape=(config.vision_config.num_channels, side, side),
    )
