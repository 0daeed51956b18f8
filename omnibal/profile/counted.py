"""Analytic costs: from a family's layer records and a device, without the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from omnibal.cost import CostModel
from omnibal.device import LINK_FRACTION, Device
from omnibal.errors import ConfigError
from omnibal.families.base import ADAPTER_SIZES, LayerRecord, check_frozen
from omnibal.families.parts import check_degree, units_of
from omnibal.profile.records import ELEMENT_BYTES, LayerCost, ModelProfile, degree_of, degrees_of

COUNTED_DEVICE: Final = "A100-80GB"
"""For which costs are counted where the device at hand is not known."""
_FLOAT32_BYTES = 4
# What tensor ranks sum for the loss of a target, in elements of two bytes: the largest logit, the sum of the exponents
# and the target's logit, in float32.
_LOSS_ELEMENTS = 6
# Backward of fused attention, which computes the scores again, in forward passes.
_ATTENTION_BACKWARD = 2.5
# An H200 took 1.88, 3.29 and 6.89 ms for packed attention of 8,192 tokens, both passes, in samples of 512, of up to
# 4,096 and of 8,192 tokens (tools/gpu/RESULTS.md, "Attention"): the line through these is 32 % of its peak, where
# products reach 69 %, and the time of so many elements of memory traffic for each element of a token's queries.
_ATTENTION_SLOWER = 2.16
_ATTENTION_TRAFFIC = 42
# Elements read and written for one that passes a module of transformers, forward: RMSNorm in float32 operation by
# operation, LayerNorm fused, a sum of two branches, rotary embedding with its rotated half, an activation, a gated one.
_RMS_NORM, _LAYER_NORM, _SUM, _ROTARY, _ACTIVATION, _GATED = 18, 2, 3, 10, 2, 5
# The backward pass reads and writes about twice the elements of the forward pass.
_TRAFFIC_BACKWARD = 2
# Products with a vocabulary whose rows are not of whole 16 bytes take so many times as long, by the largest power of 2
# up to 8 in it: 151,674 and 92,553 words were measured (tools/gpu/RESULTS.md, "Layers"), 4 lies between.
_UNALIGNED = {8: 1.0, 4: 1.5, 2: 2.3, 1: 5.3}


def device_to_count(name: str | None) -> Device:
    """The device that torch calls so; ``COUNTED_DEVICE`` where nothing is known of it, or there is none."""
    try:
        return Device.named(name or COUNTED_DEVICE)
    except ConfigError:
        return Device.named(COUNTED_DEVICE)


def analytic_profile(
    records: Sequence[LayerRecord],
    device: Device,
    *,
    dtype: str = "bfloat16",
    tensor_parallel: int | Mapping[str, int] = 1,
    frozen: Collection[str] = (),
) -> ModelProfile:
    """Costs of a model's layers on a device by counting operations and bytes.

    Args:
        records: The model's layers.
        device: What they run on.
        dtype: Precision of the forward pass.
        tensor_parallel: Devices of one node that share each layer, as Megatron-LM splits it: one number, or one each of
            ``"vision"`` (the projector with it) and ``"language"``. In blocks they also share the tokens of norms and
            residuals.
        frozen: What is not trained, as ``check_frozen`` takes it.

    Raises:
        ConfigError: A number is out of range, or devices cannot share a layer: they are more than its heads, or do not
            divide the width of its MLP.

    Source of the split: Shoeybi et al., "Megatron-LM" (2019), section 3; of the tokens' Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
    """
    # Matrix products run at ``device.fraction`` of the peak, and beside that read their inputs and write their outputs
    # at the memory's speed, which is how narrow layers come to less of the peak than wide ones. Norms, rotary
    # embeddings, activation functions, embeddings and the loss are all memory traffic. Attention is counted within
    # samples, and causal in the language model. That layers of 1B models wait for the host, which starts their
    # operations one by one, is not counted: costs are affine. Kept bytes are those of transformers' modules
    # on fused attention. AdamW keeps two moments in float32, and a master copy of 16-bit parameters.
    unknown = sorted({record.kind for record in records} - set(_WORK))
    if unknown:
        raise ConfigError(f"kind of a layer must be one of {', '.join(_WORK)}, got {unknown[0]!r}")
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    degrees = degrees_of(tensor_parallel)
    parts = check_frozen(records, frozen)
    layers, before = list[LayerCost](), None
    for record in records:
        rates = _Rates(device, ELEMENT_BYTES[dtype], degree_of(degrees, record.module))
        work = _WORK[record.kind](_split_sizes(record, rates.degree))
        # Nothing comes before what an encoder reads: pixels, or frames of sound.
        previous = None if record.kind in _ENTRIES else before
        layers.append(_layer_cost(record, work, previous, rates, trained=record.trainable_parameters(frozen)))
        before = work
    return ModelProfile(tuple(layers), device=device.name, dtype=dtype, tensor_parallel=degrees, frozen=parts)


def with_sums(measured: ModelProfile, records: Sequence[LayerRecord], device: Device) -> ModelProfile:
    """Add to costs that one of several tensor ranks was measured to have what it waits for sums, counted for a device.

    Args:
        measured: Costs of the first rank's part of each layer.
        records: The model's layers.
        device: What the ranks run on; only its link counts.
    """
    layers = []
    for layer, record in zip(measured.layers, records, strict=True):
        rates = _Rates(device, ELEMENT_BYTES[measured.dtype], degree_of(measured.tensor_parallel, record.module))
        work = _WORK[record.kind](_split_sizes(record, rates.degree))
        ahead = rates.reduce_seconds * work.reduced
        back = rates.reduce_seconds * work.reduced_backward
        if work.at_once:
            ahead, back = ahead + back, CostModel()
        # A selective pass may spare some of the sums.
        again = {
            level: seconds if level == "none" or work.at_once else seconds + ahead
            for level, seconds in layer.recompute_seconds.items()
        }
        layers.append(
            replace(
                layer, forward_seconds=layer.forward_seconds + ahead, backward_seconds=layer.backward_seconds + back,
                recompute_seconds=again,
            )
        )  # fmt: skip
    return replace(measured, layers=tuple(layers))


_ENTRIES = ("patch_embedding", "sound_embedding")
# Layers that every tensor rank has and computes as a whole.
_NOT_SPLIT = (*_ENTRIES, "final_norm")
# What tensor ranks send for a block, in all-reduces of its hidden states; a gather or a scatter is half of one. Forward
# they gather tokens for attention, MLP and the block's output, and scatter two sums; backward the other way round.
# Recomputation gathers the block's input, and not its output.
_BLOCK_SUMS = 2.5


def _split_sizes(record: LayerRecord, degree: int) -> Mapping[str, int]:
    """A layer's sizes if each of its tensor ranks had what the fullest has: heads may be dealt unevenly, or copied."""
    sizes = dict(record.sizes)
    if degree == 1 or record.kind in _NOT_SPLIT:
        return sizes
    if record.kind == "decoder_block":
        check_degree((record,), degree)
        # Key and value heads that several tensor ranks need are on each of them, as vLLM has it.
        for name in ("kv_heads", "heads"):
            most = len(units_of(record.sizes, name, degree, 0)[0])
            sizes |= _grown(sizes, name, most * degree, each=2 * sizes["hidden"] * sizes["head_dim"])
    elif "heads" in sizes:
        # A ViT gets zero heads: NVLM trains the 25 heads of InternViT-6B as 32 (NVIDIA/Megatron-LM,
        # examples/multimodal/nvlm/internvit.py). The makers of InternVL leave its ViT whole instead
        # (OpenGVLab/InternVL#192), which is {"vision": 1, "language": degree}.
        sizes |= _grown(sizes, "heads", _multiple(sizes["heads"], degree), each=4 * sizes["hidden"] * sizes["head_dim"])
    if "vocab" in sizes:  # rows of zeros, as Megatron-LM has them
        sizes |= _grown(sizes, "vocab", _multiple(sizes["vocab"], degree), each=sizes["hidden"])
    if record.kind.endswith("projector"):
        width = "inner" if "inner" in sizes else "hidden"
        each = sizes["parameters"] // sizes[width]
        sizes |= _grown(sizes, width, _multiple(sizes[width], degree), each=each)
    if sizes.get("intermediate", 0) % degree:
        raise ConfigError(
            f"tensor_parallel must divide the intermediate {sizes['intermediate']} of {record.name}, got {degree}"
        )
    return sizes


