"""Seconds of each phase of each micro-batch: what ``wait`` takes, from what layers cost and what micro-batches hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from omnibal.cost import CostModel, FloatArray, Load
from omnibal.device import Device
from omnibal.families.base import LayerRecord
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LayerCost, Level, ModelProfile

PHASES: Final = ("vision forward", "language forward", "language backward", "vision backward")
"""In their order; the projector belongs to vision. All ranks run them one after the other."""


def phase_seconds(profile: ModelProfile, loads: Load, *, recompute: Level = "none") -> dict[str, FloatArray]:
    """Seconds that every micro-batch takes in each phase, without any wait.

    Args:
        profile: What the layers cost, such as ``analytic_profile`` or ``adapted_profile`` counts.
        loads: The micro-batches, of any shape; padding counts as tokens.
        recompute: At which level the layers run their backward passes.

    Returns:
        Under each of ``PHASES`` an array of the shape of ``loads``.

    >>> from omnibal.device import DEVICES
    >>> from omnibal.families.parts import text_records
    >>> config = {"model_type": "qwen2", "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 2,
    ...           "num_attention_heads": 32, "vocab_size": 1000}
    >>> profile = analytic_profile(text_records(config, tied=False), DEVICES["A100-80GB"])
    >>> seconds = phase_seconds(profile, Load([0, 0], [1000, 2000]))
    >>> (seconds["language backward"] / seconds["language forward"]).round().tolist()
    [2.0, 2.0]
    """
    return {phase: cost(loads) for phase, cost in phase_costs(profile, recompute=recompute).items()}


def phase_costs(profile: ModelProfile, *, recompute: Level = "none") -> dict[str, CostModel]:
    """The same as costs of a micro-batch, to be evaluated on many of them; arguments as of ``phase_seconds``.

    Backward passes end at the first layer that is trained: what lies before it has none, and recomputes nothing.
    """
    costs: dict[str, CostModel] = dict.fromkeys(PHASES, CostModel())
    reached = False
    for layer in profile.layers:
        reached = reached or layer.trainable
        part = "language" if layer.module == "language" else "vision"
        costs[f"{part} forward"] += layer.forward_seconds
        if reached:
            costs[f"{part} backward"] += _backward(layer, recompute)
    return costs


def _backward(layer: LayerCost, recompute: Level) -> CostModel:
    again = layer.recompute_seconds.get(recompute, CostModel())
    return layer.backward_seconds + layer.weight_seconds + again


def adapted_profile(
    records: Sequence[LayerRecord], device: Device, *, rank: int, dtype: str = "bfloat16"
) -> ModelProfile:
    """Counted costs where adapters of low rank (LoRA) on the decoder blocks' products are all that is trained.

    Source: Hu et al., "LoRA", ICLR 2022, section 4. The operations of adapters are counted; that their small products
    take longer than their operations say is not.

    Args:
        records: The layers, from ``omnibal.families``.
        device: What they run on.
        rank: Of the adapters.
        dtype: Of forward and backward passes.

    Raises:
        ConfigError: As of ``analytic_profile``.
    """
    return analytic_profile([_adapted(record, rank) for record in records], device, dtype=dtype)


def _adapted(record: LayerRecord, rank: int) -> LayerRecord:
    """A layer whose own weights are frozen, with adapters on the products of a decoder block."""
    own = record.sizes["parameters"]
    adapters, ranks = (adapter_parameters(record.sizes, rank), 7 * rank) if record.kind == "decoder_block" else (0, 0)
    sizes = {"parameters": own + adapters, "untrained": own, "adapters": adapters, "adapter_ranks": ranks}
    return replace(record, sizes={**record.sizes, **sizes})


def adapter_parameters(sizes: Mapping[str, int], rank: int) -> int:
    """Parameters of adapters on all seven products of a decoder block.

    >>> adapter_parameters({"hidden": 8, "intermediate": 16, "heads": 2, "kv_heads": 1, "head_dim": 4}, 2)
    256
    """
    hidden, query, key_value = sizes["hidden"], *(sizes[name] * sizes["head_dim"] for name in ("heads", "kv_heads"))
    # queries, attention's output; keys, values; the MLP's three
    return rank * (2 * (hidden + query) + 2 * (hidden + key_value) + 3 * (hidden + sizes["intermediate"]))
