"""Analytic costs: from a family's layer records and a device, without the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from omnibal.cost import CostModel
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.families.base import ADAPTER_SIZES, LayerRecord, check_frozen
from omnibal.profile.records import ELEMENT_BYTES, LayerCost, ModelProfile

_FLOAT32_BYTES = 4
# Backward of fused attention, which computes the scores again, in forward passes.
_ATTENTION_BACKWARD = 2.5


def analytic_profile(
    records: Sequence[LayerRecord],
    device: Device,
    *,
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
    frozen: Collection[str] = (),
) -> ModelProfile:
    """Costs of a model's layers on a device by counting operations and bytes.

    ``tensor_parallel`` devices share each layer: it divides all costs but of what is sent between stages. ``frozen`` is
    what is not trained, as ``check_frozen`` takes it.
    """
    # Matrix products run at ``device.fraction`` of the peak, whatever their sizes. Attention is counted within samples,
    # and causal in the language model. Norms and activation functions are thought of as part of the fraction;
    # embeddings and the loss, which are all memory traffic, are counted. Kept bytes are those of transformers' modules
    # on fused attention. AdamW keeps two moments in float32, and a master copy of 16-bit parameters. What devices that
    # share a layer tell each other is not counted: by arithmetic their all-reduces add 3 to 24 % to a block of
    # InternViT-6B on A100s, and 2 to 6 % to one of a large language model, from 2 to 8 devices
    # (tools/partition/RESULTS.md).
    unknown = sorted({record.kind for record in records} - set(_WORK))
    if unknown:
        raise ConfigError(f"kind of a layer must be one of {', '.join(_WORK)}, got {unknown[0]!r}")
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    if tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel must be positive, got {tensor_parallel}")
    parts = check_frozen(records, frozen)
    unit = _Unit(device, ELEMENT_BYTES[dtype], tensor_parallel)
    works = [_WORK[record.kind](record.sizes) for record in records]
    layers = [
        _layer_cost(record, work, previous, unit, trained=record.trainable_parameters(frozen))
        for record, work, previous in zip(records, works, [None, *works[:-1]], strict=True)
    ]
    return ModelProfile(tuple(layers), device=device.name, dtype=dtype, tensor_parallel=tensor_parallel, frozen=parts)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a layer does for a micro-batch, per unit of its load."""

    # Operations of products with weights, forward; backward to the inputs and to the weights take as many each:
    products: CostModel = field(default_factory=CostModel)
    # Operations of products of activations, forward:
    attention: CostModel = field(default_factory=CostModel)
    # Elements read and written beside the products, forward; backward takes as many:
    traffic: CostModel = field(default_factory=CostModel)
    # Elements that autograd keeps, and float32 numbers beside them, whatever the dtype (the inputs of RMS norms):
    saved: CostModel = field(default_factory=CostModel)
    saved_float32: CostModel = field(default_factory=CostModel)
    # Elements that weight gradients keep while they wait: inputs of the products, and gradients of their outputs.
    # Nothing where they cannot wait: those of convolutions, and of what a layer shares with another one.
    pending: CostModel = field(default_factory=CostModel)
    # Elements sent on, and elements beside them that layers far behind read:
    output: CostModel = field(default_factory=CostModel)
    feature: CostModel = field(default_factory=CostModel)
    # Rows of the products' inputs: what an adapter beside one of them gets to see:
    rows: CostModel = field(default_factory=CostModel)
    # Whether the forward pass computes all gradients, and keeps them in place of activations:
    at_once: bool = False


class _Unit:
    def __init__(self, device: Device, element_bytes: int, tensor_parallel: int) -> None:
        if device.flops_per_second is None or device.memory_bytes_per_second is None:
            raise ConfigError(
                f"device {device.name} must have flops_per_second and memory_bytes_per_second to count costs, "
                "got none; measure them instead"
            )
        rate = device.flops_per_second * device.fraction
        self.operation_seconds = element_bytes / 2 / rate  # the rate is that of 16 bits; 32 bits take twice as long
        self.byte_seconds = 1 / device.memory_bytes_per_second
        self.element_bytes = element_bytes
        self.share = 1 / tensor_parallel


