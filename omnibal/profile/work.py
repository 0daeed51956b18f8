"""What a layer of each kind does for a micro-batch: operations, and elements read, written, kept and summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from omnibal.cost import CostModel

# What tensor ranks sum for the loss of a target, in elements of two bytes: the largest logit, the sum of the exponents
# and the target's logit, in float32.
_LOSS_ELEMENTS = 6
# Elements read and written for one that passes a module of transformers, forward: RMSNorm in float32 operation by
# operation, LayerNorm fused, a sum of two branches, rotary embedding with its rotated half, an activation, a gated one.
_RMS_NORM, _LAYER_NORM, _SUM, _ROTARY, _ACTIVATION, _GATED = 18, 2, 3, 10, 2, 5
# Products with a vocabulary whose rows are not of whole 16 bytes take so many times as long, by the largest power of 2
# up to 8 in it: 151,674 and 92,553 words were measured (tools/gpu/RESULTS.md, "Layers"), 4 lies between.
_UNALIGNED = {8: 1.0, 4: 1.5, 2: 2.3, 1: 5.3}
# What tensor ranks send for a block, in all-reduces of its hidden states; a gather or a scatter is half of one. Forward
# they gather tokens for attention, MLP and the block's output, and scatter two sums; backward the other way round.
# Recomputation gathers the block's input, and not its output.
_BLOCK_SUMS = 2.5
# An H200 took 1.88, 3.29 and 6.89 ms for packed attention of 8,192 tokens, both passes, in samples of 512, of up to
# 4,096 and of 8,192 tokens (tools/gpu/RESULTS.md, "Attention"): the line through these is 32 % of its peak, where
# products reach 69 %, and the time of so many elements of memory traffic for each element of a token's queries.
ATTENTION_SLOWER = 2.16
_ATTENTION_TRAFFIC = 42


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a layer does for a micro-batch, per unit of its load."""

    # Tensor ranks share what is counted here, but for the fields whose names say ``whole``.

    # Operations of products with weights, forward; backward to the inputs and to the weights take as many each:
    products: CostModel = field(default_factory=CostModel)
    # Operations of products of activations, forward:
    attention: CostModel = field(default_factory=CostModel)
    # Elements read and written, forward; backward takes about twice as many:
    traffic: CostModel = field(default_factory=CostModel)
    whole_traffic: CostModel = field(default_factory=CostModel)
    # Elements that autograd keeps, and float32 numbers beside them, whatever the dtype (the inputs of RMS norms):
    saved: CostModel = field(default_factory=CostModel)
    whole_saved: CostModel = field(default_factory=CostModel)
    saved_float32: CostModel = field(default_factory=CostModel)
    whole_saved_float32: CostModel = field(default_factory=CostModel)
    # Elements that weight gradients keep while they wait: inputs of the products, and gradients of their outputs.
    # Nothing where they cannot wait: those of convolutions, and of what a layer shares with another one.
    pending: CostModel = field(default_factory=CostModel)
    whole_pending: CostModel = field(default_factory=CostModel)
    # Elements that tensor ranks sum, forward, and backward on the way to the inputs:
    reduced: CostModel = field(default_factory=CostModel)
    reduced_backward: CostModel = field(default_factory=CostModel)
    # Elements sent on, and elements beside them that layers far behind read:
    output: CostModel = field(default_factory=CostModel)
    feature: CostModel = field(default_factory=CostModel)
    # Rows of the products' inputs: what an adapter beside one of them gets to see:
    rows: CostModel = field(default_factory=CostModel)
    # Whether the forward pass computes all gradients, and keeps them in place of activations:
    at_once: bool = False


def _patch_embedding(sizes: Mapping[str, int]) -> Work:
    values = sizes["patches_per_tile"] * sizes["values_per_patch"]
    # A convolution whose stride is its kernel's width: one product with the values of each patch.
    return Work(
        products=CostModel(vision_units=2 * values * sizes["hidden"]),
        whole_saved=CostModel(vision_units=values),
        output=CostModel(vision_units=sizes["tokens_per_tile"] * sizes["hidden"]),
    )


