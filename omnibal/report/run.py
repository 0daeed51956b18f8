"""What a run is about to do: its data, its steps, and what each stage holds."""

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from omnibal.data.sampler import BalancedBatchSampler
from omnibal.families.base import LayerRecord
from omnibal.memory.recompute import in_words
from omnibal.plan import Plan


def run_table(plan: Plan, records: Sequence[LayerRecord], sampler: BalancedBatchSampler) -> Table:
    """The data's arrangement, and the layers of each stage.

    Args:
        plan: What the run follows.
        records: The model's layers.
        sampler: Any rank's.
    """
    table = Table(title="plan", show_header=False, title_justify="left")
    packs = sampler.num_replicas * sampler.micro_batches
    table.add_row("samples", f"{len(sampler.lengths):,}; {sampler.oversized_report}")
    table.add_row("a pack holds at most", f"{plan.limits.vision_units} tiles, {plan.limits.llm_tokens} LLM tokens")
    table.add_row("a step", f"{packs} packs: {sampler.num_replicas} replicas × {sampler.micro_batches} micro-batches")
    table.add_row(f"epoch {sampler.epoch}", f"{sampler.num_steps:,} steps")
    for stage in range(plan.num_stages):
        table.add_row(f"stage {stage}", _stage(plan, records, stage))
    return table


def peak_text(peak_bytes: Sequence[int], plan: Plan) -> str:
    """A line per stage: its measured peak beside the predicted one, of a step of the largest packs.

    The prediction's overhead is left out: neither torch's allocator nor a count of tensors sees it.

    Args:
        peak_bytes: Of each stage.
        plan: What the run follows, with or without a prediction.
    """
    if plan.predicted is None:
        return "\n".join(
            f"stage {s}: memory peak {in_words(peak)}; nothing predicted" for s, peak in enumerate(peak_bytes)
        )
    memory = [stage.memory for stage in plan.predicted.stages]
    predicted = [stage.total - stage.overhead for stage in memory]
    return "\n".join(
        f"stage {stage}: memory peak {in_words(measured)}, {measured / most:.1%} of the {in_words(most)} predicted for "
        "the largest packs"
        for stage, (measured, most) in enumerate(zip(peak_bytes, predicted, strict=True))
    )


def _stage(plan: Plan, records: Sequence[LayerRecord], stage: int) -> str:
    layers = plan.partition.layers(stage)
    kinds = Counter("language" if records[layer].module == "language" else "vision" for layer in layers)
    parameters = sum(records[layer].sizes["parameters"] for layer in layers)
    recomputed = sum(plan.recompute[layer] != "none" for layer in layers)
    held = " + ".join(f"{kinds[kind]} {kind}" for kind in ("vision", "language") if kinds[kind])
    return (
        f"{records[layers[0]].name} … {records[layers[-1]].name}: {held} layers, {parameters / 1e6:,.1f} M parameters, "
        f"{recomputed} recomputed"
    )
