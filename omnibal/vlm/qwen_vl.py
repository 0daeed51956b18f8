"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL as pipeline layers, around transformers' own modules.

The patches of all images of a pack are one sequence, and attention stays within an image; a video's temporal slices are
images (``MropeRule.joined``). Each stage makes what it needs of the images' places from their grids, so that a cut
sends no more of them than rows and columns.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from omnibal.families import layer_records
from omnibal.families.base import LayerRecord
from omnibal.formats.collate import GRIDS, MropeRule
from omnibal.vlm.attention import ExactRotary, attention_kwargs
from omnibal.vlm.layers import LayerRecipe, PartsLayer, VisionLanguageModel, skeleton_of
from omnibal.vlm.payload import PackCounts, Payload, note_counts
from omnibal.vlm.text import DecoderBlock, text_recipes


class PatchPlaces(NamedTuple):
    """Where the patches of a pack are, in the order in which the ViT's blocks have them."""

    grids: Tensor  # as ``image_grid_thw``, on the host
    rows_columns: Tensor  # of each patch, (patches, 2)
    images: Tensor  # bounds of the images, int32 of shape (images + 1,)
    windows: Tensor  # bounds of the windows; of the images where there are no windows
    window_order: Tensor | None  # which merged patch stands at each place, (image tokens,); None: they are in order


def patch_places(payload: Payload, vision: Any) -> PatchPlaces:
    """The places of a pack's patches; made once for all layers of a stage, and kept with the pack's grids."""
    # The tensor of grids travels with the pack through all layers, so that what hangs on it is made once per stage.
    on_device = payload.integers[GRIDS]
    places: PatchPlaces | None = getattr(on_device, "_omnibal_places", None)
    if places is None:
        grids = torch.tensor(payload.on_host(GRIDS), dtype=torch.int64)
        places = _places(grids.view(-1, 3), vision, on_device.device)
        on_device._omnibal_places = places  # type: ignore[attr-defined]
    return places


def _places(grids: Tensor, vision: Any, device: torch.device) -> PatchPlaces:
    merge, order = vision.spatial_merge_size, None
    lengths = (grids[:, 1] * grids[:, 2]).tolist()
    window_lengths, rows_columns = lengths, torch.empty(0, 2, dtype=torch.int64)
    if lengths:
        rows_columns = get_vision_position_ids(grids, merge)
        if hasattr(vision, "window_size"):
            order, bounds = get_vision_window_index(grids, merge, vision.window_size, vision.patch_size)
            rows_columns, window_lengths = reordered(rows_columns, order), bounds.diff().tolist()
    return PatchPlaces(
        grids,
        sent_to(rows_columns, device),
        bounds_of(lengths, device),
        bounds_of(window_lengths, device),
        None if order is None else sent_to(order, device),
    )


def bounds_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Bounds of segments, int32 of shape (segments + 1,), for ``attention_kwargs``; the host knows them."""
    bounds = sent_to(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
    note_counts([bounds], PackCounts(None, tuple(lengths)))
    return bounds


def sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    # From pinned memory, since the host would wait for a GPU otherwise.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def reordered(patches: Tensor, order: Tensor) -> Tensor:
    """Patches (patches, …) in another order of the squares that are merged."""
    squares = patches.view(len(order), -1, *patches.shape[1:])
    return squares[order].flatten(0, 1)


_CLASSES = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}


class QwenPatchEmbedding(PartsLayer):
    """Pixels to patch embeddings, with Qwen3-VL's positions, in the order of Qwen2.5-VL's windows."""

    patch_embed: nn.Module
    pos_embed: nn.Embedding

    def forward(self, payload: Payload) -> Payload:
        """From pixels (patches, values) to (patches, width)."""
        projection: Any = self.patch_embed.proj  # a convolution of windows that do not overlap is one product
        pixels = payload.hidden.to(projection.weight.dtype)
        patches = functional.linear(pixels, projection.weight.flatten(1), projection.bias)
        places = patch_places(payload, self.config.vision_config)
        if hasattr(self, "pos_embed"):
            patches = patches + self._positions(places.grids, patches)
        if places.window_order is not None:
            patches = reordered(patches, places.window_order)
        return payload.replace(hidden=patches.contiguous())

    def _positions(self, grids: Tensor, patches: Tensor) -> Tensor:
        if not len(patches):
            return self.pos_embed(torch.empty(0, dtype=torch.int64, device=patches.device))  # type: ignore[no-any-return]
        # transformers' own interpolation: the four nearest entries of the table, and their shares, for each patch.
        taps, shares = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=int(self.pos_embed.num_embeddings**0.5),
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=self.config.vision_config.spatial_merge_size,
        )
        taps, shares = sent_to(taps, patches.device), sent_to(shares, patches.device)
        positions: Tensor = (self.pos_embed(taps) * shares[..., None]).sum(1)
        return positions.to(patches.dtype)


class QwenBlock(PartsLayer):
    in_windows = False
    block: nn.Module
    rotary: ExactRotary

    def forward(self, payload: Payload) -> Payload:
        hidden, places = payload.hidden, patch_places(payload, self.config.vision_config)
        if not len(hidden):  # transformers' block cannot take none: one made-up patch gives all weights zero gradients
            one = hidden.new_zeros(1, hidden.shape[1])
            run = self._run(one, places.rows_columns.new_zeros(1, 2), bounds_of([1], hidden.device))
            return payload.replace(hidden=hidden + run[:0])
        run = self._run(hidden, places.rows_columns, places.windows if self.in_windows else places.images)
        return payload.replace(hidden=run.contiguous())

    def _run(self, hidden: Tensor, rows_columns: Tensor, segments: Tensor) -> Tensor:
        # To transformers it is one segment, which it need not ask the device for; our attention splits it.
        whole = torch.tensor([0, len(hidden)], dtype=torch.int32)
        run: Tensor = self.block(
            hidden,
            cu_seqlens=whole,
            position_embeddings=self.rotary(hidden, rows_columns),
            **attention_kwargs(segments),
        )
        return run


class WindowBlock(QwenBlock):
    in_windows = True


class DeepstackBlock(QwenBlock):
    """A block of Qwen3-VL's ViT whose output enters the language model as well."""

    merger: nn.Module

    def forward(self, payload: Payload) -> Payload:
        """From (patches, width) to the same, and a feature (image tokens, language model's width)."""
        payload = super().forward(payload)
        feature = self.merger(payload.hidden).contiguous()
        return payload.replace(features={**payload.features, _feature_name(len(payload.features)): feature})


