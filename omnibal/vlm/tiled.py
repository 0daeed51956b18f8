"""Models whose ViT sees tiles, InternVL and the LLaVAs, as pipeline layers, around transformers' own modules.

A LLaVA's ViT ends where its features are read. What lies behind (CLIP's last block, the last norm of CLIP and SigLIP)
gets no gradient: no layer has it, and its weights are exported as they came.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    InternVLForConditionalGeneration,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
)

from omnibal.errors import DataError
from omnibal.families import layer_records
from omnibal.families.base import ImageRule, size_pair
from omnibal.families.tiled import Canvases, Fit, canvases_of
from omnibal.vlm.layers import LayerRecipe, PartsLayer, VisionLanguageModel, skeleton_of
from omnibal.vlm.payload import Payload
from omnibal.vlm.text import text_recipes

# (height, width) of each image; how many images each sample with images has.
IMAGE_SIZES, IMAGES_OF_SAMPLES = "image_sizes", "batch_num_images"
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"  # paths in transformers' models


class PatchEmbedding(PartsLayer):
    """Pixels of tiles to patch embeddings with positions; CLIP's and InternVL's have a class token, CLIP's a norm."""

    embeddings: nn.Module
    norm: nn.Module

    def forward(self, payload: Payload) -> Payload:
        """From pixels (tiles, channels, height, width) to (tiles, tokens_per_tile, width)."""
        hidden = self.embeddings(payload.hidden)
        return payload.replace(hidden=(self.norm(hidden) if hasattr(self, "norm") else hidden).contiguous())


class VisionBlock(PartsLayer):
    block: nn.Module

    def forward(self, payload: Payload) -> Payload:
        if not len(payload.hidden):  # transformers' attention cannot shape it
            sums = [parameter.sum() for parameter in self.block.parameters()]
            return payload.replace(hidden=payload.hidden + torch.stack(sums).sum())  # still sends (zero) gradients
        return payload.replace(hidden=self.block(payload.hidden, attention_mask=None).contiguous())


class InternVLBlock(PartsLayer):
    block: nn.Module

    def forward(self, payload: Payload) -> Payload:
        return payload.replace(hidden=self.block(payload.hidden).contiguous())