def _layer_cost(record: LayerRecord, work: _Work, before: _Work | None, unit: _Unit, *, trained: int) -> LayerCost:
    operation, element = unit.operation_seconds * unit.share, unit.element_bytes * unit.share
    traffic = unit.byte_seconds * element * work.traffic
    adapters, ranks, dropped = (record.sizes.get(name, 0) for name in ADAPTER_SIZES)
    # Operations, forward; backward to the inputs and to the weights take as many each.
    beside = 2 * adapters * work.rows
    inputs = operation * (work.products + beside + _ATTENTION_BACKWARD * work.attention) + traffic
    backward = inputs if before is not None else CostModel()  # pixels need no gradient
    share, share_of_adapters = _trained_shares(record, trained)
    weights = operation * (share * work.products + share_of_adapters * beside) if trained else CostModel()
    waits = trained > 0 and record.tied_key is None and work.pending != CostModel()
    parameters = record.sizes["parameters"] * unit.share
    numbers = trained * unit.share
    master_bytes = _FLOAT32_BYTES if unit.element_bytes < _FLOAT32_BYTES else 0
    optimizer_bytes = numbers * (2 * _FLOAT32_BYTES + master_bytes)
    forward = operation * (work.products + beside + work.attention) + traffic
    backward = backward if waits else backward + weights
    # of an adapter what its first matrix puts out; under dropout its own input and a byte for each number of it
    beside_kept = element * (ranks + dropped) * work.rows + unit.share * dropped * work.rows
    kept = element * work.saved + unit.share * _FLOAT32_BYTES * work.saved_float32 + beside_kept
    # a recomputed layer keeps its input, and a feature that it passes on if the layer before has made it, which the
    # layers behind it keep too; the first one keeps nothing else anyway
    kept_recomputed = unit.element_bytes * (before.output + before.feature if before else work.saved)
    recompute = {"full": forward}
    if work.at_once:
        forward, backward, recompute = forward + backward, CostModel(), {"full": CostModel()}
        kept = kept_recomputed = element * work.saved + CostModel(fixed=numbers * unit.element_bytes)
    return LayerCost(
        record.name,
        record.kind,
        module=record.module,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_seconds=weights if waits else CostModel(),
        # of an adapter what is between its two matrices, and the gradient there
        pending_bytes=element * (work.pending + (2 * ranks + dropped) * work.rows) if waits else CostModel(),
        output_bytes=unit.element_bytes * (work.output + _carried(record.sizes))
        + CostModel(llm_tokens=record.token_bytes),
        saved_bytes={"none": kept, "full": kept_recomputed},
        recompute_seconds=recompute,
        parameter_bytes=round(parameters * unit.element_bytes),
        gradient_bytes=round(numbers * unit.element_bytes),
        optimizer_bytes=round(optimizer_bytes),
        # its state is read and written, the gradient read, the parameter written
        optimizer_seconds=(2 * optimizer_bytes + 2 * numbers * unit.element_bytes) * unit.byte_seconds,
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
    """Elements that pass on beside hidden states."""
    if not sizes.get("carried"):
        return CostModel()
    return CostModel(vision_units=sizes["carried"] * sizes["carried_hidden"] * _image_tokens(sizes))


def _patch_embedding(sizes: Mapping[str, int]) -> _Work:
    values = sizes["patches_per_tile"] * sizes["values_per_patch"]
    # A convolution whose stride is its kernel's width: one product with the values of each patch.
    return _Work(
        products=CostModel(vision_units=2 * values * sizes["hidden"]),
        saved=CostModel(vision_units=values),
        output=CostModel(vision_units=sizes["tokens_per_tile"] * sizes["hidden"]),
    )


def _vision_block(sizes: Mapping[str, int]) -> _Work:
    tokens, hidden, intermediate = sizes["tokens_per_tile"], sizes["hidden"], sizes["intermediate"]
    matrices, attended = sizes.get("mlp_matrices", 2), sizes.get("attended", tokens)
    # each pair of tokens takes two products of two operations for each element; 0 stands for all patches of the image
    pairs = CostModel(vision_units=tokens * attended) if attended else CostModel(vision_squared=1)
    return _Work(
        products=CostModel(vision_units=2 * tokens * (4 * hidden**2 + matrices * hidden * intermediate)),
        attention=4 * hidden * pairs,
        # of two norms the output, and the input or (RMS) what is multiplied by the weight; queries, keys, values (where
        # queries and keys are turned, with what they were), attention's output; the MLP's activation and its inputs;
        # the residual branches that are scaled; of norms of queries and keys what is multiplied by the weight; what a
        # final norm reads
        saved=CostModel(
            vision_units=tokens
            * (
                (8 + 2 * sizes.get("rotary", 0) + sizes.get("residual_scales", 2) + sizes["qk_norms"]) * hidden
                + sizes.get("final_norms", 0) * hidden
                + sizes.get("kept_in_mlp", 2) * intermediate
            )
        ),
        saved_float32=CostModel(vision_units=tokens * (sizes["rms_norms"] + sizes["qk_norms"]) * hidden),
        # outputs of two norms and of attention, the MLP's activation; and the gradients of all products
        pending=CostModel(
            vision_units=tokens * (3 * hidden + intermediate + 5 * hidden + (matrices - 1) * intermediate)
        ),
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
        # inputs of the norm, of two products and of the activation
        saved=CostModel(vision_units=tokens * ((1 + sizes.get("norms", 1)) * shuffled + 2 * inner)),
        saved_float32=CostModel(vision_units=tokens * sizes.get("rms_norms", 0) * shuffled),
        pending=CostModel(vision_units=tokens * (shuffled + 2 * inner + hidden)),
        output=CostModel(vision_units=tokens * hidden),
        rows=CostModel(vision_units=tokens),
    )


def _image_tokens(sizes: Mapping[str, int]) -> float:
    """Tokens that a vision unit brings to the language model: a tile many, a patch a part of one."""
    return 1 / sizes["units_per_token"] if "units_per_token" in sizes else sizes["image_tokens_per_tile"]


def _text_embedding(sizes: Mapping[str, int]) -> _Work:
    # each token's row is read and written; the backward pass writes and reads a gradient of the whole table, which does
    # not grow with the load and is small beside the blocks, so that it is not counted
    return _Work(traffic=CostModel(llm_tokens=2 * sizes["hidden"]), output=CostModel(llm_tokens=sizes["hidden"]))


def _decoder_block(sizes: Mapping[str, int]) -> _Work:
    hidden, intermediate = sizes["hidden"], sizes["intermediate"]
    query, key_value = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    normed = sizes["qk_norms"] // 2 * (query + key_value)
    return _Work(
        # queries and the output, keys and values; the MLP's three matrices; two operations an element
        products=CostModel(llm_tokens=2 * (2 * hidden * (query + key_value) + 3 * hidden * intermediate)),
        attention=CostModel(llm_tokens_squared=2 * query),  # half of all pairs of tokens, 2 products, 2 operations each
        # of two norms the output before and after the weight; queries, keys, values, attention's output; the MLP's
        # gate, its activation, the other branch, their product; of norms of queries and keys the output before the
        # weight
        saved=CostModel(llm_tokens=4 * hidden + 2 * query + 2 * key_value + 4 * intermediate + normed),
        saved_float32=CostModel(llm_tokens=2 * hidden + normed),
        # outputs of two norms and of attention, the MLP's product; and the gradients of all products
        pending=CostModel(
            llm_tokens=2 * hidden + query + intermediate + query + 2 * key_value + 2 * hidden + 2 * intermediate
        ),
        output=CostModel(llm_tokens=hidden),
        rows=CostModel(llm_tokens=1),
    )


def _final_norm(sizes: Mapping[str, int]) -> _Work:
    hidden = sizes["hidden"]
    return _Work(
        traffic=CostModel(llm_tokens=4 * hidden),
        saved=CostModel(llm_tokens=hidden),
        saved_float32=CostModel(llm_tokens=hidden),
        output=CostModel(llm_tokens=hidden),
    )


def _head(sizes: Mapping[str, int]) -> _Work:
    hidden, vocabulary = sizes["hidden"], sizes["vocab"]
    return _Work(
        products=CostModel(target_tokens=2 * hidden * vocabulary),
        traffic=CostModel(target_tokens=6 * vocabulary),  # logits, in float32 too, and their logarithmic softmax
        saved=CostModel(target_tokens=hidden),  # the gradient of its input
        rows=CostModel(target_tokens=1),
        at_once=True,
    )


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
}
