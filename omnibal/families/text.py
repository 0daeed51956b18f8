"""Pipeline layers of the language models that vision-language families share."""

from collections.abc import Mapping
from typing import Any

from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, size

TEXT_MODELS = {
    **{name: name for name in ("llama", "mistral", "qwen2", "qwen3")},
    **{"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"},
}
"""From values of ``text_config.model_type`` with plain decoder layers to whose layers they have."""

TIED_KEY = "embedding"


def text_records(config: Mapping[str, Any], *, tied: bool) -> tuple[LayerRecord, ...]:
    """Embedding, decoder blocks, final norm and head of a language model.

    Args:
        config: ``text_config`` as a dict.
        tied: Whether embedding and head share their weight.

    Raises:
        ConfigError: For an unknown kind of language model, or a missing or impossible size.
    """
    if config.get("model_type") not in TEXT_MODELS:
        raise ConfigError(
            f"text_config.model_type must be one of {', '.join(TEXT_MODELS)}, got {config.get('model_type')!r}"
        )
    if _rope_type(config) == "longrope":
        raise ConfigError("rope_type must not change with the length of the pack, got 'longrope'")
    hidden, vocab = size(config, "hidden_size"), size(config, "vocab_size")
    key = TIED_KEY if tied else None
    ends = {"hidden": hidden, "vocab": vocab, "parameters": hidden * vocab}
    block = _block_sizes(config, hidden)
    return (
        LayerRecord("text_embedding", "text_embedding", ends, key, module="language"),
        *(
            LayerRecord(f"decoder_block.{i}", "decoder_block", block, module="language")
            for i in range(size(config, "num_hidden_layers"))
        ),
        LayerRecord("final_norm", "final_norm", {"hidden": hidden, "parameters": hidden}, module="language"),
        LayerRecord("head", "head", ends, key, module="language"),
    )


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type", rope.get("type", "default")))


def _block_sizes(config: Mapping[str, Any], hidden: int) -> dict[str, int]:
    heads = size(config, "num_attention_heads")
    sizes = {
        "hidden": hidden,
        "intermediate": size(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": size(config, "num_key_value_heads", default=heads),
        "head_dim": size(config, "head_dim", default=hidden // heads),
        "rms_norms": 2,
        "qk_norms": 2 if TEXT_MODELS[config["model_type"]] == "qwen3" else 0,
    }
    return sizes | {"parameters": _block_parameters(config, sizes)}


def _block_parameters(config: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    hidden, intermediate, head_dim = sizes["hidden"], sizes["intermediate"], sizes["head_dim"]
    query, key_value = sizes["heads"] * head_dim, sizes["kv_heads"] * head_dim
    total = 2 * hidden * (query + key_value) + 3 * hidden * intermediate + 2 * hidden
    if TEXT_MODELS[config["model_type"]] == "qwen2":
        return total + query + 2 * key_value
    total += sizes["qk_norms"] * head_dim
    if config.get("attention_bias", False):
        total += query + 2 * key_value + hidden
    if config.get("mlp_bias", False):
        total += 2 * intermediate + hidden
    return total
