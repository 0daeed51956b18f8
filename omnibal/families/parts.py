"""How tensor ranks share layers, and layers that families share: language models, CLIP and SigLIP over fixed tiles."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from omnibal.errors import ConfigError
from omnibal.families.base import Config, Layer, LayerRecord, numbered, section, size, square


class Slice(NamedTuple):
    """What a tensor rank holds of a weight: in one dimension these ranges, one behind the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    copies: int = 1
    """Tensor ranks that hold the same slice: consecutive ones."""

    @property
    def width(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Cut:
    """How tensor ranks share a module with weights."""

    # A *column* layer is cut by its outputs (``dim`` 0), a *row* layer by its inputs (``dim`` 1), whose products tensor
    # ranks add up (Shoeybi et al., Megatron-LM, 2019, section 3).

    by: Literal["heads", "kv_heads", "intermediate", "hidden", "inner", "shuffled", "vocab"]
    """The size of the layer's record that counts the units which ranks share out."""
    dim: Literal[0, 1] = 0
    """The dimension of the weight: 0, outputs (rows of a table, elements of a norm's weight); 1, inputs."""
    parts: int = 1
    """Products that lie one behind the other in that dimension, each cut alike: 3 of queries, keys and values."""

    def slice(self, sizes: Mapping[str, int], width: int, num_tensor: int, rank: int) -> Slice:
        units, copies = units_of(sizes, self.by, num_tensor, rank)
        block = width // self.parts
        each = block // sizes[self.by]
        assert self.parts * sizes[self.by] * each == width, "units divide what they are cut from"
        starts = range(0, width, block)
        return Slice(self.dim, tuple((s + units.start * each, s + units.stop * each) for s in starts), copies)


def units_of(sizes: Mapping[str, int], by: str, num_tensor: int, rank: int) -> tuple[range, int]:
    """The units of a size that a tensor rank has, and how many consecutive ranks have the same ones.

    Heads of queries stay with the heads of keys and values that they attend by. Where these are fewer than ranks,
    several ranks have the same one, and share its heads of queries out.

    >>> units_of({"heads": 25}, "heads", 2, 0), units_of({"heads": 25}, "heads", 2, 1)
    ((range(0, 13), 1), (range(13, 25), 1))
    >>> units_of({"heads": 8, "kv_heads": 2}, "kv_heads", 4, 3), units_of({"heads": 8, "kv_heads": 2}, "heads", 4, 3)
    ((range(1, 2), 2), (range(6, 8), 1))
    """
    if by not in ("heads", "kv_heads"):
        return _dealt(sizes[by], num_tensor, rank), 1
    kv_heads = sizes.get("kv_heads", sizes["heads"])
    copies = max(1, num_tensor // kv_heads)
    keys = _dealt(kv_heads, num_tensor // copies, rank // copies)
    if by == "kv_heads":
        return keys, copies
    group = sizes["heads"] // kv_heads
    queries, own = range(keys.start * group, keys.stop * group), _dealt(len(keys) * group, copies, rank % copies)
    return queries[own.start : own.stop], 1


def _dealt(count: int, shares: int, share: int) -> range:
    """The units of a share where shares differ by at most one, the larger ones first."""
    each, more = divmod(count, shares)
    start = share * each + min(share, more)
    return range(start, start + each + (share < more))


def check_degree(records: Iterable[Layer], num_tensor: int) -> None:
    """Refuse a degree under which a tensor rank would have no head, or ranks MLPs of unequal width."""
    for record in records if num_tensor > 1 else ():
        sizes, heads = record.sizes, record.sizes.get("heads", num_tensor)
        if heads < num_tensor:
            raise ConfigError(f"num_tensor must be at most the {heads} heads of {record.name}, got {num_tensor}")
        kv_heads = sizes.get("kv_heads", num_tensor)
        if kv_heads < num_tensor and num_tensor % kv_heads:
            raise ConfigError(
                f"num_tensor must be a multiple of the {kv_heads} kv_heads of {record.name}, or fewer, got {num_tensor}"
            )
        if sizes.get("intermediate", 0) % num_tensor:
            raise ConfigError(
                f"num_tensor must divide the intermediate {sizes['intermediate']} of {record.name}, got {num_tensor}"
            )


# From values of ``text_config.model_type`` with plain decoder layers to whose layers they have.
TEXT_MODELS = {
    **{name: name for name in ("llama", "mistral", "qwen2", "qwen3")},
    **{"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen2_5_omni_text": "qwen2"},
    **{"qwen3_moe": "qwen3", "qwen3_vl_moe_text": "qwen3"},
}
# Those with experts in place of MLPs: planned for and not trained in a pipeline.
WITH_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text")

TIED_KEY = "embedding"


def attention_and_mlp(
    block: str, queries: str, output: str, inner: Sequence[str], outer: str, *, keys: Sequence[str] = ()
) -> dict[str, Cut]:
    """Cuts of a transformer block at a path: its projections in and out of heads, and its MLP's two sides."""
    return {
        f"{block}.{queries}": Cut("heads"),
        **{f"{block}.{name}": Cut("kv_heads") for name in keys},
        f"{block}.{output}": Cut("heads", 1),
        **{f"{block}.{name}": Cut("intermediate") for name in inner},
        f"{block}.{outer}": Cut("intermediate", 1),
    }


# As transformers' base_model_tp_plan of these models has it.
TEXT_CUTS = {
    "language_model.embed_tokens": Cut("vocab"),
    **attention_and_mlp(
        "language_model.layers.*",
        "self_attn.q_proj",
        "self_attn.o_proj",
        ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj",
        keys=("self_attn.k_proj", "self_attn.v_proj"),
    ),
    "lm_head": Cut("vocab"),
}
# Of CLIP's and SigLIP's blocks, and of a projector of two matrices.
TOWER_CUTS = {
    **attention_and_mlp(
        "vision_tower.encoder.layers.*", "self_attn.[qkv]_proj", "self_attn.out_proj", ("mlp.fc1",), "mlp.fc2"
    ),
    "multi_modal_projector.linear_1": Cut("hidden"),
    "multi_modal_projector.linear_2": Cut("hidden", 1),
}


def text_records(config: Mapping[str, Any], *, tied: bool) -> tuple[LayerRecord, ...]:
    """Embedding, decoder blocks, final norm and head of a language model, from ``text_config`` as a dict."""
    if config.get("model_type") not in TEXT_MODELS:
        raise ConfigError(
            f"text_config.model_type must be one of {', '.join(TEXT_MODELS)}, got {config.get('model_type')!r}"
        )
    hidden, vocab = size(config, "hidden_size"), size(config, "vocab_size")
    key = TIED_KEY if tied else None
    ends = {"hidden": hidden, "vocab": vocab, "parameters": hidden * vocab}
    return (
        LayerRecord("text_embedding", "text_embedding", ends, key, module="language"),
        *numbered("decoder_block", "language", _blocks(config, hidden)),
        LayerRecord("final_norm", "final_norm", {"hidden": hidden, "parameters": hidden}, module="language"),
        LayerRecord("head", "head", ends, key, module="language"),
    )


def either_ties(config: Config) -> bool:
    ties = (config.get("tie_word_embeddings"), section(config, "text_config").get("tie_word_embeddings"))
    return any(ties)


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


def _blocks(config: Mapping[str, Any], hidden: int) -> list[dict[str, int]]:
    """Sizes of the decoder blocks; ``intermediate`` of one whose tokens each go to a few experts is one expert's."""
    sizes, blocks = _block_sizes(config, hidden), size(config, "num_hidden_layers")
    if config["model_type"] not in WITH_EXPERTS:
        return [sizes] * blocks
    one = {**sizes, "intermediate": size(config, "moe_intermediate_size")}
    # Published files say num_experts, to_dict() of transformers num_local_experts.
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    experts, active = size(config, key), size(config, "num_experts_per_tok")
    # all experts, and a router without bias
    parameters = _block_parameters(config, one) + ((experts - 1) * 3 * one["intermediate"] + experts) * hidden
    routed = {**one, "experts": experts, "active_experts": active, "parameters": parameters}
    step, dense = size(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers") or ()
    return [sizes if number in dense or (number + 1) % step else routed for number in range(blocks)]


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


CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"


def tower_records(config: Config, *, newline: bool) -> tuple[LayerRecord, ...]:
    """Patch embedding, the blocks up to the one whose output is read, projector."""
    # ``newline`` says whether the projector's features get an embedding at the end of each row.
    vision, text_hidden = section(config, "vision_config"), size(section(config, "text_config"), "hidden_size")
    kind = vision.get("model_type")
    if kind not in (CLIP, SIGLIP):
        raise ConfigError(f"vision_config.model_type must be {CLIP} or {SIGLIP}, got {kind!r}")
    patch = size(vision, "patch_size")
    hidden, patches = size(vision, "hidden_size"), (size(vision, "image_size") // patch) ** 2
    has_class_token = kind == CLIP
    counts = {"patches_per_tile": patches, "tokens_per_tile": patches + has_class_token}
    values = patch**2 * size(vision, "num_channels", default=3)
    # CLIP has a class token, a norm before the blocks and no bias of patches; SigLIP the bias alone
    embedding = (values + counts["tokens_per_tile"] + (3 if has_class_token else 1)) * hidden
    block = counts | block_sizes(hidden, size(vision, "intermediate_size"), vision)
    # Blocks and norms behind the output that is read are not computed, and never get a gradient: no record has them.
    weights = (hidden + text_hidden + newline) * text_hidden
    projector = {
        "norms": 0,
        "shuffled": hidden,
        "hidden": text_hidden,
        "parameters": weights + (2 * text_hidden if config.get("multimodal_projector_bias", True) else 0),
        "image_tokens_per_tile": patches + _kept_class_tokens(config),
    }
    ends = {"hidden": hidden, "values_per_patch": values, "parameters": embedding}
    return (
        LayerRecord("patch_embedding", "patch_embedding", counts | ends, module="vision"),
        *numbered("vision_block", "vision", [block] * read_blocks(config, vision)),
        LayerRecord("projector", "projector", counts | projector, module="projector"),
    )


def tile_size(config: Config, preprocessor: Config) -> int:
    cut = square(preprocessor, "crop_size" if preprocessor.get("crop_size") else "size")
    taken = size(section(config, "vision_config"), "image_size", default=cut)
    if cut != taken:
        raise ConfigError(f"size of the preprocessor must be the vision_config's image_size {taken}, got {cut}")
    return cut


def image_tokens(config: Config, tile: int) -> int:
    """What a tile brings to the LLM: its patches; CLIP's class token, too, where features are not selected."""
    return (tile // size(section(config, "vision_config"), "patch_size")) ** 2 + _kept_class_tokens(config)


def _kept_class_tokens(config: Config) -> int:
    # Selecting features drops the first token, whatever it is: CLIP's class token.
    has_one = section(config, "vision_config").get("model_type", CLIP) == CLIP
    return int(has_one) - int(config.get("vision_feature_select_strategy", "default") == "default")


def read_blocks(config: Config, vision: Mapping[str, Any]) -> int:
    """How many of the ViT's blocks are computed for the hidden state that is read.

    >>> read_blocks({"vision_feature_layer": -2}, {"num_hidden_layers": 24})
    23
    """
    layer, blocks = config.get("vision_feature_layer", -2), size(vision, "num_hidden_layers")
    states = blocks + 1  # state 0 enters the first block
    if isinstance(layer, bool) or not isinstance(layer, int) or not -states <= layer < states:
        raise ConfigError(f"vision_feature_layer must be one of the {states} hidden states of the ViT, got {layer!r}")
    return layer % states


def block_sizes(hidden: int, intermediate: int, vision: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of a block with two layer norms, biases everywhere and an MLP of two matrices."""
    heads = size(vision, "num_heads" if "num_heads" in vision else "num_attention_heads")
    return {
        "hidden": hidden,
        "intermediate": intermediate,
        "heads": heads,
        "head_dim": hidden // heads,
        "rms_norms": 0,
        "qk_norms": 0,
        "residual_scales": 0,
        "kept_in_mlp": 3 if vision.get("hidden_act", "quick_gelu") == "quick_gelu" else 2,
        "parameters": 4 * hidden * (hidden + 1) + 4 * hidden + 2 * hidden * intermediate + intermediate + hidden,
    }
