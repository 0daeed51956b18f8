"""The OmniBal paper's models with counted A100 costs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omnibal.cost import CostModel
from omnibal.families.internvl import layer_records
from omnibal.pipeline.devices import DEVICES
from omnibal.pipeline.flops import analytic_profile
from omnibal.pipeline.profile import LayerCost, ModelProfile

DEVICE = DEVICES["A100-80GB"]
VISION = {
    "hidden_size": 3200,
    "num_hidden_layers": 45,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "num_channels": 3,
    "use_qk_norm": True,
    "norm_type": "rms_norm",
}


def _language(hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


LANGUAGE: Mapping[str, dict[str, Any]] = {
    "Llama3-8B": _language(4096, 32, 14336, 32, 8, 128256),
    "InternLM2-20B": _language(6144, 48, 16384, 48, 8, 92544),
    "Yi-34B": _language(7168, 60, 20480, 56, 8, 64000),
    "Llama3-70B": _language(8192, 80, 28672, 64, 8, 128256),
    "Qwen1.5-110B": _language(8192, 80, 49152, 64, 8, 152064),
}


def counted_profile(language: str, tensor_parallel: int, *, selective: bool = False) -> ModelProfile:
    """InternViT-6B with a language model, bfloat16, on A100s that share each layer."""
    config = {"vision_config": VISION, "text_config": LANGUAGE[language], "tie_word_embeddings": False}
    profile = analytic_profile(layer_records(config), DEVICE, tensor_parallel=tensor_parallel)
    if not selective:
        return profile
    layers = tuple(_with_selective(layer, tensor_parallel) for layer in profile.layers)
    return replace(profile, layers=layers)


def _with_selective(layer: LayerCost, tensor_parallel: int) -> LayerCost:
    """Add the level that keeps the results of matrix products and attention.

    What it recomputes, norms and activations, is memory traffic: everything it drops is written again, and about as
    much is read.
    """
    if "selective" in layer.saved_bytes:
        return layer
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
