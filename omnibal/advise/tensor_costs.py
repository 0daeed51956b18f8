"""Costs where several devices share each layer, for layouts to be weighed, and how many must for a sample to fit."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from omnibal.advise.estimate import HEAD_ROOM, Estimate
from omnibal.advise.models import adapted_profile
from omnibal.cluster import Cluster
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile

DEGREES = (2, 4, 8)
"""Tensor ranks that are tried, as `omnibal.advise.layouts` does."""


@dataclass(frozen=True)
class TensorCosts:
    """Counted costs by the number of devices that share each layer of the encoder and of the LLM."""

    records: Sequence[LayerRecord] | None
    """The model's layers; None where costs are measured, which is done on one device."""
    device: Device
    dtype: str = "bfloat16"
    frozen: Sequence[str] = field(default=())
    lora_rank: int = 0
    """Rank of the adapters that are trained; 0 where weights are."""

    def __call__(self, encoder: int, language: int) -> ModelProfile:
        """The costs; a ConfigError says why so many devices cannot share a layer."""
        if self.records is None:
            raise ConfigError(f"tensor ranks must have counted costs, got measured ones for {language}")
        degrees = {"vision": encoder, "language": language}
        if self.lora_rank:
            return adapted_profile(self.records, self.device, rank=self.lora_rank, tensor_parallel=degrees)
        return analytic_profile(
            self.records, self.device, dtype=self.dtype, frozen=self.frozen, tensor_parallel=degrees
        )

    def left_out(self, cluster: Cluster) -> list[str]:
        """Why degrees are not weighed, a line for each reason."""
        if self.records is None:
            return ["tensor ranks: these costs are of one device; costs counted of a model tell all"]
        lines, across = list[str](), [degree for degree in DEGREES if degree > cluster.devices_per_node]
        if across:
            degrees = ", ".join(map(str, across))
            lines.append(f"{degrees} tensor ranks: they would cross nodes of {cluster.devices_per_node}")
        for degree in DEGREES[: len(DEGREES) - len(across)]:
            for part, degrees_of_both in (("ViT", (degree, 1)), ("LLM", (1, degree))):
                try:
                    self(*degrees_of_both)
                except ConfigError as reason:
                    lines.append(f"{degree} tensor ranks of the {part}: {reason}")
        return lines


def check_weighable(cluster: Cluster, samples_per_step: int) -> None:
    """Refuse machines and steps that all layouts are alike for, or that not every device has work in."""
    if cluster.num_devices < 2:
        raise ConfigError(f"cluster must have at least 2 devices for layouts to differ, got {cluster}")
    if samples_per_step < cluster.num_devices:
        raise ConfigError(
            f"samples of a step must be at least as many as the {cluster.num_devices} devices of {cluster} for layouts "
            f"to be weighed, got {samples_per_step}; take more accumulation, or fewer devices"
        )


def degrees_that_fit(now: Estimate, costs: TensorCosts) -> tuple[str, ...]:
    """The fewest devices that would have to share each sample for the present recipe to fit; nothing if it does.

    Sequence parallelism divides all that a micro-batch keeps, of ViT and LLM alike, and none of the model's state.
    """
    memory, room = now.memory, now.memory.budget_bytes * (1 - HEAD_ROOM)
    if now.peaks[0] <= memory.budget_bytes:
        return ()
    found = list[str]()
    for degree in DEGREES:
        try:
            profile = costs(degree, degree)
        except ConfigError:
            continue
        if memory.cluster.devices_per_node % degree:
            continue
        # Logits are shared as the head is: each device has those of its part of the vocabulary.
        layers = tuple(
            replace(layer, sizes={**layer.sizes, "vocab": -(-layer.sizes["vocab"] // degree)})
            if layer.kind == "head" else layer
            for layer in profile.layers
        )  # fmt: skip
        ranks = replace(memory.cluster, devices_per_node=memory.cluster.devices_per_node // degree, memory_bytes=None)
        shared = replace(memory, profile=replace(profile, layers=layers), cluster=ranks)
        if max(float(shared.peak_bytes(batches.loads).max()) for batches in now.batches) <= room:
            found.append(f"{degree} tensor ranks")
            break
    kept = now.peaks[0] - memory.state_bytes
    least = next((2**power for power in range(1, 11) if memory.state_bytes + kept / 2**power <= room), None)
    if least is not None and memory.cluster.num_devices % least == 0:
        found.append(f"sequence parallelism of degree {least}")
    return tuple(found)
