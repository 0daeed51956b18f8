"""The figures of all measurements as Markdown tables; see README.md."""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench import table

MIB = 2**20
MOST_FOREIGN = 0.04
"""As in tools/partition/quiet.py."""


def main() -> None:
    """Print a table for each file that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for name, show in {"emulated": emulated, "real": real, "plans": plans}.items():
        path = arguments.folder / f"{name}.json"
        if path.exists():
            print(show(json.loads(path.read_text())), end="\n\n")


def emulated(rows: list[dict[str, Any]]) -> str:
    """Steps in multiples of all devices busy."""
    cells = {(row["costs"], row["packs"], row["stages"], row["micro_batches"], row["schedule"]): row for row in rows}
    lines = []
    for key in dict.fromkeys(key[:4] for key in sorted(cells)):
        costs, packs, stages, micro_batches = key
        plain, ours = (cells[*key, schedule] for schedule in ("1f1b", "zero-bubble"))
        lines.append(
            (
                costs,
                packs,
                f"{stages}",
                f"{micro_batches}",
                f"{plain['simulated']:.3f}",
                f"{ours['simulated']:.3f}",
                *_emulated(plain["emulated"], ours["emulated"]),
            )
        )
    names = (
        "costs", "packs", "stages", "micro-batches", "1F1B, simulated", "zero-bubble, simulated", "1F1B, emulated",
        "zero-bubble, emulated", "gain",
    )  # fmt: skip
    return table(names, lines)


def _emulated(plain: float | None, ours: float | None) -> tuple[str, str, str]:
    """Steps and gain; nothing where the engine did not run."""
    if plain is None or ours is None:
        return "–", "–", "–"
    return f"{plain:.3f}", f"{ours:.3f}", f"{plain / ours:.3f}"


def real(rows: list[dict[str, Any]]) -> str:
    """Medians of undisturbed steps on two processes, with gain and simulated gain, and what waited."""
    lines = []
    for row in rows:
        pairs = zip(row["pending_bytes"], row["predicted_pending_bytes"], strict=True)
        lines.append(
            (
                f"{row['micro_batches']}",
                row["recompute"],
                f"{_undisturbed(row, '1f1b'):.2f}",
                *(_against_1f1b(row, schedule) for schedule in ("zero-bubble-lean", "zero-bubble")),
                "yes" if row["equal_losses"] else "no",
                "; ".join(f"{found / MIB:.2f} of {bound / MIB:.2f}" for found, bound in pairs),
            )
        )
    names = (
        "micro-batches", "recompute", "1F1B, s", "zero-bubble-lean, s (gain, simulated)",
        "zero-bubble, s (gain, simulated)", "losses equal", "MiB that waited, of the footprint's, by stage",
    )  # fmt: skip
    return table(names, lines)


def _against_1f1b(row: dict[str, Any], schedule: str) -> str:
    seconds, said = _undisturbed(row, schedule), row["predicted_seconds"]
    gain, simulated = _undisturbed(row, "1f1b") / seconds, said["1f1b"] / said[schedule]
    return f"{seconds:.2f} ({gain:.3f}, {simulated:.3f})"


def _undisturbed(row: dict[str, Any], schedule: str) -> float:
    """The median of steps during which others took hardly any of the CPU; not a number if there are none."""
    pairs = zip(row["seconds"][schedule], row["foreign"][schedule], strict=True)
    counted = [seconds for seconds, share in pairs if share <= MOST_FOREIGN]
    return median(counted) if counted else float("nan")


def plans(rows: list[dict[str, Any]]) -> str:
    """The fastest plan under each schedule, by budget."""
    schedules = ("1f1b", "zero-bubble-lean", "zero-bubble")
    lines = []
    for row in rows:
        fits = {schedule: row[schedule]["seconds"] for schedule in schedules if row[schedule]}
        cells = [_plan(row[schedule]) for schedule in schedules]
        lines.append((f"{row['budget']}", *cells, min(fits, key=fits.__getitem__)))
    return table(("GiB of a device", *schedules, "auto takes"), lines)


def _plan(cell: dict[str, float] | None) -> str:
    if cell is None:
        return "does not fit"
    return f"{cell['seconds']:.3f} s, {cell['recomputed']} recompute, {cell['pending']:.1f} GiB wait"


if __name__ == "__main__":
    main()
