"""What each part of the balanced planner is worth: the tables of ``RESULTS.md`` on its parts.

Each row turns one part off, or changes how much it does. A cell holds what that does to the predicted seconds of an
epoch, in percent, with its standard error over seeds (every seed's epoch is planned with and without the part); then,
where χ² of the steps' mixes rises by more than 0.1, what it is, of sources or of token lengths, whichever is larger.
There is a table for every number of ranks and micro-batches. F counts epochs that could not be planned.

Seconds are predicted for a ViT that takes 40 % of the time, and an LLM whose cost is the planner's. A step lasts as
long as its slowest rank, or where ranks run several micro-batches as the slowest of their pipelines of four stages
(1F1B).

    python -m tools.sampling.ablation parts --seeds 3   # a quarter of an hour of one core
    python -m tools.sampling.ablation randomness        # χ² by ranks, the mean over 20 seeds with its standard error
    python -m tools.sampling.ablation fuzz              # harsh configurations; prints those that fail
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer

from omnibal.data.balance import window
from omnibal.data.balance.planner import BalancedPacks
from omnibal.data.balance.rules import Effort
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import source_mix, step_randomness, volume_bound
from omnibal.data.packing_spec import DEFAULT_COST, PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.errors import InfeasibleError
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.pipeline.simulate import run
from tools.sampling.data import mixed_lengths, real_lengths
from tools.synthetic import INTERNVL_MIX, patch_lengths, tiled_lengths


class NeverFirst(BalancedPacks):
    """Never brings packs under the limits before they are levelled."""

    def _try(self, num_steps: int, *, repair_first: bool = False) -> bool:
        return super()._try(num_steps)


class AlwaysFirst(BalancedPacks):
    """Always does."""

    def _try(self, num_steps: int, *, repair_first: bool = False) -> bool:
        return super()._try(num_steps, repair_first=True)


PARTS: Final[dict[str, dict[str, Any]]] = {
    "cut, deal and repair alone": {"step_rounds": 0, "passes": 0, "heaviest_rounds": 0},
    "steps' ends not trimmed": {"end_samples": 0},
    "packs of a step do not meet": {"step_rounds": 0},
    "packs of wrong vision units meet none of other steps": {"vision_rounds": 0},
    "packs of neighbouring steps do not meet": {"group_rounds": 0},
    "one pass": {"passes": 1},
    "the heaviest meets nobody": {"heaviest_rounds": 0},
    "only the heaviest meets others": {"heaviest_rounds": 1},
    "no repairs": {"repair_rounds": 0},
    "exchanges of single samples": {"small_pack": 1},
    "mixes not watched": {"mix_deviation": 1e6, "most_mix_deviation": 1e6},
    "mixes of small steps hardly watched": {"most_mix_deviation": 1e6},
    "exchange_steps 1": {"exchange_steps": 1},
    "running order random": {"random_order": True},
    "limits never first": {"kind": NeverFirst},
    "limits always first": {"kind": AlwaysFirst},
}
SHAPES: Final = ((8, 1), (8, 4), (8, 16), (64, 1), (512, 1))
LEAST_STEPS: Final = 50
"""χ² of fewer steps says little, and no epoch of training has so few."""
SEEDS: Final = 20
VIT_SHARE: Final = 0.4
STAGES: Final = ((0.25, 0.0), (0.15, 0.1), (0.0, 0.25), (0.0, 0.25))
"""Shares of the time that stages spend on ViT and LLM."""
SIMULATED: Final = 24
"""Steps of an epoch whose pipelines are simulated."""
NOTABLE: Final = 0.1
DOCUMENTS: Final = tuple(source for source in INTERNVL_MIX if source.name in {"synthdog", "chartqa", "ai2d", "docvqa"})


class Figures(NamedTuple):
    """Of the plan of one epoch."""

    seconds: float
    """Predicted, over those of even ranks."""
    sources: float
    """χ² of the steps' mixes of sources."""
    tokens: float
    """χ² of their mixes of token lengths, by quintiles."""
    over: float
    """Packs over the volume bound."""


