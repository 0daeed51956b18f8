"""Analytic costs: from a family's layer records and a device, without the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from omnibal.cost import CostModel
from omnibal.device import LINK_FRACTION, Device
from omnibal.errors import ConfigError
from omnibal.families.base import ADAPTER_SIZES, LayerRecord, check_frozen
from omnibal.families.parts import check_degree, units_of
from omnibal.profile.records import ELEMENT_BYTES, FLOAT32, LayerCost, ModelProfile, degree_of, degrees_of
from omnibal.profile.work import ATTENTION_SLOWER, WORK, Work

COUNTED_DEVICE: Final = "A100-80GB"
"""For which costs are counted where the device at hand is not known."""
# Backward of fused attention, which computes the scores again, in forward passes.
_ATTENTION_BACKWARD = 2.5
# The backward pass reads and writes about twice the elements of the forward pass.
_TRAFFIC_BACKWARD = 2


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
        dtype: Precision of the forward pass.
        tensor_parallel: Devices of one node that share each layer, as Megatron-LM splits it: one number, or one each of
            ``"vision"`` (the projector with it) and ``"language"``. In blocks they also share the tokens of norms and
            residuals.
        frozen: What is not trained, as ``check_frozen`` takes it.

    Source of the split: Shoeybi et al., "Megatron-LM" (2019), section 3; of the tokens' Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
    """
    # Matrix products run at ``device.fraction`` of the peak, and beside that read their inputs and write their outputs
    # at the memory's speed, which is how narrow layers come to less of the peak than wide ones. Norms, rotary
    # embeddings, activation functions, embeddings and the loss are all memory traffic. Attention is counted within
    # samples, and causal in the language model. That layers of 1B models wait for the host, which starts their
    # operations one by one, is not counted: costs are affine. Kept bytes are those of transformers' modules
    # on fused attention. AdamW keeps two moments in float32, and a master copy of 16-bit parameters.
    unknown = sorted({record.kind for record in records} - set(WORK))
    if unknown:
        raise ConfigError(f"kind of a layer must be one of {', '.join(WORK)}, got {unknown[0]!r}")
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    degrees = degrees_of(tensor_parallel)
    parts = check_frozen(records, frozen)
    layers, before = list[LayerCost](), None
    for record in records:
        rates = _Rates(device, ELEMENT_BYTES[dtype], degree_of(degrees, record.module))
        work = WORK[record.kind](_split_sizes(record, rates.degree))
        # Nothing comes before what an encoder reads: pixels, or frames of sound.
        previous = None if record.kind in _ENTRIES else before
        layers.append(_layer_cost(record, work, previous, rates, trained=record.trainable_parameters(frozen)))
        before = work
    return ModelProfile(tuple(layers), device=device.name, dtype=dtype, tensor_parallel=degrees, frozen=parts)


def with_sums(measured: ModelProfile, records: Sequence[LayerRecord], device: Device) -> ModelProfile:
    """Add to measured costs of one of several tensor ranks what it waits for sums, counted for a device."""
    # Measured was the first rank's part of each layer; of the device only its link counts.
    layers = []
    for layer, record in zip(measured.layers, records, strict=True):
        rates = _Rates(device, ELEMENT_BYTES[measured.dtype], degree_of(measured.tensor_parallel, record.module))
        work = WORK[record.kind](_split_sizes(record, rates.degree))
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
                layer,
                forward_seconds=layer.forward_seconds + ahead,
                backward_seconds=layer.backward_seconds + back,
                recompute_seconds=again,
            )
        )
    return replace(measured, layers=tuple(layers))


_ENTRIES = ("patch_embedding", "sound_embedding")
# Layers that every tensor rank has and computes as a whole.
_NOT_SPLIT = (*_ENTRIES, "final_norm")


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


def _layer_cost(record: LayerRecord, work: Work, before: Work | None, rates: _Rates, *, trained: int) -> LayerCost:
    # Norms and biases of split layers, at most 0.1 % of their parameters, are counted as split.
    split = 1.0 if record.kind in _NOT_SPLIT else rates.share
    whole_element = rates.element_bytes
    operation, element = rates.operation_seconds * split, whole_element * split
    traffic = rates.byte_seconds * element * work.traffic + rates.byte_seconds * whole_element * work.whole_traffic
    adapters, ranks, dropped = (record.sizes.get(name, 0) for name in ADAPTER_SIZES)
    # Operations, forward; backward to the inputs and to the weights take as many each.
    beside = 2 * adapters * work.rows
    attention = ATTENTION_SLOWER * work.attention
    inputs = operation * (work.products + beside + _ATTENTION_BACKWARD * attention) + _TRAFFIC_BACKWARD * traffic
    inputs += rates.reduce_seconds * work.reduced_backward
    backward = inputs if before is not None else CostModel()  # pixels need no gradient
    share, share_of_adapters = _trained_shares(record, trained)
    weights = operation * (share * work.products + share_of_adapters * beside) if trained else CostModel()
    waits = trained > 0 and record.tied_key is None and work.pending != CostModel()
    copies = _split_sizes(record, rates.degree)["parameters"] / max(record.sizes["parameters"], 1)
    parameters = record.sizes["parameters"] * split * copies
    numbers = trained * split * copies
    master_bytes = FLOAT32 if rates.element_bytes < FLOAT32 else 0
    optimizer_bytes = numbers * (2 * FLOAT32 + master_bytes)
    forward = operation * (work.products + beside + attention) + traffic + rates.reduce_seconds * work.reduced
    backward = backward if waits else backward + weights
    # of an adapter what its first matrix puts out; under dropout its own input and a byte for each number of it
    beside_kept = element * (ranks + dropped) * work.rows + split * dropped * work.rows
    kept = element * work.saved + split * FLOAT32 * work.saved_float32 + beside_kept
    kept += whole_element * work.whole_saved + FLOAT32 * work.whole_saved_float32
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
    """Elements that a layer hands on for layers far behind it, beside its own output: of each token of an image."""
    if not sizes.get("carried"):
        return CostModel()
    return CostModel(vision_units=sizes["carried"] * sizes["carried_hidden"] / sizes["units_per_token"])
