"""What `omnibal advise` says: some lines, a picture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omnibal.advise.changes import SAME_STEP, Advice, TriedChange, count_of
from omnibal.advise.estimate import MODEL_ERROR, STARTING, UNSEEN, Estimate, Speedup
from omnibal.advise.measuring import frames_that_fit
from omnibal.advise.memory import USUAL
from omnibal.advise.paste import (
    DataKind,
    Proposal,
    lines_to_paste,
    pipeline_lines,
    propose,
    rearranging_lines,
    recompute_lines,
    with_layout,
)
from omnibal.advise.question import Question
from omnibal.profile.records import FLOAT16, levels_in_words
from omnibal.report.style import (
    BLUE,
    GIB,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    drawing,
    legend_below,
    stacked_bars,
)

if TYPE_CHECKING:
    from omnibal.report.layouts import LayoutReport  # its loops are compiled, which no other advice needs

CAUSE_COLOURS: Final = (GREEN, GREY, VERMILION, ORANGE, PINK, BLUE, "black", SKY)
LEAST_SHARE: Final = 0.005
SAME_LAYOUT: Final = 0.03  # share by which layouts may differ and still count as equally fast
BEST: Final = "your best settings"
PRINTED: Final = {"recompute": "less recomputation", "sharding": "lower ZeRO stage"}  # what a change does, by its name


@dataclass(frozen=True)
class Report:
    question: Question
    advice: Advice

    @cached_property
    def proposal(self) -> Proposal | None:
        return propose(self.advice.after) if self.advice.takes_packs else None

    @cached_property
    def headline(self) -> str:
        advice = self.advice
        if not advice.adopted:
            return f"leave it as it is: nothing brings more than the estimate's error; {self._over_settings}"
        if advice.beyond.factor == 1:
            return f"{BEST} (without packs) over today: {_likely(advice.settings)}; {self._over_settings}"
        if advice.settled is advice.today:
            return f"omnibal over today: {_likely(advice.whole)}"
        return f"omnibal over {BEST}: {_likely(advice.beyond)}; over today: {_likely(advice.whole)}"

    @property
    def _memory(self) -> list[str]:
        if not self.advice.adopted:
            return []
        now, then = (f"{estimate.peaks[0] / GIB:.1f} GiB" for estimate in (self.advice.today, self.advice.after))
        adopted = "omnibal" if self.advice.takes_packs else "these settings"
        return [f"memory of the fullest GPU: {now} today, {then} with {adopted}, of {self._budget:.1f} GiB"]

    @property
    def _over_settings(self) -> str:
        gain = self.advice.over_settings
        if gain is None:
            return "packs do not fit"
        return f"packs bring {gain}, " + ("leave them out" if gain.factor < 1 else "less than the estimate's error")

    @property
    def _budget(self) -> float:
        return self.advice.today.memory.budget_bytes / GIB

    def lines(self) -> list[str]:
        advice, today, asked = self.advice, self.advice.today, self.question
        guessed = " (assumed)" if asked.present.recompute is None else ""
        assumed = [
            f"{asked.model.name}{self._trained()} on {asked.cluster}, {today.recipe.text}{guessed}, "
            f"{today.samples_per_step:,.0f} samples a step",
            *([asked.measured.images] if asked.measured.images else []),
            self._optimizer(),
        ]
        how = "computed" if asked.costs is None else f"computed from costs measured on {asked.costs.devices}"
        found = [self.headline, f"{how} for {'; '.join(assumed)}", *self._memory]
        found.append(f"data: {asked.measured.said}{self._few()}")
        for name, keys in (("read", asked.present.said), ("not read", asked.present.unread)):
            if keys:
                found.append(f"{name}: {', '.join(f'{key} {value}' for key, value in keys.items())}")
        if offloaded := " and ".join(asked.recipe.offloaded):
            found.append(f"{offloaded} on the host: its transfers and updates are not counted")
        if (lacks := today.peaks[0] / GIB - self._budget) > 0:
            fits = f"; it would fit with {', or '.join(advice.fitting)}" if advice.fitting else ""
            found.append(f"memory: today's fullest micro-batch lacks {lacks:.1f} GiB and would end the run{fits}")
        shares = ", ".join(
            f"{share:.0%} {cause}" for cause, share in today.shares.items() if share >= LEAST_SHARE or cause != STARTING
        )
        found.append(f"today: {today.samples_per_second:,.1f} samples/s; time of the GPUs: {shares}")
        found.append("changes, each on top of the lines above it; 0: without packs; 1, 2, ...: omnibal's packs")
        found += [f"0. {self._said(change)}" for change in advice.changes if change.is_setting]
        found += [f"{number}. {self._said(change)}" for number, change in enumerate(self.of_packs, start=1)]
        return found + ([self._limits(self.proposal)] if self.proposal is not None else [])

    @property
    def of_packs(self) -> list[TriedChange]:
        """What packs bring, where they do as a whole: samples without padding and even packs are one change."""
        own = [change for change in self.advice.changes if not change.is_setting and self.advice.takes_packs]
        halves = [change for change in own if change.name in ("no padding", "balanced packs") and change.gain]
        if len(halves) < 2:
            return own
        first, second = halves
        assert first.gain is not None and second.gain is not None, "these were estimated"
        detail, gain = f"{first.detail}, {second.detail}", first.gain * second.gain
        packs = replace(second, name="packs", detail=detail, gain=gain)
        return [packs if change is second else change for change in own if change is not first]

    def to_paste(self, layouts: LayoutReport | None = None) -> list[str]:
        """The lines that adopt the advice, or the fastest layout that runs if that brings more."""
        found = None if layouts is None else layouts.answer.winner_today
        if layouts is None or found is None:
            return self._lines_to_paste()
        after, name = self.advice.after, layouts.name_of(found)
        if after.fits and found.samples_per_second <= after.samples_per_second * (1 + SAME_LAYOUT):
            rate = f"{after.samples_per_second:,.1f} samples/s"
            return [
                f"adopt: your trainer as it is, {rate} with these lines; {name} is not faster",
                *self._lines_to_paste(),
            ]
        question = self.question
        if found.plan is not None:
            data = "train.json" if question.measured.is_whole else question.data
            lines = pipeline_lines(found.plan, question.present, data=data, model=question.model_path)
        elif found.kind == "rearranged":
            lines = rearranging_lines(self.advice, question.present, found)
        else:
            packed = Report(question, with_layout(self.advice, found))
            assert packed.proposal is not None, "a layout of data parallelism has even packs"
            lines = [packed._limits(packed.proposal), *packed._lines_to_paste()]
        return [f"adopt: {name}", *lines, *recompute_lines(question.present, found)]

    def _lines_to_paste(self) -> list[str]:
        advice, asked = self.advice, self.question
        measured = asked.measured.is_whole
        kind: DataKind = "lengths" if measured else "stream" if asked.measured.is_stream else "annotations"
        return lines_to_paste(
            advice, asked.present, asked.cluster, self.proposal, data=asked.data, model=asked.model_path, kind=kind
        )

    def to_record(self) -> dict[str, Any]:
        advice, asked = self.advice, self.question
        return {
            "model": asked.model.name,
            "cluster": str(asked.cluster),
            "data": asked.measured.said,
            "read": dict(asked.present.said),
            "not_read": dict(asked.present.unread),
            "optimizer": self._optimizer(),
            "costs": "counted" if asked.costs is None else "measured",
            "headline": self.headline,
            "today": _figures(advice.today),
            "changes": [
                {
                    "name": change.name, "detail": change.detail, "factor": change.factor,
                    "error": change.gain.error if change.gain else 0.0,
                    "brings": change in advice.adopted, "is_setting": change.is_setting,
                }
                for change in advice.changes
            ],
            "images": asked.measured.images,
            "over_settings": advice.over_settings and _speedup_record(advice.over_settings),
            **_speedup_record(advice.whole),
            "settings": _speedup_record(advice.settings),
            "beyond_settings": _speedup_record(advice.beyond),
            "settled": _figures(advice.settled),
            "after": _figures(advice.after),
            "would_fit": list(advice.fitting),
            "limits": None if self.proposal is None else {
                "vision_units": self.proposal.limits.vision_units, "llm_tokens": self.proposal.limits.llm_tokens,
                "samples_per_step": self.proposal.samples_per_step,
            },
        }  # fmt: skip

    def _trained(self) -> str:
        present = self.question.present
        if present.lora:
            return f", LoRA of rank {present.lora},"
        return f", {' and '.join(present.frozen)} frozen," if present.frozen else ""

    def _few(self) -> str:
        unseen = min(UNSEEN / len(self.question.measured.lengths), 1.0)
        return f"; so few that {unseen:.0%} of the data may be unlike them" if unseen > MODEL_ERROR else ""

    def _optimizer(self) -> str:
        present, sharding = self.question.present, self.question.recipe.sharding
        precision = present.precision
        held = 2 * FLOAT16 + sum(precision.kept(sharding))
        found = f"{present.optimizer or 'AdamW (assumed)'}, {held:.3g} bytes a trained parameter"
        if precision.weight_bits != USUAL.weight_bits:
            found += f"; frozen weights in {precision.weight_bits} bits, which take no more time"
        if precision.optimizer.is_pageable:
            found += "; paged states on the host, their transfers not counted"
        return found + ("; Liger's loss never holds all logits" if precision.fused_loss else "")

    def _limits(self, proposal: Proposal) -> str:
        advice, limits, asked = self.advice, proposal.limits, self.question
        packs, today = advice.after.recipe.micro_batches, advice.today.samples_per_step
        unlike = abs(proposal.samples_per_step / today - 1) > SAME_STEP
        why = "; an epoch has whole steps" if unlike and asked.measured.is_whole else ""
        per_pack = proposal.samples_per_step / (packs * asked.cluster.num_devices)
        larger = proposal.oversized
        share = f"{larger:.1%}" if larger >= 0.001 else "less than 0.1%"
        fit = f"{share} of the samples exceed these limits, each gets its own pack" if larger else "every sample fits"
        frames = frames_that_fit(asked.model, asked.measured, limits) if asked.measured.videos else ""
        return (
            f"limits: packs of at most {limits.vision_units:,} {asked.model.units} and {limits.llm_tokens:,} LLM "
            f"tokens, {per_pack:.1f} samples each on average; {count_of(packs, 'pack')} per rank and step: "
            f"{proposal.samples_per_step:,.0f} samples a step ({today:,.0f} today{why}); {fit}"
            + (f"; {frames}" if frames else "")
        )

    def _said(self, change: TriedChange) -> str:
        name = PRINTED.get(change.name, change.name)
        if change.gain is None:
            return f"{name}: not used, {change.detail}"
        if not change.brings:
            small = "slower" if change.gain.factor + change.gain.error < 1 else "within the error"
            # The drop-in makes these together, so each counts even where it brings nothing alone.
            if not change.is_setting and change.name in ("head", "packs", "no padding", "balanced packs"):
                return f"{name}: {change.gain} ({change.detail}; {small} alone, but the next lines need it)"
            return f"{name}: not used, {change.gain} is {small} ({change.detail})"
        instead = "; packs take its place" if change in self.advice.replaced else ""
        return f"{name}: {change.gain} ({change.detail}{instead})"


def _likely(gain: Speedup) -> str:
    """A factor and what is likely."""
    return "{} ({:.1f} to {:.1f}x)".format(gain, *gain.likely)


def _speedup_record(gain: Speedup) -> dict[str, Any]:
    return {"factor": gain.factor, "error": gain.error, "likely": list(gain.likely)}


def _figures(estimate: Estimate) -> dict[str, Any]:
    recipe = estimate.recipe
    again = recipe.recompute if isinstance(recipe.recompute, str) else levels_in_words(recipe.recompute)
    return {
        "trainer": recipe.sharding, "batching": recipe.batching, "batch": recipe.batch,
        "micro_batches": recipe.micro_batches, "recompute": again,
        "samples_per_step": estimate.samples_per_step, "shares": estimate.shares,
        "sample_seconds": float(estimate.sample_seconds.mean()),
        "fullest_rank_bytes": estimate.peaks[0], "mean_rank_bytes": estimate.peaks[1],
    }  # fmt: skip


def draw(report: Report, path: Path) -> None:
    advice = report.advice
    rows = ["today", "settings alone", "with omnibal"] if advice.takes_packs else ["today", "settings alone"]
    settings = [change for change in advice.changes if change.is_setting]
    gains = [(change, change.gain) for change in [*settings, *report.of_packs] if change.gain is not None]
    with drawing(path, 9.6, 3.0) as figure:
        left_axes, right_axes = figure.subplots(1, 2, width_ratios=(3, 2))
        # Left: a bar for each row, with a part for each cause.
        parts = {cause: shares[: len(rows)] for cause, *shares in advice.causes if any(shares)}
        stacked_bars(
            left_axes, rows, parts, [CAUSE_COLOURS[advice.today.scenario.causes.index(cause)] for cause in parts]
        )
        left_axes.set_xlabel("time of the devices for a sample, today's is 1")
        left_axes.set_title("Where the time goes", loc="left")
        # Right: a bar for each change with its likely range.
        places = range(len(gains) - 1, -1, -1)
        for place, (change, gain) in zip(places, gains, strict=True):
            colour = GREY if not change.brings else BLUE if change.is_setting else GREEN
            least, most = gain.likely
            errors = [[gain.factor - least], [most - gain.factor]]
            right_axes.barh(place, gain.factor, xerr=errors, color=colour, error_kw={"ecolor": "black"})
        right_axes.axvline(1, color="black", linewidth=0.8)
        right_axes.set_yticks(places, [PRINTED.get(change.name, change.name) for change, _ in gains])
        right_axes.set_xlabel("samples a second, before the change 1")
        right_axes.set_title("What each change brings", loc="left")
        legend_below(figure, left_axes)