def datasets() -> dict[str, tuple[SampleLengths, PackLimits]]:
    """Lengths and limits, tight and generous; documents are made up, and hard to pack."""
    real, mix = real_lengths()[0], mixed_lengths()[0].take(np.arange(100_000))
    documents, patches = tiled_lengths(70_000, seed=3, sources=DOCUMENTS), patch_lengths(60_000, seed=7)
    small = real.take(np.random.default_rng(0).permutation(len(real))[:3000])
    named = {"real": real, "documents": documents, "mix": mix, "patches": patches, "small": small}
    cells = (
        ("real", 33, 10240), ("real", 16, 5120), ("real", 9, 4096), ("documents", 15, 4736), ("documents", 16, 5120),
        ("mix", 16, 7296), ("mix", 9, 4096), ("patches", 32768, 16384), ("patches", 16384, 8192), ("small", 16, 5120),
        ("mix", 16, 5120),  # tokens drive: they ask for more packs than vision units do
    )  # fmt: skip
    return {f"{name} {vision}/{tokens}": (named[name], PackLimits(vision, tokens)) for name, vision, tokens in cells}


def plan(
    lengths: SampleLengths, limits: PackLimits, shape: tuple[int, int], *, seed: int = 0, epoch: int = 0, **options: Any
) -> Packs:
    """All packs of an epoch."""
    exchange_steps, kind = options.pop("exchange_steps", 64), options.pop("kind", BalancedPacks)
    random_order, ordered = options.pop("random_order", False), window._running_order
    spec = PackingSpec(lengths, limits, seed=seed, exchange_steps=exchange_steps)
    if random_order:
        window._running_order = _in_random_order
    try:
        arranged = kind(spec, Ranks(*shape), effort=Effort(**options))
        windows = len(arranged.window_starts(epoch)) - 1
        return Packs.concatenate(arranged.window(epoch, index) for index in range(windows))
    finally:
        window._running_order = ordered


def _in_random_order(packs: Any, rules: Any, rng: np.random.Generator) -> Any:
    return rng.permuted(np.arange(len(packs)).reshape(-1, rules.step_packs), axis=1).ravel()


def figures(lengths: SampleLengths, limits: PackLimits, packs: Packs, shape: tuple[int, int]) -> Figures:
    """Of a plan."""
    steps = np.arange(len(packs)).reshape(-1, *shape)
    quintile = np.argsort(np.argsort(lengths.llm_tokens, kind="stable"), kind="stable") * 5 // len(lengths)
    chi = [
        step_randomness(source_mix(kind, packs, steps)) if len(steps) >= LEAST_STEPS else np.nan
        for kind in (lengths.source, quintile)
    ]
    over = int((packs.sizes > 0).sum()) / max(volume_bound(lengths, limits), 1) - 1
    return Figures(_seconds(lengths, packs, steps), *chi, over)


def _seconds(lengths: SampleLengths, packs: Packs, steps: Any) -> float:
    """Predicted seconds of an epoch over those of ranks that are all even."""
    load = packs.load(lengths)
    vision, cost = load.vision_units, DEFAULT_COST(load)
    vision, cost = vision[steps] / max(vision.mean(), 1e-9), cost[steps] / cost.mean()  # (steps, ranks, micro-batches)
    even = (VIT_SHARE * vision + (1 - VIT_SHARE) * cost).sum(axis=2).mean(axis=1)
    micro_batches = steps.shape[2]
    if micro_batches == 1:
        slowest = (VIT_SHARE * vision + (1 - VIT_SHARE) * cost).sum(axis=2).max(axis=1)
        return float(slowest.sum() / even.sum())
    schedule, transfers = one_f_one_b(len(STAGES), micro_batches), np.zeros((micro_batches, len(STAGES) - 1))
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), SIMULATED)).astype(int)
    stages = np.stack([vit * vision + llm * cost for vit, llm in STAGES], axis=-1)
    took = 0.0
    for step in chosen:
        took += max(
            run(schedule, np.stack([forward, 2 * forward, forward, forward]), transfers, "overlap").makespan_seconds / 3
            for forward in stages[step]
        )
    bubbles = 1 + (len(STAGES) - 1) / micro_batches
    return took / float(even[chosen].sum() / len(STAGES) * bubbles)


def parts(seeds: int) -> Iterator[str]:
    """A table for every number of ranks and micro-batches, with a row for each part."""
    cells = datasets()
    for shape in SHAPES:
        yield f"\n{shape[0]} ranks, {shape[1]} micro-batches\n"
        yield f"| what | {' | '.join(cells)} |"
        yield f"|{' --- |' * (len(cells) + 1)}"
        usual = {name: [_measure(*cell, shape, seed, {}) for seed in range(seeds)] for name, cell in cells.items()}
        yield f"| as it is | {' | '.join(map(_waiting, usual.values()))} |"
        for part, options in PARTS.items():
            row = []
            for name, cell in cells.items():
                found = [_measure(*cell, shape, seed, options) for seed in range(seeds)]
                row.append(_compared(found, usual[name]))
            yield f"| {part} | {' | '.join(row)} |"


