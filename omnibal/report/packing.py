"""How full packs are and how alike the ranks' loads: in figures, methods side by side, and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.table import Table

from omnibal.cost import CostModel, Load
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, min_packs, pad_ratio, source_mix, step_randomness
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.data.packs import Packs
from omnibal.report.style import make_table

if TYPE_CHECKING:
    pass

LENGTH_CLASSES: Final = 8  # classes of token lengths that stand for sources where there is but one


class Largest(NamedTuple):
    """The most that a micro-batch holds: what memory must hold."""

    vision_units: int
    llm_tokens: int
    llm_tokens_squared: int


@dataclass(frozen=True)
class PackingFigures:
    method: str
    samples: int
    """Samples that are in a pack."""
    packs: int
    """Packs that hold a sample."""
    empty_packs: int
    fewest_packs: int
    """No method can do with fewer."""
    steps: int
    pad_ratio: float
    """Padding as a share of the tokens that the LLM works on; the mean over packs."""
    pad_ratio_if_padded: float
    """Pad Ratio if the samples of a pack were padded to the longest one."""
    dist_ratio_vision: float
    dist_ratio_tokens: float
    dist_ratio_cost: float
    """Dist Ratio of what micro-batches cost the LLM."""
    dist_ratio_sound: float | None
    """Dist Ratio of an encoder of sound beside the ViT; None where there is none."""
    randomness: float
    """χ² per degree of freedom of the steps' mixes: 1 as shuffled, more where sorted; NaN with nothing to compare."""
    largest: Largest
    lost: int
    """Samples in no pack, without those that were left out on purpose."""
    repeated: int
    """Samples in a pack beyond the first time."""
    over_limit: int
    """Packs of several samples that exceed a limit."""
    seconds: float
    """What planning took."""

    @property
    def packs_over_fewest(self) -> float:
        """Packs beyond the fewest possible, as a share of those."""
        return self.packs / self.fewest_packs - 1 if self.fewest_packs else 0.0

    @property
    def samples_per_pack(self) -> float:
        """Mean number of samples in a pack that holds any."""
        return self.samples / self.packs if self.packs else 0.0

    def to_record(self) -> dict[str, Any]:
        return asdict(self) | {
            "largest": self.largest._asdict(),
            "packs_over_fewest": self.packs_over_fewest,
            "samples_per_pack": self.samples_per_pack,
            "randomness": None if math.isnan(self.randomness) else self.randomness,
        }


def measure_packing(
    method: str,
    lengths: SampleLengths,
    limits: PackLimits,
    packs: Packs,
    steps: npt.NDArray[np.int64],
    *,
    seconds: float,
    load: Load | None = None,
    cost: CostModel = DEFAULT_COST,
    left_out: int = 0,
) -> PackingFigures:
    """Work out the figures of an arrangement; ``steps`` are pack numbers by (step, rank, micro-batch).

    ``load`` is what packs bring to the device where padding makes it more than samples hold, and ``left_out`` counts
    the samples over a limit that are left out on purpose.
    """
    # What samples hold, and what the device gets where padding makes it more.
    brought = packs.load(lengths)
    load = brought if load is None else load
    times = np.bincount(packs.samples, minlength=len(lengths))
    filled = packs.sizes > 0
    # A sample over a limit may be alone in its pack; packs of several must keep the limits.
    over = (load.vision_units > limits.vision_units) | (load.llm_tokens > limits.llm_tokens)
    for name in lengths.further_units():
        over |= getattr(load, name) > limits.most(name)
    return PackingFigures(
        method=method,
        samples=int((times > 0).sum()),
        packs=int(filled.sum()),
        empty_packs=int((~filled).sum()),
        fewest_packs=min_packs(lengths, limits) - left_out,
        steps=len(steps),
        pad_ratio=float(1 - (brought.llm_tokens[filled] / np.maximum(load.llm_tokens[filled], 1)).mean()),
        pad_ratio_if_padded=pad_ratio(lengths, packs),
        dist_ratio_vision=dist_ratio(load.vision_units[steps]),
        dist_ratio_tokens=dist_ratio(load.llm_tokens[steps]),
        dist_ratio_cost=dist_ratio(cost(load)[steps]),
        dist_ratio_sound=None if lengths.sound_units is None else dist_ratio(load.sound_units[steps]),
        randomness=step_randomness(source_mix(mix_labels(lengths), packs, steps)),
        largest=Largest(
            *(int(column.max(initial=0)) for column in (load.vision_units, load.llm_tokens, load.llm_tokens_squared))
        ),
        lost=int((times == 0).sum()) - left_out,
        repeated=int(np.maximum(times - 1, 0).sum()),
        over_limit=int((over & (packs.sizes > 1)).sum()),
        seconds=seconds,
    )


