"""What it costs to rearrange samples: links measured on the ranks that use them, beside counted costs of computing."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from omnibal.advise.wait import phase_costs
from omnibal.cost import CostModel
from omnibal.data.limits import PackLimits
from omnibal.dispatch.step_plan import Costs, Link
from omnibal.integrations.expected import counted_profile
from omnibal.integrations.rearranging import blank_image
from omnibal.profile.records import Level

MEASURED_BYTES: Final = 2**24
"""That each rank sends in all: some ten images."""
RUNS: Final = 4
"""Of which the fastest counts: the first ones connect the ranks."""


def counted_costs(
    model: Any,
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    limits: PackLimits | None = None,
    recompute: Level = "none",
    phases_meet: bool = True,
    num_positions: int = 1,
) -> Costs:
    """What samples cost in seconds, counted, beside what it takes to exchange them, measured; all ranks together.

    Args:
        model: One of transformers', before it is wrapped or sharded.
        device: Where it will train; by default where it is.
        group: Of the ranks that share samples; by default all.
        limits: As of ``Costs``.
        recompute: At which level layers run their backward passes.
        phases_meet: As of ``Link``.
        num_positions: Rows of a token's positions.

    Returns:
        Costs without a link on a CPU, whose seconds nobody has counted, and default ones for a family whose layers
        nobody has counted.
    """
    device = device or next(model.parameters()).device
    on_gpu = device.type == "cuda"
    profile = counted_profile(model, torch.cuda.get_device_name(device) if on_gpu else None)
    if profile is None:
        return Costs(limits=limits)
    phases = phase_costs(profile, recompute=recompute)
    costs = Costs(vision=_per_sample(phases, "vision"), llm=_per_sample(phases, "language"), limits=limits)
    if not on_gpu:
        return costs
    latency, speed = measured_link(group, device)
    return replace(costs, link=Link(latency, speed, **carried_bytes(model, num_positions), phases_meet=phases_meet))


def _per_sample(costs: Mapping[str, CostModel], part: str) -> CostModel:
    """What a micro-batch costs whatever it holds is the same on all ranks."""
    return replace(costs[f"{part} forward"] + costs[f"{part} backward"], fixed=0.0)


def carried_bytes(model: Any, num_positions: int) -> dict[str, float]:
    """Bytes of a vision unit's pixels, of an image token's features and gradients, and of a text token."""
    config, pixels = model.config, blank_image(model)["pixel_values"]
    layers = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    features = config.get_text_config().hidden_size * pixels.element_size() * layers
    language = {id(parameter) for parameter in _language_model(model).parameters()}
    comes_back = any(p.requires_grad and id(p) not in language for p in model.parameters())
    return {
        "vision_unit_bytes": float(pixels.nbytes / len(pixels)),
        "image_token_bytes": float(features * (2 if comes_back else 1)),
        "token_bytes": 8.0 * (2 + num_positions),
    }


def _language_model(model: Any) -> nn.Module:
    """The LLM with its head, whose gradients do not travel."""
    head = model.get_output_embeddings()
    return nn.ModuleList([model.model.language_model, *([] if head is None else [head])])


def measured_link(group: dist.ProcessGroup | None, device: torch.device) -> tuple[float, float]:
    """Seconds of an all-to-all that brings next to nothing, and bytes a second of one that brings much.

    The same on all ranks: the slowest counts. Takes some exchanges of 16 MiB a rank.

    Args:
        group: The ranks that exchange; by default all.
        device: Of what they exchange.
    """
    ranks = dist.get_world_size(group)
    least, most = (_seconds(group, device, size) for size in (ranks, max(MEASURED_BYTES // ranks, 1) * ranks))
    found = torch.tensor([least, most], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    latency, whole = found.tolist()
    # What a rank sends to itself travels through its memory alone.
    travels = MEASURED_BYTES * (ranks - 1) / ranks
    return latency, travels / max(whole - latency, 1e-9)


def _seconds(group: dist.ProcessGroup | None, device: torch.device, size: int) -> float:
    """The least of several exchanges of so many bytes."""
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    arrived, found = torch.empty_like(sent), []
    for _ in range(RUNS):
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # begin together
        _finish(device)
        begun = time.perf_counter()
        dist.all_to_all_single(arrived, sent, group=group)
        _finish(device)
        found.append(time.perf_counter() - begun)
    return min(found)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
