"""Draws a step of a pipeline and of units: python -m tools.layouts.timeline; docs/layouts.md shows the picture."""

from pathlib import Path
from typing import Final

import numpy as np

from omnibal.cluster import Encoder, Layout, Links
from omnibal.cost import CostModel, Load
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.pipeline.units import simulate_units
from omnibal.profile.records import LayerCost, ModelProfile
from omnibal.report.stages import plot_timeline

OUT: Final = Path(__file__).parents[2] / "docs" / "pictures" / "units.png"
ENCODER, LANGUAGE = 1.0, (2.0, 2.0)
"""Seconds of a micro-batch forward in the encoder and in each of the LLM's two stages."""
MICRO_BATCHES = 6


def layer(name: str, seconds: float) -> LayerCost:
    """A layer whose backward pass takes twice as long as its forward pass."""
    cost = CostModel(fixed=seconds)
    module = "vision" if name == "encoder" else "language"
    saved = {"none": CostModel(), "full": CostModel()}
    return LayerCost(
        name, "block", module=module, forward_seconds=cost, backward_seconds=cost, weight_seconds=cost,
        output_bytes=CostModel(), saved_bytes=saved,
    )  # fmt: skip


def main() -> None:
    """Six devices: two replicas of a pipeline of three stages; and one encoder for two LLMs, with five devices."""
    layers = (layer("encoder", ENCODER), *(layer(f"decoder.{i}", seconds) for i, seconds in enumerate(LANGUAGE)))
    profile = ModelProfile(layers, device="six devices", dtype="float32")
    loads = [Load(np.ones(MICRO_BATCHES), np.ones(MICRO_BATCHES))] * 2
    free, cut = Links(np.inf), Partition((0, 1, 2, 3))
    pipeline = simulate_step(profile, cut, loads, free, mode="overlap").replicas[0]
    layout = Layout(3, 2, encoder=Encoder(1, 1), precision="float32")
    units = simulate_units(profile, cut, loads, layout, free)
    plot_timeline({"each of two pipelines, six devices": pipeline, "units, five devices": units}, OUT)


if __name__ == "__main__":
    main()
