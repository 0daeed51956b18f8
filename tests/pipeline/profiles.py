"""Small profiles for tests."""

from omnibal.cost import CostModel
from omnibal.profile.records import LayerCost, ModelProfile


def layer(name="block.0", *, forward=1.0, backward=None, weight=None, output=0.0, kind="block", **costs):
    """A layer with fixed costs in seconds and bytes; backward and weight default to the forward's seconds."""
    costs.setdefault("module", "language")
    costs.setdefault("saved_bytes", {"none": CostModel(fixed=100), "full": CostModel(fixed=10)})
    return LayerCost(
        name,
        kind,
        forward_seconds=CostModel(fixed=forward),
        backward_seconds=CostModel(fixed=forward if backward is None else backward),
        weight_seconds=CostModel(fixed=forward if weight is None else weight),
        output_bytes=CostModel(fixed=output),
        **costs,
    )


def profile(layers):
    return ModelProfile(tuple(layers), device="test", dtype="float32", versions={"torch": "1.0"})


def fixed_profile(forward, *, output=None):
    """One layer per entry of ``forward`` seconds, which send ``output`` bytes each."""
    output = [0.0] * len(forward) if output is None else output
    return profile(
        layer(f"block.{i}", forward=f, output=o, parameter_bytes=4)
        for i, (f, o) in enumerate(zip(forward, output, strict=True))
    )