def _vision_block(sizes: Mapping[str, int]) -> Work:
    tokens, hidden, intermediate = sizes["tokens_per_tile"], sizes["hidden"], sizes["intermediate"]
    matrices, attended = sizes.get("mlp_matrices", 2), sizes.get("attended", tokens)
    query = sizes["heads"] * sizes["head_dim"]  # the hidden size, and zero heads
    scales = sizes.get("residual_scales", 2)
    norms = _RMS_NORM * sizes["rms_norms"] + _LAYER_NORM * (2 - sizes["rms_norms"])
    # each pair of tokens takes two products of two operations for each element; 0 stands for all patches of the image
    pairs = CostModel(vision_units=tokens * attended) if attended else CostModel(vision_squared=1)
    return Work(
        products=CostModel(vision_units=2 * tokens * (4 * hidden * query + matrices * hidden * intermediate)),
        attention=4 * query * pairs,
        # both sides of the products; norms, scales and sums of branches; rotary embedding, norms of queries and keys
        traffic=CostModel(
            vision_units=tokens
            * (
                (4 + matrices + norms + 2 * _SUM + 2 * scales) * hidden
                + (4 + 2 * _ROTARY * sizes.get("rotary", 0) + _RMS_NORM * sizes["qk_norms"]) * query
                + _ATTENTION_TRAFFIC * query
                + (matrices + (_ACTIVATION if matrices == 2 else _GATED)) * intermediate
            )
        ),
        # queries, keys, values (where queries and keys are turned, with what they were), attention's output; the MLP's
        # activation and its inputs; of norms of queries and keys what is multiplied by the weight. Of two norms the
        # input or (RMS) what is multiplied by the weight; the residual branches that are scaled
        saved=CostModel(
            vision_units=tokens
            * (
                (4 + 2 * sizes.get("rotary", 0) + sizes["qk_norms"]) * query
                + sizes.get("kept_in_mlp", 2) * intermediate
                + (2 + scales) * hidden
            )
        ),
        # outputs of two norms, gathered for weight gradients; what a final norm reads
        whole_saved=CostModel(vision_units=tokens * (2 + sizes.get("final_norms", 0)) * hidden),
        saved_float32=CostModel(vision_units=tokens * (sizes["qk_norms"] * query + sizes["rms_norms"] * hidden)),
        # attention's output, the MLP's activation; the gradients of queries, keys, values and of the MLP's first
        # products
        pending=CostModel(vision_units=tokens * (4 * query + matrices * intermediate)),
        # outputs of two norms; the gradients of what attention and the MLP add
        whole_pending=CostModel(vision_units=4 * tokens * hidden),
        reduced=CostModel(vision_units=_BLOCK_SUMS * tokens * hidden),
        reduced_backward=CostModel(vision_units=_BLOCK_SUMS * tokens * hidden),
        output=CostModel(vision_units=tokens * hidden),
        rows=CostModel(vision_units=tokens),
    )


def _deepstack_block(sizes: Mapping[str, int]) -> Work:
    """A block of the ViT, and what makes of its output something that a decoder layer reads."""
    block = _vision_block(sizes)
    merger = _projector({**sizes, "inner": sizes["shuffled"], "hidden": sizes["carried_hidden"]})
    sums = {part.name: getattr(block, part.name) + getattr(merger, part.name) for part in fields(Work)}
    return replace(Work(**sums), output=block.output, feature=merger.output, rows=block.rows)


def _projector(sizes: Mapping[str, int]) -> Work:
    tokens, shuffled, hidden = _image_tokens(sizes), sizes["shuffled"], sizes["hidden"]
    inner = sizes.get("inner", hidden)
    return Work(
        products=CostModel(vision_units=2 * tokens * (shuffled * inner + inner * hidden)),
        traffic=CostModel(vision_units=tokens * ((1 + _LAYER_NORM) * shuffled + (2 + _ACTIVATION) * inner + hidden)),
        # inputs of the activation and of the second product; whole those of the norm and of the first one
        saved=CostModel(vision_units=tokens * 2 * inner),
        whole_saved=CostModel(vision_units=tokens * (1 + sizes.get("norms", 1)) * shuffled),
        whole_saved_float32=CostModel(vision_units=tokens * sizes.get("rms_norms", 0) * shuffled),
        pending=CostModel(vision_units=tokens * 2 * inner),
        whole_pending=CostModel(vision_units=tokens * (shuffled + hidden)),
        reduced=CostModel(vision_units=tokens * hidden),
        reduced_backward=CostModel(vision_units=tokens * shuffled),
        output=CostModel(vision_units=tokens * hidden),
        rows=CostModel(vision_units=tokens),
    )


def _image_tokens(sizes: Mapping[str, int]) -> float:
    """Tokens that a vision unit brings to the language model: a tile many, a patch a part of one."""
    return 1 / sizes["units_per_token"] if "units_per_token" in sizes else sizes["image_tokens_per_tile"]


def _text_embedding(sizes: Mapping[str, int]) -> Work:
    # each token's row is read and written; the backward pass writes and reads a gradient of the whole table, which does
    # not grow with the load and is small beside the blocks, so that it is not counted. Tensor ranks that have a part of
    # the vocabulary put out zeros for the tokens of the others.
    elements = CostModel(llm_tokens=sizes["hidden"])
    return Work(whole_traffic=2 * elements, output=elements, reduced=elements)


