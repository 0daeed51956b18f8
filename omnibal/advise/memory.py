"""What a data-parallel rank holds at its peak, with the whole model on it or its share of it under ZeRO and FSDP.

Assumptions, beside those of counted costs: gradients in 16 bits; unless the precision says otherwise AdamW in float32
with a master copy of 16-bit weights (16 bytes a trained parameter in all); ZeRO 3 and FSDP hold two gathered layers at
a time; the loss takes the logits of all tokens in float32, as transformers' own does whatever the labels, or those of
target rows, some at a time. At the update activations have gone, and copies of gradients are there.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from omnibal.advise.state import USUAL, TrainingPrecision
from omnibal.advise.wait import Trainer
from omnibal.cluster import Cluster
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.memory.footprint import loss_bytes
from omnibal.profile.records import LayerCost, Level, ModelProfile

SHARED: Final[dict[Trainer, tuple[str, ...]]] = {
    "ddp": (),
    "zero1": ("optimizer_bytes",),
    "zero2": ("optimizer_bytes", "gradient_bytes"),
    "zero3": ("optimizer_bytes", "gradient_bytes", "parameter_bytes"),
    "fsdp": ("optimizer_bytes", "gradient_bytes", "parameter_bytes"),
}
"""What ranks hold only their share of."""
OFFLOADED_WITH: Final = {
    "parameter_bytes": "parameters", "gradient_bytes": "optimizer", "optimizer_bytes": "optimizer",
}  # fmt: skip
LOGIT_BYTES: Final = 12
"""Per logit at the loss's peak, in its backward pass: float32 of the logarithmic softmax, its gradient, the logits'.

By then those of 16 bits have gone. Measured in a step of transformers' Trainer (``tests/advise/test_memory.py``).
"""
GRADIENT_SHARE: Final = 1 / 3
"""Of what a block keeps, as in ``omnibal.memory.footprint``."""


@dataclass(frozen=True)
class RankMemory:
    """How much ranks hold under a trainer.

    Attributes:
        profile: What the layers hold.
        trainer: How ranks share their work.
        cluster: All of its devices are ranks.
        recompute: At which level the layers run.
        target_rows: Whether the head works on the rows that predict a target alone.
        offloaded: What the host's memory holds, as far as ranks share it: "optimizer" (gradients with it, which
            DeepSpeed updates there), "parameters".
        precision: What optimizer, copies of weights, and frozen weights take.
    """

    profile: ModelProfile
    trainer: Trainer
    cluster: Cluster
    recompute: Level
    target_rows: bool = False
    offloaded: tuple[str, ...] = ()
    precision: TrainingPrecision = USUAL

    @cached_property
    def held(self) -> ModelProfile:
        """The profile, with the bytes that the precision says."""
        return self.precision.applied(self.profile, self.trainer)

    @property
    def budget_bytes(self) -> int:
        """What a device has."""
        given = self.cluster.memory_bytes
        return int(min(given) if isinstance(given, tuple) else given or self.cluster.device.memory_bytes)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, optimizer state and what the process holds beside the model."""
        ranks, total = self.cluster.num_devices, self.cluster.overhead_bytes
        for name in OFFLOADED_WITH:
            held = sum(getattr(layer, name) for layer in _untied(self.held))
            share = 0 if OFFLOADED_WITH[name] in self.offloaded else -(-held // ranks)
            total += share if name in SHARED[self.trainer] else held
        if "parameter_bytes" in SHARED[self.trainer]:
            total += 2 * max(layer.parameter_bytes for layer in self.held.layers)
        return total

    @property
    def update_bytes(self) -> float:
        """What an update needs beyond the state."""
        if "optimizer" in self.offloaded and "optimizer_bytes" in SHARED[self.trainer]:
            return 0.0
        return self.precision.copied_bytes(self.profile, self.trainer, self.cluster.num_devices)

    def peak_bytes(self, loads: Load) -> FloatArray:
        """What a rank holds while each micro-batch runs, or at the update if it is more, in the shape of the loads."""
        first = self.profile.frozen_front
        # of the head only logits count, as transformers has them all at one time
        trained = [layer for layer in self.profile.layers[first:] if layer.kind != "head"]
        levels = [self.recompute if self.recompute in layer.saved_bytes else "none" for layer in trained]
        kept = sum((layer.saved_bytes[level] for layer, level in zip(trained, levels, strict=True)), start=CostModel())
        working = [_working(layer, level) for layer, level in zip(trained, levels, strict=True)]
        passing = np.max([cost(loads) for cost in set(working)], axis=0)
        head = next(layer for layer in self.profile.layers if layer.kind == "head")
        all_logits = LOGIT_BYTES * head.sizes["vocab"] * loads.llm_tokens
        logits = loss_bytes(head, loads.target_tokens) if self.target_rows else all_logits
        if self.precision.fused_loss and not self.target_rows:
            logits = loss_bytes(head, loads.llm_tokens)
        # behind the head the logits have gone
        running = kept(loads) + np.maximum(passing, logits)
        held: FloatArray = self.state_bytes + np.maximum(running, self.update_bytes)
        return held


def _working(layer: LayerCost, level: Level) -> CostModel:
    """What a layer's backward pass needs beyond what is kept: recomputed activations, and gradients."""
    everything = layer.saved_bytes["none"]
    return everything * ((level != "none") + GRADIENT_SHARE)


def _untied(profile: ModelProfile) -> list[LayerCost]:
    """Layers, each weight once."""
    seen: set[str] = set()
    found = []
    for layer in profile.layers:
        if layer.tied_key is None or layer.tied_key not in seen or layer.kind != "head":
            found.append(layer)
        seen.add(layer.tied_key or "")
    return found
