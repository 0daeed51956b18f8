"""Slow, obvious solvers of recompute problems."""

from itertools import product

from omnibal.memory.recompute import NOT_OFFERED
from omnibal.pipeline.schedule import Operation
from omnibal.profile.records import LEVELS


def all_levels(layers):
    """Every choice of levels that the layers offer."""
    return product(*[[level for level in LEVELS if level in layer.saved_bytes] for layer in layers])


def fastest_levels(footprint, stage, layers, seconds, budget_bytes):
    """Least seconds of all choices whose footprint keeps to the budget, infinity if none does."""
    best = float("inf")
    for levels in all_levels(footprint.profile.layers[layers.start : layers.stop]):
        if footprint.stage(stage, layers, levels).total <= budget_bytes:
            best = min(best, total_seconds(seconds, layers, levels))
    return best


def least_total(footprint, stage, layers):
    """Least bytes of all choices."""
    choices = all_levels(footprint.profile.layers[layers.start : layers.stop])
    return min(footprint.stage(stage, layers, levels).total for levels in choices)


def total_seconds(seconds, layers, levels):
    return sum(seconds[layer, LEVELS.index(level)] for layer, level in zip(layers, levels, strict=True))


def run_table(footprint, stage, layers, levels):
    """The most that a stage holds of activations and gradients, by running its table layer by layer."""
    rows = [(layer, LEVELS.index(levels[layer])) for layer in layers]
    kept = [int(footprint.kept_bytes[row]) for row in rows]
    splits = any(operation == Operation.B for operation, _ in footprint.schedule.stages[stage])
    transient = [int((footprint._split_transient if splits else footprint._transient)[row]) for row in rows]
    pending = [int(footprint.profile.layers[layer].pending_bytes(footprint.load)) for layer in layers]
    alive = peak = 0
    for operation, _ in footprint.schedule.stages[stage]:
        if operation == Operation.F:
            alive += sum(kept)
        elif operation == Operation.W:
            alive -= sum(pending)
        else:
            peak = max(peak, alive + footprint.least_transient(stage))
            for layer in reversed(range(len(rows))):
                peak = max(peak, alive + transient[layer])
                alive += (pending[layer] if operation == Operation.B else 0) - kept[layer]
                peak = max(peak, alive)
    return peak


def fastest_columns(kept, transient, seconds, *, room_bytes, **options):
    """Least seconds over all columns, as least_recompute means it."""
    return min(
        (
            sum(seconds[layer, column] for layer, column in enumerate(columns))
            for columns in offered_columns(kept)
            if peak_bytes(kept, transient, columns, **options) <= room_bytes
        ),
        default=float("inf"),
    )


def offered_columns(kept):
    """Every choice of columns."""
    return product(*[[k for k, size in enumerate(row) if size < NOT_OFFERED] for row in kept.tolist()])


def peak_bytes(kept, transient, columns, *, held, least_transient):
    """The peak, by running the layers backward one by one and freeing what each has kept."""
    alive = held * sum(int(kept[layer, column]) for layer, column in enumerate(columns))
    peak = alive + least_transient
    for layer, column in reversed(list(enumerate(columns))):
        peak = max(peak, alive + int(transient[layer, column]))
        alive -= int(kept[layer, column])
    return peak
