"""What a run is about to do: its data, its steps, and what each stage holds."""

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from omnibal.data.sampler import BalancedBatchSampler
from omnibal.families.base import LayerRecord
from omnibal.memory.footprint import StageMemory
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


def peak_text(peak_bytes: Sequence[int], overhead_bytes: Sequence[int], plan: Plan) -> str:
    """A line per stage: its measured peak beside the predicted one, of a step of the largest packs.

    What a device holds beside the model is said apart: neither torch's allocator nor a count of tensors sees it.

    Args:
        peak_bytes: Of each stage.
        overhead_bytes: Of each stage, beside it; zeros where nobody could measure.
        plan: What the run follows, with or without a prediction.
    """
    predicted = [None] * plan.num_stages if plan.predicted is None else [s.memory for s in plan.predicted.stages]
    lines = zip(peak_bytes, overhead_bytes, predicted, strict=True)
    return "\n".join(f"stage {stage}: memory peak {_peak(*line)}" for stage, line in enumerate(lines))


def _peak(peak: int, overhead: int, predicted: StageMemory | None) -> str:
    most = 0 if predicted is None else predicted.total - predicted.overhead
    words = [
        f"{in_words(peak)}, {peak / most:.1%} of the {in_words(most)} predicted for the largest packs"
        if most
        else f"{in_words(peak)}; nothing predicted"
    ]
    if overhead:
        words.append(f"{in_words(overhead)} beside the model")
        if predicted is not None:
            words[-1] += f", {in_words(predicted.overhead)} planned (--overhead)"
    return "; ".join(words)


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