def pixel_shuffle(patches: Tensor, factor: int) -> Tensor:
    """Join squares of ``factor²`` patches: (tiles, side², width) -> (tiles, (side / factor)², width · factor²)."""
    tiles, area, width = patches.shape
    side = round(area**0.5)
    # The order of features within a joined patch is InternVL's, which its trained projector relies on.
    squares = patches.reshape(tiles, side // factor, factor, side // factor, factor, width)
    return squares.transpose(2, 3).reshape(tiles, area // factor**2, factor**2 * width)


class Projector(PartsLayer):
    projector: nn.Module

    def forward(self, payload: Payload) -> Payload:
        """From (tiles, tokens_per_tile, vision width) to (image tokens, language model's width)."""
        dropped = int(self.config.vision_feature_select_strategy == "default")  # CLIP's class token
        features = self.projector(payload.hidden[:, dropped:])
        return payload.replace(hidden=self.arranged(features, payload).contiguous())

    def arranged(self, features: Tensor, payload: Payload) -> Tensor:
        """Features of all tiles, (tiles, patches, width), as the rows that stand for the images."""
        return features.flatten(0, 1)


class InternVLProjector(PartsLayer):
    projector: nn.Module

    def forward(self, payload: Payload) -> Payload:
        # The class token is dropped, as by transformers' vision_feature_select_strategy "default".
        shuffled = pixel_shuffle(payload.hidden[:, 1:], round(1 / self.config.downsample_ratio))
        return payload.replace(hidden=self.projector(shuffled).flatten(0, 1).contiguous())


class CanvasProjector(Projector):
    """Joins an image's projected tiles to one picture without padding, each of whose rows ``newline`` ends."""

    newline: nn.Parameter

    def __init__(self, config: Any, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__(config, **parts)
        self.canvases = canvases_of(config.to_dict())

    def arranged(self, features: Tensor, payload: Payload) -> Tensor:
        """The whole image's features, then those of its canvas with the ends of rows; image after image."""
        # ``done`` counts tiles: an image's first tile is the whole image, those behind it are its canvas.
        done, rows = 0, [self.newline[None, :][:0]]  # a pack without images still sends (zero) gradients
        for fit in self.fits(payload):
            tiles = 1 if fit is None else 1 + fit.tiles[0] * fit.tiles[1]
            whole, parts = features[done], features[done + 1 : done + tiles]
            done += tiles
            rows.append(whole)
            rows.append(self.newline[None] if fit is None else self._canvas(parts, fit))
        return torch.cat([*rows, features[done:].flatten(0, 1)])  # what is too much makes the counts differ

    def fits(self, payload: Payload) -> list[Fit | None]:
        """How each image of a pack lies on its canvas; None for one that is a single tile."""
        found: list[Fit | None] = [self.canvases.fit(width, height) for height, width in payload.on_host(IMAGE_SIZES)]
        if self.canvases.lone_only:
            lone = [count == 1 for count in payload.on_host(IMAGES_OF_SAMPLES) for _ in range(count)]
            found = [fit if is_lone else None for fit, is_lone in zip(found, lone, strict=True)]
        return found

    def _canvas(self, tiles: Tensor, fit: Fit) -> Tensor:
        """From the tiles of an image, (tiles, patches, width), to rows that are ended: (tokens, width)."""
        side, (above, left), (height, width) = self.canvases.side, fit.padding, fit.kept
        # (tile rows, tile columns, side, side, width) -> (tile rows, side, tile columns, side, width) -> (rows,
        # columns, width); then what only pads the image is cut off.
        grid = tiles.reshape(*fit.tiles, side, side, -1).transpose(1, 2)
        grid = grid.flatten(2, 3).flatten(0, 1)[above : above + height, left : left + width]
        if fit.shrunk != fit.kept:
            # transformers' own call, with its mode: the features of very large canvases are shrunk.
            grid = functional.interpolate(grid.permute(2, 0, 1)[None], fit.shrunk, mode="bilinear")[0].permute(1, 2, 0)
        ends = self.newline.expand(len(grid), 1, -1)
        return torch.cat((grid, ends), dim=1).flatten(0, 1)


# By ``model_type``: the model, its block of the ViT and what transformers calls the list of these, and its projector.
_MODELS: Final[Mapping[str, tuple[Any, type[nn.Module], str, type[nn.Module]]]] = {
    "internvl": (InternVLForConditionalGeneration, InternVLBlock, "layer", InternVLProjector),
    "llava": (LlavaForConditionalGeneration, VisionBlock, "layers", Projector),
    "llava_next": (LlavaNextForConditionalGeneration, VisionBlock, "layers", CanvasProjector),
    "llava_onevision": (LlavaOnevisionForConditionalGeneration, VisionBlock, "layers", CanvasProjector),
}


def tiled(config: Any) -> VisionLanguageModel:
    model_class, block, layers, projector = _MODELS[config.model_type]
    records, skeleton = layer_records(config.to_dict()), skeleton_of(model_class, config)
    images: dict[str, Any] = {}
    projector_parts = {"projector": PROJECTOR}
    if projector is CanvasProjector:
        canvases = canvases_of(config.to_dict())
        images["image_integers"] = {IMAGE_SIZES: (2,)} | ({IMAGES_OF_SAMPLES: ()} if canvases.lone_only else {})
        images["image_tokens"] = partial(_tokens, canvases.loads)
        images["made_images"] = partial(_made_images, canvases)
        projector_parts["newline"] = "model.image_newline"
    norm = {"norm": f"{TOWER}.pre_layrnorm"} if hasattr(skeleton.get_submodule(TOWER), "pre_layrnorm") else {}
    blocks = [record.kind for record in records].count("vision_block")
    recipes = (
        LayerRecipe(PatchEmbedding, {"embeddings": f"{TOWER}.embeddings"} | norm),
        *(LayerRecipe(block, {"block": f"{TOWER}.encoder.{layers}.{i}"}) for i in range(blocks)),
        LayerRecipe(projector, projector_parts),
        *text_recipes(records),
    )
    vision = config.vision_config
    height, width = size_pair({"image_size": vision.image_size}, "image_size")
    return VisionLanguageModel(skeleton, records, recipes, pixel_shape=(vision.num_channels, height, width), **images)


def _tokens(rule: ImageRule, sample: Mapping[str, Tensor]) -> int:
    sizes = [(width, height) for height, width in sample[IMAGE_SIZES].tolist()]
    counts = sample[IMAGES_OF_SAMPLES].tolist() if IMAGES_OF_SAMPLES in sample else [len(sizes)]
    if sum(counts) != len(sizes) or min(counts, default=0) < 0:
        raise DataError(f"{IMAGES_OF_SAMPLES} must add up to {len(sizes)}, the entries of {IMAGE_SIZES}, got {counts}")
    images = iter(sizes)
    groups = [[next(images) for _ in range(count)] for count in counts]
    return sum(load.llm_tokens for group in groups for load in rule(group))


def _made_images(canvases: Canvases, units: int) -> tuple[int, dict[str, Tensor]]:
    """Images of the largest canvas that the units allow, as many as fit, or none."""
    fitting = [size for size in canvases.resolutions if canvases.load(size[1], size[0]).vision_units <= units]
    height, width = max(fitting, key=lambda size: size[0] * size[1], default=(0, 0))
    each = canvases.load(width, height).vision_units if fitting else units + 1
    count = units // each
    integers = {
        IMAGE_SIZES: torch.tensor([[height, width]] * count, dtype=torch.int64).view(-1, 2),
        IMAGES_OF_SAMPLES: torch.ones(count, dtype=torch.int64),  # OneVision tiles the images of samples with one
    }
    return count * each, integers