def _feature_name(level: int) -> str:
    return f"deepstack.{level}"  # levels are counted by the depth of their blocks in the ViT


class Merger(PartsLayer):
    """Squares of patches to what the language model reads, in the order of its image tokens."""

    merger: nn.Module

    def forward(self, payload: Payload) -> Payload:
        """From (patches, vision width) to (image tokens, language model's width)."""
        order = patch_places(payload, self.config.vision_config).window_order
        features: Tensor = self.merger(payload.hidden)
        return payload.replace(hidden=(features if order is None else features[order.argsort()]).contiguous())


class DeepstackDecoderBlock(DecoderBlock):
    """A decoder layer behind which the next deep-stack feature is added to the image tokens."""

    def forward(self, payload: Payload) -> Payload:
        """From hidden states (1, tokens, width) to the same, with a feature less."""
        payload = super().forward(payload)
        # The first feature is this layer's: features keep the order in which the ViT's blocks made them.
        name, *later = payload.features
        image = (payload.input_ids == self.config.image_token_id)[..., None]
        added = torch.zeros_like(payload.hidden).masked_scatter(image, payload.features[name].to(payload.hidden.dtype))
        return payload.replace(
            hidden=payload.hidden + added, features={other: payload.features[other] for other in later}
        )


def qwen_vl(config: Any) -> VisionLanguageModel:
    records = layer_records(config.to_dict())
    skeleton = skeleton_of(_CLASSES[config.model_type], config)
    vision: Any = config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merge_size = vision.spatial_merge_size
    # Deep-stack features are added behind the first decoder layers, which follow the text embedding.
    deep = [record.kind for record in records].count("deepstack_block")
    text = [
        LayerRecipe(DeepstackDecoderBlock, recipe.parts) if 0 < number <= deep else recipe
        for number, recipe in enumerate(text_recipes(records))
    ]
    return VisionLanguageModel(
        skeleton,
        records,
        (*_vision_recipes(records, vision), *text),
        pixel_shape=(values,),
        image_integers={GRIDS: (3,)},
        image_tokens=partial(_image_tokens, merge_size=merge_size),
        made_images=partial(_made_images, merge_size=merge_size),
        positions=MropeRule.of(config),
        features=_features(records),
    )


def _image_tokens(sample: Mapping[str, Tensor], *, merge_size: int) -> int:
    return int(sample[GRIDS].prod(dim=-1).sum()) // merge_size**2


def _made_images(units: int, *, merge_size: int) -> tuple[int, Mapping[str, Tensor]]:
    # One square image, or none.
    side = isqrt(units) // merge_size * merge_size
    grids = torch.tensor([[1, side, side]] if side else [], dtype=torch.int64)
    return side**2, {GRIDS: grids.view(-1, 3)}


def _vision_recipes(records: Sequence[LayerRecord], vision: Any) -> list[LayerRecipe]:
    visual = "model.visual"
    embeddings = {"patch_embed": f"{visual}.patch_embed"}
    if hasattr(vision, "num_position_embeddings"):
        embeddings["pos_embed"] = f"{visual}.pos_embed"
    recipes = [LayerRecipe(QwenPatchEmbedding, embeddings)]
    classes = {"vision_block": QwenBlock, "window_block": WindowBlock, "deepstack_block": DeepstackBlock}
    blocks = [classes[record.kind] for record in records if record.kind in classes]
    for number, block_class in enumerate(blocks):
        parts = {"block": f"{visual}.blocks.{number}", "rotary": f"{visual}.rotary_pos_emb"}
        if block_class is DeepstackBlock:
            parts["merger"] = f"{visual}.deepstack_merger_list.{vision.deepstack_visual_indexes.index(number)}"
        recipes.append(LayerRecipe(block_class, parts))
    return [*recipes, LayerRecipe(Merger, {"merger": f"{visual}.merger"})]


def _features(records: Sequence[LayerRecord]) -> list[tuple[str, ...]]:
    """What each cut sends: a deep-stack feature from the block that makes it to the decoder layer that adds it."""
    # Entry i is what a cut before layer i sends: the last of the features that were made.
    made, found = 0, list[tuple[str, ...]]([()])
    for record in records:
        made += record.kind == "deepstack_block"
        found.append(tuple(map(_feature_name, range(made - record.sizes.get("carried", 0), made))))
    return found