def _decoder_block(sizes: Mapping[str, int]) -> Work:
    # A token goes through the MLPs of its active experts alone. That small products take longer than their operations
    # say is not counted, nor that few tokens may load one expert more than another.
    hidden, experts, active = sizes["hidden"], sizes.get("experts", 0), sizes.get("active_experts", 1)
    intermediate = active * sizes["intermediate"]
    query, key_value = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    normed = sizes["qk_norms"] // 2 * (query + key_value)
    # a copy of a token for each of its experts, and what each makes of it before it is weighted
    copies = 2 * active * hidden if experts else 0
    return Work(
        # queries and the output, keys and values; the MLP's three matrices; the router; two operations an element
        products=CostModel(
            llm_tokens=2 * (2 * hidden * (query + key_value) + 3 * hidden * intermediate + hidden * experts)
        ),
        attention=CostModel(llm_tokens_squared=2 * query),  # half of all pairs of tokens, 2 products, 2 operations each
        # both sides of the products; two norms and two sums of branches; rotary embedding, norms of queries and keys
        traffic=CostModel(
            llm_tokens=(4 + 3 * active + 2 * _RMS_NORM + 2 * _SUM) * hidden
            + (2 + _ATTENTION_TRAFFIC) * query
            + 2 * key_value
            + _ROTARY * (query + key_value)
            + _RMS_NORM * normed
            + (3 + _GATED) * intermediate
            + copies
        ),
        # queries, keys, values, attention's output; the MLP's gate, its activation, the other branch, their product; of
        # norms of queries and keys the output before the weight; of two norms alike, and gathered the output after it
        saved=CostModel(llm_tokens=2 * query + 2 * key_value + 4 * intermediate + normed + 2 * hidden),
        whole_saved=CostModel(llm_tokens=2 * hidden + copies),
        saved_float32=CostModel(llm_tokens=normed + 2 * hidden),
        whole_saved_float32=CostModel(llm_tokens=experts),  # the router's probabilities
        # attention's output, the MLP's product; the gradients of queries, keys, values, gate and other branch
        pending=CostModel(llm_tokens=query + intermediate + query + 2 * key_value + 2 * intermediate),
        # outputs of two norms; the gradients of what attention and the MLP add
        whole_pending=CostModel(llm_tokens=4 * hidden + copies),
        reduced=CostModel(llm_tokens=_BLOCK_SUMS * hidden),
        reduced_backward=CostModel(llm_tokens=_BLOCK_SUMS * hidden),
        output=CostModel(llm_tokens=hidden),
        rows=CostModel(llm_tokens=1),
    )


def _final_norm(sizes: Mapping[str, int]) -> Work:
    hidden = sizes["hidden"]
    return Work(
        whole_traffic=CostModel(llm_tokens=_RMS_NORM * hidden),
        whole_saved=CostModel(llm_tokens=hidden),
        whole_saved_float32=CostModel(llm_tokens=hidden),
        output=CostModel(llm_tokens=hidden),
    )


def _head(sizes: Mapping[str, int]) -> Work:
    hidden, vocabulary = sizes["hidden"], sizes["vocab"]
    slower = _UNALIGNED[math.gcd(vocabulary, 8)]
    return Work(
        products=CostModel(target_tokens=slower * 2 * hidden * vocabulary),
        traffic=CostModel(target_tokens=6 * vocabulary),  # logits, in float32 too, and their logarithmic softmax
        whole_saved=CostModel(target_tokens=hidden),  # the gradient of its input
        reduced=CostModel(target_tokens=_LOSS_ELEMENTS),
        reduced_backward=CostModel(target_tokens=hidden),
        rows=CostModel(target_tokens=1),
        at_once=True,
    )


def _sound_projector(sizes: Mapping[str, int]) -> Work:
    """One product, behind pooling of two positions to a token."""
    tokens, wide, hidden = sizes["tokens_per_tile"] / 2, sizes["shuffled"], sizes["hidden"]
    return Work(
        products=CostModel(vision_units=2 * tokens * wide * hidden),
        whole_saved=CostModel(vision_units=tokens * wide),
        whole_pending=CostModel(vision_units=tokens * (wide + hidden)),
        output=CostModel(vision_units=tokens * hidden),
        rows=CostModel(vision_units=tokens),
    )


def _heard(count: Callable[[Mapping[str, int]], Work]) -> Callable[[Mapping[str, int]], Work]:
    """Work of an encoder of sound: by windows in place of tiles, or beside a ViT by positions, in units of sound."""

    def work(sizes: Mapping[str, int]) -> Work:
        found = count(sizes)
        if sizes["patches_per_tile"] > 1:
            return found
        costs = {part.name: getattr(found, part.name) for part in fields(Work) if part.name != "at_once"}
        heard: dict[str, Any] = {name: CostModel(sound_units=cost.vision_units) for name, cost in costs.items()}
        return Work(**heard)

    return work


WORK: Mapping[str, Callable[[Mapping[str, int]], Work]] = {
    "patch_embedding": _patch_embedding,
    "vision_block": _vision_block,
    "window_block": _vision_block,
    "deepstack_block": _deepstack_block,
    "projector": _projector,
    "text_embedding": _text_embedding,
    "decoder_block": _decoder_block,
    "final_norm": _final_norm,
    "head": _head,
    "sound_embedding": _heard(_patch_embedding),
    "sound_block": _heard(_vision_block),
    "sound_projector": _heard(_sound_projector),
}