def mix_labels(lengths: SampleLengths) -> IntArray:
    """What the randomness of steps is measured on: each sample's source or, with a single source, class of length."""
    if lengths.source is not None and int(lengths.source.max(initial=0)) > 0:
        return lengths.source
    # equally many samples in each class
    bounds = np.quantile(lengths.llm_tokens, np.arange(1, LENGTH_CLASSES) / LENGTH_CLASSES)
    return np.searchsorted(bounds, lengths.llm_tokens, side="right")


SOUND_ROW: Final = "Dist Ratio, sound units"
# Rows of the table, each with the form of its cells; None ends a section.
_ROWS: Final[tuple[tuple[str, str] | None, ...]] = (
    ("packs", "{0.packs:,}"),
    ("  fewest possible", "{0.fewest_packs:,}"),
    ("  empty", "{0.empty_packs:,}"),
    ("steps", "{0.steps:,}"),
    ("samples per pack", "{0.samples_per_pack:.2f}"),
    ("Pad Ratio", "{0.pad_ratio:.2g}"),
    ("  if packs were padded", "{0.pad_ratio_if_padded:.3f}"),
    None,
    ("Dist Ratio, {vision_unit}", "{0.dist_ratio_vision:.4f}"),
    (SOUND_ROW, "{0.dist_ratio_sound:.4f}"),
    ("Dist Ratio, LLM tokens", "{0.dist_ratio_tokens:.4f}"),
    ("Dist Ratio, LLM cost", "{0.dist_ratio_cost:.4f}"),
    ("χ² of steps (1: shuffled)", "{0.randomness:.2f}"),
    None,
    ("largest, {vision_unit}", "{0.largest.vision_units:,}"),
    ("largest, LLM tokens", "{0.largest.llm_tokens:,}"),
    None,
    ("lost, repeated, over limit", "{0.lost}, {0.repeated}, {0.over_limit}"),
    ("seconds", "{0.seconds:.2f}"),
    None,
)


def packing_table(figures: Sequence[PackingFigures], num_replicas: int = 2, vision_unit: str = "vision units") -> Table:
    """Figures row by row, methods side by side; one rank has nobody to wait for."""
    rows = list[tuple[str, ...]]()
    without_sound = any(entry.dist_ratio_sound is None for entry in figures)
    for row in _ROWS:
        if row is not None and row[0] == SOUND_ROW and without_sound:
            continue
        if row is None:
            rows.append(())
        elif num_replicas > 1 or not row[0].startswith("Dist Ratio"):
            cells = (row[1].format(entry).replace("nan", "–") for entry in figures)
            rows.append((row[0].format(vision_unit=vision_unit), *cells))
    return make_table(("", *(entry.method for entry in figures)), rows)


def packing_notes(num_replicas: int) -> list[str]:
    notes = ["Pad Ratio: share of an LLM's tokens that are padding"]
    if num_replicas > 1:
        notes.append("Dist Ratio: share of the time that ranks wait for the one with the largest micro-batch")
    notes.append("χ² of steps: how unlike the mixes of sources (else lengths) are, a degree of freedom")
    return notes