def _multiple(size: int, degree: int) -> int:
    return -(-size // degree) * degree


def _grown(sizes: Mapping[str, int], name: str, size: int, *, each: int) -> dict[str, int]:
    """A size that has grown, where each unit of it has so many parameters."""
    return {name: size, "parameters": sizes["parameters"] + (size - sizes[name]) * each}


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a layer does for a micro-batch, per unit of its load.

    Tensor ranks share what is counted here, but for the fields whose names say ``whole``.
    """

    # Operations of products with weights, forward; backward to the inputs and to the weights take as many each:
    products: CostModel = field(default_factory=CostModel)
    # Operations of products of activations, forward:
    attention: CostModel = field(default_factory=CostModel)
    # Elements read and written, forward; backward takes ``_TRAFFIC_BACKWARD`` times as many:
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


class _Rates:
    """Seconds per operation, byte and summed element on one of the devices that share a layer."""

    def __init__(self, device: Device, element_bytes: int, degree: int) -> None:
        if device.flops_per_second is None or device.memory_bytes_per_second is None:
            raise ConfigError(
                f"device {device.name} must have flops_per_second and memory_bytes_per_second to count costs, "
                "got none; measure them instead"
            )
        rate = device.flops_per_second * device.fraction
        self.operation_seconds = element_bytes / 2 / rate  # the rate is that of 16 bits; 32 bits take twice as long
        self.byte_seconds = 1 / device.memory_bytes_per_second
        self.element_bytes = element_bytes
        self.degree = degree
        self.share = 1 / degree
        # An all-reduce moves 2 (t - 1) / t times its bytes over each device's link; a reduce-scatter and an all-gather
        # half of that each. Nothing is computed meanwhile: Megatron-LM hides a part of the backward ones behind weight
        # gradients. Their latency is not counted, nor what norms over the width of split heads (InternViT-6B's) and
        # adapters sum, which is small.
        elements_per_second = device.link_bytes_per_second * LINK_FRACTION / element_bytes
        self.reduce_seconds = 2 * (degree - 1) / degree / elements_per_second


def _layer_cost(record: LayerRecord, work: _Work, before: _Work | None, rates: _Rates, *, trained: int) -> LayerCost:
    # Norms and biases of split layers, at most 0.1 % of their parameters, are counted as split.
    split = 1.0 if record.kind in _NOT_SPLIT else rates.share
    whole_element = rates.element_bytes
    operation, element = rates.operation_seconds * split, whole_element * split
    traffic = rates.byte_seconds * element * work.traffic + rates.byte_seconds * whole_element * work.whole_traffic
    adapters, ranks, dropped = (record.sizes.get(name, 0) for name in ADAPTER_SIZES)
    # Operations, forward; backward to the inputs and to the weights take as many each.
    beside = 2 * adapters * work.rows
    attention = _ATTENTION_SLOWER * work.attention
    inputs = operation * (work.products + beside + _ATTENTION_BACKWARD * attention) + _TRAFFIC_BACKWARD * traffic
    inputs += rates.reduce_seconds * work.reduced_backward
    backward = inputs if before is not None else CostModel()  # pixels need no gradient
    share, share_of_adapters = _trained_shares(record, trained)
    weights = operation * (share * work.products + share_of_adapters * beside) if trained else CostModel()
    waits = trained > 0 and record.tied_key is None and work.pending != CostModel()
    copies = _split_sizes(record, rates.degree)["parameters"] / max(record.sizes["parameters"], 1)
    parameters = record.sizes["parameters"] * split * copies
    numbers = trained * split * copies
    master_bytes = _FLOAT32_BYTES if rates.element_bytes < _FLOAT32_BYTES else 0
    optimizer_bytes = numbers * (2 * _FLOAT32_BYTES + master_bytes)
    forward = operation * (work.products + beside + attention) + traffic + rates.reduce_seconds * work.reduced
    backward = backward if waits else backward + weights
    # of an adapter what its first matrix puts out; under dropout its own input and a byte for each number of it
    beside_kept = element * (ranks + dropped) * work.rows + split * dropped * work.rows
    kept = element * work.saved + split * _FLOAT32_BYTES * work.saved_float32 + beside_kept
    kept += whole_element * work.whole_saved + _FLOAT32_BYTES * work.whole_saved_float32
    # a recomputed layer keeps its input, of which tensor ranks have parts in blocks, and a feature that it passes on if
    # the layer before has made it, which the layers behind it keep too; the first one keeps nothing else anyway
    kept_recomputed = whole_element * (before.feature if before else work.whole_saved)
    if before:
        kept_recomputed += (element if record.kind.endswith("_block") else whole_element) * before.output
    recompute = {"full": forward}
    if work.at_once:
        forward, backward, recompute = forward + backward, CostModel(), {"full": CostModel()}
        kept = kept_recomputed = whole_element * work.whole_saved + CostModel(fixed=numbers * rates.element_bytes)
    return LayerCost(
        record.name,
        record.kind,
        module=record.module,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_seconds=weights if waits else CostModel(),
        # of an adapter what is between its two matrices, and the gradient there
        pending_bytes=element * (work.pending + (2 * ranks + dropped) * work.rows) + whole_element * work.whole_pending
        if waits
        else CostModel(),
        output_bytes=rates.element_bytes * (work.output + _carried(record.sizes))
        + CostModel(llm_tokens=record.token_bytes),
        saved_bytes={"none": kept, "full": kept_recomputed},
        recompute_seconds=recompute,
        parameter_bytes=round(parameters * rates.element_bytes),
        gradient_bytes=round(numbers * rates.element_bytes),
        optimizer_bytes=round(optimizer_bytes),
        # its state is read and written, the gradient read, the parameter written
        optimizer_seconds=(2 * optimizer_bytes + 2 * numbers * rates.element_bytes) * rates.byte_seconds,
        trainable=trained > 0,
        sizes=dict(record.sizes),
        tied_key=record.tied_key,
    )


def _trained_shares(record: LayerRecord, trained: int) -> tuple[float, float]:
    """The shares of a layer's own parameters, and of its adapters', that are trained."""
    if "adapters" not in record.sizes:
        return trained / max(record.trainable_parameters(()), 1), 0.0
    adapters = record.sizes["adapters"]
    of_adapters = min(trained, adapters)
    own = record.sizes["parameters"] - adapters
    return (trained - of_adapters) / max(own, 1), of_adapters / max(adapters, 1)


def _carried(sizes: Mapping[str, int]) -> CostModel:
    if not sizes.get("carried"):
        return CostModel()
    return CostModel(vision_units=sizes["carried"] * sizes["carried_hidden"] * _image_tokens(sizes))


def _patch_embedding(sizes: Mapping[str, int]) -> _Work:
    values = sizes["patches_per_tile"] * sizes["values_per_patch"]
    # A convolution whose stride is its kernel's width: one product with the values of each patch.
    return _Work(
        products=CostModel(vision_units=2 * values * sizes["hidden"]),
        whole_saved=CostModel(vision_units=values),
        output=CostModel(vision_units=sizes["tokens_per_tile"] * sizes["hidden"]),
    )


def _vision_block(sizes: Mapping[str, int]) -> _Work:
    tokens, hidden, intermediate = sizes["tokens_per_tile"], sizes["hidden"], sizes["intermediate"]
    matrices, attended = sizes.get("mlp_matrices", 2), sizes.get("attended", tokens)
    query = sizes["heads"] * sizes["head_dim"]  # the hidden size, and zero heads
    scales = sizes.get("residual_scales", 2)
    norms = _RMS_NORM * sizes["rms_norms"] + _LAYER_NORM * (2 - sizes["rms_norms"])
    # each pair of tokens takes two products of two operations for each element; 0 stands for all patches of the image
    pairs = CostModel(vision_units=tokens * attended) if attended else CostModel(vision_squared=1)
    return _Work(
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


def _deepstack_block(sizes: Mapping[str, int]) -> _Work:
    """A block of the ViT, and what makes of its output something that a decoder layer reads."""
    block = _vision_block(sizes)
    merger = _projector({**sizes, "inner": sizes["shuffled"], "hidden": sizes["carried_hidden"]})
    sums = {part.name: getattr(block, part.name) + getattr(merger, part.name) for part in fields(_Work)}
    return replace(_Work(**sums), output=block.output, feature=merger.output, rows=block.rows)


def _projector(sizes: Mapping[str, int]) -> _Work:
    tokens, shuffled, hidden = _image_tokens(sizes), sizes["shuffled"], sizes["hidden"]
    inner = sizes.get("inner", hidden)
    return _Work(
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


def _text_embedding(sizes: Mapping[str, int]) -> _Work:
    # each token's row is read and written; the backward pass writes and reads a gradient of the whole table, which does
    # not grow with the load and is small beside the blocks, so that it is not counted. Tensor ranks that have a part of
    # the vocabulary put out zeros for the tokens of the others.
    elements = CostModel(llm_tokens=sizes["hidden"])
    return _Work(whole_traffic=2 * elements, output=elements, reduced=elements)


def _decoder_block(sizes: Mapping[str, int]) -> _Work:
    # A token goes through the MLPs of its active experts alone. That small products take longer than their operations
    # say is not counted, nor that few tokens may load one expert more than another.
    hidden, experts, active = sizes["hidden"], sizes.get("experts", 0), sizes.get("active_experts", 1)
    intermediate = active * sizes["intermediate"]
    query, key_value = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    normed = sizes["qk_norms"] // 2 * (query + key_value)
    # a copy of a token for each of its experts, and what each makes of it before it is weighted
    copies = 2 * active * hidden if experts else 0
    return _Work(
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


def _final_norm(sizes: Mapping[str, int]) -> _Work:
    hidden = sizes["hidden"]
    return _Work(
        whole_traffic=CostModel(llm_tokens=_RMS_NORM * hidden),
        whole_saved=CostModel(llm_tokens=hidden),
        whole_saved_float32=CostModel(llm_tokens=hidden),
        output=CostModel(llm_tokens=hidden),
    )


def _head(sizes: Mapping[str, int]) -> _Work:
    hidden, vocabulary = sizes["hidden"], sizes["vocab"]
    slower = _UNALIGNED[math.gcd(vocabulary, 8)]
    return _Work(
        products=CostModel(target_tokens=slower * 2 * hidden * vocabulary),
        traffic=CostModel(target_tokens=6 * vocabulary),  # logits, in float32 too, and their logarithmic softmax
        whole_saved=CostModel(target_tokens=hidden),  # the gradient of its input
        reduced=CostModel(target_tokens=_LOSS_ELEMENTS),
        reduced_backward=CostModel(target_tokens=hidden),
        rows=CostModel(target_tokens=1),
        at_once=True,
    )


def _sound_projector(sizes: Mapping[str, int]) -> _Work:
    """One product, behind pooling of two positions to a token."""
    tokens, wide, hidden = sizes["tokens_per_tile"] / 2, sizes["shuffled"], sizes["hidden"]
    return _Work(
        products=CostModel(vision_units=2 * tokens * wide * hidden),
        whole_saved=CostModel(vision_units=tokens * wide),
        whole_pending=CostModel(vision_units=tokens * (wide + hidden)),
        output=CostModel(vision_units=tokens * hidden),
        rows=CostModel(vision_units=tokens),
    )


def _heard(count: Callable[[Mapping[str, int]], _Work]) -> Callable[[Mapping[str, int]], _Work]:
    """Work of an encoder of sound: by windows in place of tiles, or beside a ViT by positions, in units of sound."""

    def work(sizes: Mapping[str, int]) -> _Work:
        found = count(sizes)
        if sizes["patches_per_tile"] > 1:
            return found
        costs = {part.name: getattr(found, part.name) for part in fields(_Work) if part.name != "at_once"}
        heard: dict[str, Any] = {name: CostModel(sound_units=cost.vision_units) for name, cost in costs.items()}
        return _Work(**heard)

    return work


_WORK: Mapping[str, Callable[[Mapping[str, int]], _Work]] = {
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
