"""The selective level for the OmniBal paper's models, whose counted profiles lack it."""

import sys
from dataclasses import replace
from pathlib import Path

from omnibal.cost import CostModel
from omnibal.profile.records import LayerCost, ModelProfile

sys.path.insert(0, str(Path(__file__).parents[1] / "partition"))
from paper_models import DEVICE, Published, counted_profile


def profile_of(row: Published, *, selective: bool = False) -> ModelProfile:
    """A model with counted costs, on request with the selective level too."""
    profile = counted_profile(row)
    if not selective:
        return profile
    return replace(profile, layers=tuple(_with_selective(layer, row.tensor_parallel) for layer in profile.layers))


def _with_selective(layer: LayerCost, tensor_parallel: int) -> LayerCost:
    """Add the level that keeps the results of matrix products and attention.

    What it recomputes, norms and activations, is memory traffic: everything it drops is written again, and about as
    much is read.
    """
    rows = _product_elements(layer)
    if rows == CostModel():
        return layer
    element = 2 / tensor_parallel
    kept = element * rows + layer.saved_bytes["full"]
    everything = layer.saved_bytes["none"]
    dropped = CostModel(**{name: max(getattr(everything, name) - getattr(kept, name), 0) for name in vars(kept)})
    return replace(
        layer,
        saved_bytes={**layer.saved_bytes, "selective": kept},
        recompute_seconds={**layer.recompute_seconds, "selective": 2 / DEVICE.memory_bytes_per_second * dropped},
    )


def _product_elements(layer: LayerCost) -> CostModel:
    """Elements that products of matrices and attention put out."""
    sizes = layer.sizes
    if layer.kind == "vision_block":  # queries, keys, values, attention, its projection, the MLP's two products
        return CostModel(vision_units=sizes["tokens_per_tile"] * (6 * sizes["hidden"] + sizes["intermediate"]))
    if layer.kind == "decoder_block":
        query, key_value = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
        return CostModel(llm_tokens=2 * query + 2 * key_value + 2 * sizes["hidden"] + 2 * sizes["intermediate"])
    return CostModel()