def _measure(
    lengths: SampleLengths, limits: PackLimits, shape: tuple[int, int], seed: int, options: dict[str, Any]
) -> Figures | None:
    try:
        return figures(lengths, limits, plan(lengths, limits, shape, seed=seed, **options), shape)
    except InfeasibleError:
        return None


def _waiting(found: list[Figures | None]) -> str:
    """What is lost beyond even ranks, and both χ²."""
    seconds, sources, tokens, over = np.array([entry for entry in found if entry]).mean(axis=0)
    return f"{seconds - 1:.2%}, χ² {sources:.2f} / {tokens:.2f}, packs {over:+.1%}"


def _compared(found: list[Figures | None], usual: list[Figures | None]) -> str:
    pairs = [(mine, theirs) for mine, theirs in zip(found, usual, strict=True) if mine and theirs]
    failed = f" F{found.count(None)}" if None in found else ""
    if not pairs:
        return failed
    mine, theirs = np.array(pairs).swapaxes(0, 1)
    prices = 100 * (mine[:, 0] / theirs[:, 0] - 1)
    text = f"{prices.mean():+.2f} ± {prices.std(ddof=1) / np.sqrt(len(prices)):.2f}" if len(prices) > 1 else "one seed"
    change = (mine - theirs).mean(axis=0)
    if np.nanmax(np.append(change[1:3], 0)) > NOTABLE:
        text += f", χ² {np.nanmax(mine[:, 1:3].mean(axis=0)):.2f}"
    return text + (f", packs {change[3]:+.1%}" if abs(change[3]) > 0.0005 else "") + failed


def randomness() -> Iterator[str]:
    """χ² by the number of ranks; where there are too few samples for 50 steps, they are repeated."""
    ranks = (8, 64, 512)
    yield f"| where | {' | '.join(f'dp {number}' for number in ranks)} |"
    yield f"|{' --- |' * (len(ranks) + 1)}"
    for name, (lengths, limits) in datasets().items():
        row = []
        for number in ranks if not name.startswith("small") else ranks[:1]:
            copies = -(-LEAST_STEPS * number // max(volume_bound(lengths, limits), 1))
            many = lengths.take(np.tile(np.arange(len(lengths)), copies))
            found = []
            for seed in range(SEEDS):
                packs = plan(many, limits, (number, 1), seed=seed)
                found.append(figures(many, limits, packs, (number, 1)).sources)
            row.append(f"{np.mean(found):.2f} ± {np.std(found) / np.sqrt(SEEDS):.2f}")
        yield f"| {name} | {' | '.join(row)} |"


def fuzz() -> Iterator[str]:
    """Harsh configurations: tight limits, many ranks, few samples; every sample once, nothing over a limit."""
    rng, tried = np.random.default_rng(0), 0
    for number in range(300):
        count = int(10 ** rng.uniform(1, 5.2))
        kind = number % 3
        lengths = patch_lengths(count, seed=number) if kind == 0 else tiled_lengths(count, seed=number)
        if kind == 2:
            tiles = rng.integers(0, 7, count)
            lengths = SampleLengths(tiles, 200 * tiles + (10 ** rng.uniform(0, 3.5, count)).astype(np.int64) + 1)
        most = lengths.summary.max_vision_units, lengths.summary.max_llm_tokens
        limits = PackLimits(*(max(round(size * 10 ** rng.uniform(-0.3, 0.7)), 1) for size in most))
        shape = (int(2 ** rng.uniform(0, 9)), int(2 ** rng.uniform(0, 4)))
        name = f"{number}: {count} samples, {limits.vision_units} / {limits.llm_tokens}, {shape}"
        try:
            for epoch in (0, 1):
                packs = plan(lengths, limits, shape, epoch=epoch)
                load = packs.load(lengths)
                over = (load.vision_units > limits.vision_units) | (load.llm_tokens > limits.llm_tokens)
                assert (np.bincount(packs.samples, minlength=count) == 1).all(), name
                assert (packs.sizes[over] <= 1).all(), name
        except InfeasibleError as error:
            yield f"{name}: {error}"
        tried += 1
    yield f"{tried} configurations"


def main(
    what: Annotated[str, typer.Argument(help="parts, randomness or fuzz")],
    seeds: Annotated[int, typer.Option(help="Epochs of each cell of the parts.")] = 4,
) -> None:
    """Print one of the tables."""
    tables: dict[str, Callable[[], Iterator[str]]] = {
        "parts": lambda: parts(seeds),
        "randomness": randomness,
        "fuzz": fuzz,
    }
    for line in tables[what]():
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
