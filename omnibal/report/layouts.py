"""Which layout wins, as `omnibal advise --layouts` and `omnibal plan --layout` say it: table and lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from rich.table import Table

from omnibal.advise.estimate import Scenario, Way, gain_over
from omnibal.advise.layout_ranking import DEGREES, degrees_within
from omnibal.advise.layouts import EQUAL, KINDS, Kind, LayoutAnswer, WeighedLayout
from omnibal.advise.memory import USUAL
from omnibal.errors import bytes_in_words
from omnibal.report.style import GIB, make_table

NAMES: Final[Mapping[Kind, str]] = {
    "zero": "ZeRO", "rearranged": "rearranged", "pipeline": "pipeline", "tensor": "tensor",
    "spread": "spread ViT", "units": "units",
}  # fmt: skip
"""Of rows of the table."""
# Where the devices' time goes, alike for all kinds, and what candidates call it.
CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "useful": ("useful",),
    "waits": ("waits", "bubbles, transfers, sums of gradients"),
    "recomputation": ("recomputation",),
    "communication": ("communication", "tensor ranks"),
}
NONE_FITS: Final = "winner: none, no layout fits these devices"


@dataclass(frozen=True)
class LayoutReport:
    answer: LayoutAnswer
    scenario: Scenario
    today: float | None = None  # samples a second today; None where nothing runs
    best: Way | None = None  # the cheapest alternative to all of them: what settings of a trainer bring

    @property
    def not_weighed(self) -> list[str]:
        found, cluster, precision = list(self.answer.refused), self.scenario.cluster, self.scenario.precision
        kinds = {each.kind for each in self.answer.candidates} | self.answer.missing_bytes.keys()
        across = [str(degree) for degree in DEGREES if degree not in degrees_within(cluster)]
        if across and kinds & {"tensor", "spread", "units"}:
            found.append(f"{', '.join(across)} tensor ranks would cross nodes of {cluster.devices_per_node}")
        if precision != USUAL:
            found.append("the optimizer and precision of today count for ZeRO alone, those of pipelines are AdamW's")
        return found

    @cached_property
    def runner_up(self) -> WeighedLayout | None:
        """The fastest of all that are slower than the winner and those that count as fast."""
        answer = self.answer
        fastest = answer.candidates[0] if answer.candidates else None
        return next((each for each in answer.candidates if fastest and not answer.equals(fastest, each)), None)

    def name_of(self, found: WeighedLayout) -> str:
        return f"{KINDS[found.kind]}, {_rate(found.samples_per_second)} samples/s ({found.layout})"

    def parts(self) -> list[str | Table]:
        table = [make_table(*self.rows())] if self.answer.candidates else []
        return [*table, *self.lines()]

    def lines(self) -> list[str]:
        answer = self.answer
        found = [
            f"{NAMES[each.kind]}: {KINDS[each.kind]}: {each.layout}, "
            f"{each.micro_batches:,} micro-batch{'es' * (each.micro_batches != 1)} of a replica"
            for each in answer.candidates
        ]
        found += [NONE_FITS] if answer.winner is None else self._winner_lines(answer.winner)
        found += [f"cannot be: {KINDS[kind]}: {_lacking(missing)}" for kind, missing in answer.missing_bytes.items()]
        found += [f"not weighed: {line}" for line in self.not_weighed]
        return found

    def _winner_lines(self, winner: WeighedLayout) -> list[str]:
        answer = self.answer
        found = [f"winner: {KINDS[winner.kind]}, {_rate(winner.samples_per_second)} samples/s; {_runs(winner)}"]
        fastest = answer.candidates[0]
        if (other := self._openly(winner)) is not winner:
            own = _rate(_unhidden(winner))
            found.append(f"without overlap: {NAMES[other.kind]} {_rate(_unhidden(other))}, the winner {own}")
        equals = [each for each in answer.candidates if each is not winner and answer.equals(fastest, each)]
        if equals:
            names = ", ".join(f"{NAMES[each.kind]} {_rate(each.samples_per_second)}" for each in equals)
            found.append(f"equal within {EQUAL:.0%}: take the simplest, which is the winner; {names}")
        today, best = answer.winner_today, "best that omnibal trains"
        if self.runner_up is not None:
            name = f"runner-up, and {best}" if today is self.runner_up else "runner-up"
            found.append(f"{name}: {_compared(winner, self.runner_up)}")
        if today is None:
            found.append("omnibal trains none of these")
        elif today is not winner and today is not self.runner_up:
            found.append(f"{best}: {_compared(winner, today)}")
        ways = [] if self.today is None else [Way("today", self.today)]
        ways += [] if self.best is None else [self.best]
        if today is not None and ways:
            found.append(f"gain of {NAMES[today.kind]}: {gain_over(today.samples_per_second, ways)}")
        return found

    def to_record(self) -> dict[str, Any]:
        answer, winner = self.answer, self.answer.winner
        openly = None if winner is None else self._openly(winner)
        return {
            "candidates": [
                {
                    "kind": each.kind, "layout": each.layout, "micro_batches": each.micro_batches,
                    "samples_per_second": each.samples_per_second, "times_today": self._times_today(each),
                    "unhidden_samples_per_second": each.unhidden_samples_per_second, "peak_bytes": each.peak_bytes,
                    "runs_today": each.runs_today, "shares": dict(each.shares),
                }
                for each in answer.candidates
            ],
            "winner": _kind(winner),
            "winner_unhidden": _kind(openly),
            "runner_up": _kind(self.runner_up),
            "winner_today": _kind(answer.winner_today),
            "missing_bytes": dict(answer.missing_bytes),
            "not_weighed": list(self.not_weighed),
        }  # fmt: skip

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        heads = (
            "", "samples\n/s", "without\noverlap", "times\ntoday", "peak\nGiB", "can\ntrain", "useful", "waits",
            "recom-\npute", "sends",
        )  # fmt: skip
        return heads, [
            (
                NAMES[each.kind],
                _rate(each.samples_per_second),
                "–" if (openly := each.unhidden_samples_per_second) is None else _rate(openly),
                "–" if (times := self._times_today(each)) is None else f"{times:.2f}",
                f"{each.peak_bytes / GIB:.1f}",
                "yes" if each.runs_today else "no",
                *(f"{share:.0%}" for share in causes_of(each).values()),
            )
            for each in self.answer.candidates
        ]

    def _openly(self, winner: WeighedLayout) -> WeighedLayout:
        """What would win if nothing of ZeRO's communication hid behind computation."""
        best = max(self.answer.candidates, key=_unhidden)
        return best if _unhidden(best) > _unhidden(winner) * (1 + EQUAL) else winner

    def _times_today(self, each: WeighedLayout) -> float | None:
        return None if self.today is None else each.samples_per_second / self.today


def causes_of(found: WeighedLayout) -> dict[str, float]:
    return {cause: sum(found.shares.get(name, 0.0) for name in names) for cause, names in CAUSES.items()}


def _compared(winner: WeighedLayout, other: WeighedLayout) -> str:
    ratio = other.samples_per_second / winner.samples_per_second
    return f"{KINDS[other.kind]}, {_rate(other.samples_per_second)} samples/s ({ratio:.2f} ×); {_runs(other)}"


def _kind(found: WeighedLayout | None) -> Kind | None:
    return None if found is None else found.kind


def _unhidden(found: WeighedLayout) -> float:
    return found.unhidden_samples_per_second or found.samples_per_second


def _rate(samples_per_second: float) -> str:
    return f"{samples_per_second:,.{0 if samples_per_second >= 1000 else 1}f}"


def _runs(found: WeighedLayout) -> str:
    return "omnibal trains it" if found.runs_today else "omnibal cannot train it"


def _lacking(missing: int) -> str:
    if missing > 0:
        return f"the fullest device lacks {bytes_in_words(missing)} at least"
    return "these devices, costs and samples of a step have no such layout"
