"""Mixtures: shares over any thousand steps, randomness against the asked mix, balance, time; see README.md."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from PIL import Image

from omnibal.cost import FloatArray
from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio, min_packs
from omnibal.data.packing_spec import DEFAULT_COST, Knot, Mixture, Unit
from omnibal.data.packs import Packs
from omnibal.errors import InfeasibleError
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.report.training import plot_shares
from tools.bench import print_table
from tools.sampling.data import mixed_lengths, real_lengths
from tools.synthetic import tiled_lengths

Rows = Iterator[Sequence[str]]
Case = tuple[str, SampleLengths, PackLimits, Mixture]

SEEDS: Final = 10
RANKS: Final = (8, 64, 512)
EVERY: Final = 1000
HARSH: Final = 100
SHARES: Final = (0.5, 0.2, 0.3)
"""Of the real files: unlike the 0.21, 0.30 and 0.49 that they have."""


def main(
    part: Annotated[str, typer.Argument(help="shares, randomness, balance, speed, fuzz, or picture: minutes each.")],
) -> None:
    """Measure one part and print its rows as Markdown."""
    heads, rows = PARTS[part]
    print_table(heads, rows())


def cases() -> Iterator[Case]:
    """Real lengths, and nine made-up sources with equal shares; at sane and tight limits."""
    real, mix = real_lengths()[0], mixed_lengths()[0].take(np.arange(200_000))
    asked = Mixture(dict(zip(real.source_names, SHARES, strict=True)))
    for sizes in ((33, 10240), (16, 5120), (9, 4096)):
        yield "real {}/{}".format(*sizes), real, PackLimits(*sizes), asked
    for sizes in ((16, 7296), (9, 4096)):
        yield "mix {}/{}".format(*sizes), mix, PackLimits(*sizes), Mixture(dict.fromkeys(mix.source_names, 1.0))


def first_steps(
    lengths: SampleLengths, limits: PackLimits, mixture: Mixture, ranks: int, number: int, seed: int = 0
) -> list[Packs]:
    """The packs of so many steps, through one epoch after another."""
    sampler = BalancedBatchSampler(lengths, limits, num_replicas=ranks, rank=0, seed=seed, mixture=mixture)

    def every() -> Iterator[Packs]:
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from (step.packs for step in sampler.steps())

    return list(islice(every(), number))


def given(lengths: SampleLengths, steps: Sequence[Packs], by: str = "samples") -> FloatArray:
    """What each source gave in each step, shape (steps, sources)."""
    weights = np.ones(len(lengths)) if by == "samples" else getattr(lengths, by)
    number = len(lengths.source_names)
    rows = [np.bincount(lengths.source[packs.samples], weights[packs.samples], minlength=number) for packs in steps]
    return np.array(rows)


def shares() -> Rows:
    """How far realised shares are from those asked for, over any thousand of 5,000 steps of 8 ranks."""
    for name, lengths, limits, mixture in cases():
        first, last = lengths.source_names[0], lengths.source_names[-1]
        turn = (Knot(1500, mixture.shares), Knot(3000, {first: 1, last: 3}), Knot(3001, {last: 1, first: 1}))
        for by in ("samples", "llm_tokens"):
            for schedule in ((), turn):
                asked = Mixture(mixture.shares, by, schedule)
                found = given(lengths, first_steps(lengths, limits, asked, 8, 5 * EVERY), by)
                # Steps of a lighter mix hold more, and count for more.
                wanted = asked.shares_at(np.arange(len(found)) + 0.5) * found.sum(axis=1, keepdims=True)
                sums = np.cumsum(np.pad(np.stack([found, wanted]), [(0, 0), (1, 0), (0, 0)]), axis=1)
                parts = sums[:, EVERY:] - sums[:, :-EVERY]
                away = np.abs(parts[0] - parts[1]) / parts[0].sum(axis=1, keepdims=True)
                yield name, by, "changing" if schedule else "constant", f"{away.mean():.3%}", f"{away.max():.3%}"


def randomness() -> Rows:
    """χ² per degree of freedom against the asked mix: mean over seeds with its standard error, 50 steps each."""
    for name, lengths, limits, mixture in cases():
        cells = []
        for ranks in RANKS:
            found = []
            for seed in range(SEEDS):
                counts = given(lengths, first_steps(lengths, limits, mixture, ranks, 50, seed))
                expected = counts.sum(axis=1, keepdims=True) * mixture.shares_at(0)
                found.append(((counts - expected) ** 2 / expected).sum() / (len(counts) * (counts.shape[1] - 1)))
            cells.append(f"{np.mean(found):.2f} ± {np.std(found) / np.sqrt(SEEDS):.2f}")
        yield name, *cells


def balance() -> Rows:
    """An epoch of a mixture beside a plain epoch of the very samples that it draws."""
    for name, lengths, limits, mixture in cases():
        for ranks in RANKS[:2]:
            mixed = arrange_epoch(lengths, limits, num_replicas=ranks, mixture=mixture)
            drawn = lengths.take(np.random.default_rng(0).permutation(mixed.packs.samples))
            plain = arrange_epoch(drawn, limits, num_replicas=ranks)
            fewest = min_packs(drawn, limits)
            pairs = [
                [f"{figure(a, b):{form}}" for a, b in ((lengths, mixed), (drawn, plain))]
                for form, figure in (
                    ("+.2%", lambda _, epoch, fewest=fewest: len(epoch.packs) / fewest - 1),
                    (".4f", lambda of, epoch: dist_ratio(epoch.packs.vision_units(of)[epoch.steps])),
                    (".4f", lambda of, epoch: dist_ratio(DEFAULT_COST(epoch.packs.load(of))[epoch.steps])),
                )
            ]
            yield name, str(ranks), *(" / ".join(pair) for pair in pairs)


def speed() -> Rows:
    """Processor seconds, the least of three, of a mixture and of a plain epoch: 1.2 million samples, 8 ranks."""
    real = real_lengths()[0]
    many = real.take(np.arange(1_200_000) % len(real))
    for by in (None, "samples", "llm_tokens"):
        mixture = None if by is None else Mixture(dict(zip(real.source_names, SHARES, strict=True)), by)
        sampler = BalancedBatchSampler(many, PackLimits(16, 5120), num_replicas=8, rank=0, mixture=mixture)
        sampler.set_epoch(3)
        state = sampler.state_dict(sampler.num_steps // 2)

        def resume(state: dict[str, Any] = state, mixture: Mixture | None = mixture) -> None:
            again = BalancedBatchSampler(many, PackLimits(16, 5120), num_replicas=8, rank=0, mixture=mixture)
            again.load_state_dict(state)
            next(iter(again))

        def plan(mixture: Mixture | None = mixture) -> Epoch:
            epoch = arrange_epoch(many, PackLimits(16, 5120), num_replicas=8, mixture=mixture)
            assert sum(map(len, epoch)) == 8 * epoch.num_steps
            return epoch

        yield by or "no mixture", *(f"{min(_seconds(run) for _ in range(3)):.2f}" for run in (plan, resume))


def picture() -> Rows:
    """Draws `docs/pictures/mixture.png`: mostly text, then images come in, then a second stage, as it is sampled."""
    tiled = tiled_lengths(60_000, text_share=0)
    source = np.repeat([0, 1, 2], [10_000, 30_000, 20_000])
    tiles = np.where(source == 2, 0, tiled.vision_units)
    lengths = SampleLengths(
        tiles, tiled.llm_tokens - 256 * (source == 2), source=source, source_names=["ocr", "chat", "text"]
    )
    mixture = Mixture(
        {"text": 0.8, "chat": 0.2},
        schedule=(
            Knot(500, {"text": 0.8, "chat": 0.2}),
            Knot(1500, {"ocr": 0.1, "chat": 0.7, "text": 0.2}),
            Knot(2500, {"ocr": 0.1, "chat": 0.7, "text": 0.2}),
            Knot(2501, {"ocr": 0.5, "chat": 0.3, "text": 0.2}),
        ),
    )
    sampler = BalancedBatchSampler(lengths, PackLimits(16, 5120), num_replicas=8, rank=0, mixture=mixture)
    found: list[Mapping[str, tuple[float, float]]] = []
    while len(found) < 4000:
        found += [sampler.step(step).shares for step in range(sampler.num_steps)]
        sampler.set_epoch(sampler.epoch + 1)
    path = Path(__file__).parents[2] / "docs" / "pictures" / "mixture.png"
    plot_shares(range(1, 4001), found[:4000], path)
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)  # a small file
    yield (str(path),)


def fuzz() -> Rows:
    """Harsh mixtures: small sources of few sizes that hardly combine, tight limits, knots a few steps apart."""
    refused = failed = 0
    for number in range(HARSH):
        chance = np.random.default_rng(number)
        sampler_of = partial(BalancedBatchSampler, rank=0, seed=number, **_harsh(chance))
        try:
            sampler = sampler_of()
        except InfeasibleError:
            refused += 1
            continue
        try:
            for _ in range(0, 70, sampler.num_steps):
                list(sampler.steps())
                sampler.set_epoch(sampler.epoch + 1)
        except InfeasibleError as error:
            failed += 1
            yield str(number), str(error)
    yield "in all", f"{HARSH} mixtures, {refused} refused at once, {failed} find no plan on the way"


def _harsh(chance: np.random.Generator) -> dict[str, Any]:
    """Arguments of a sampler."""
    limits = PackLimits(int(chance.choice([5, 7, 9, 12, 16])), int(chance.choice([2048, 4096, 5120])))
    tiles, tokens, source = [], [], []
    for number in range(3):
        count = int(chance.integers(30, 600))
        sizes = chance.integers(0, limits.vision_units + 1, int(chance.integers(1, 4)))
        texts = chance.integers(20, limits.llm_tokens // 2, int(chance.integers(1, 6)))
        tiles += chance.choice(sizes, count).tolist()
        tokens += chance.choice(texts, count).tolist()
        source += [number] * count
    a_tile = min(256, limits.llm_tokens // (2 * limits.vision_units))
    all_tokens = np.minimum(np.array(tokens) + a_tile * np.array(tiles), limits.llm_tokens)
    rows = chance.choice([0, 0.02, 0.3, 1], (6, 3))
    rows[:, 0] += 1e-9  # never all 0
    shares = [dict(zip("abc", row, strict=True)) for row in rows.tolist()]
    steps = np.unique(chance.integers(1, 60, int(chance.integers(0, 6)))).tolist()
    by: Unit = chance.choice(["samples", "llm_tokens", "target_tokens"]).item()
    return {
        "lengths": SampleLengths(
            tiles, all_tokens, target_tokens=all_tokens, source=source, source_names=["a", "b", "c"]
        ),
        "limits": limits,
        "num_replicas": int(chance.choice([1, 2, 5, 8, 16])),
        "micro_batches": int(chance.choice([1, 2, 4])),
        "mixture": Mixture(shares[0], by, tuple(map(Knot, steps, shares[1:]))),
    }


def _seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


PARTS: Final = {
    "shares": (("lengths and limits", "by", "shares", "mean deviation", "largest deviation"), shares),
    "randomness": (("lengths and limits", *(f"dp {ranks}" for ranks in RANKS)), randomness),
    "balance": (
        ("lengths and limits", "ranks", "packs over fewest", "Dist Ratio, vision", "Dist Ratio, cost"),
        balance,
    ),
    "picture": (("written",), picture),
    "fuzz": (("mixture", "what happens"), fuzz),
    "speed": (("mixture by", "construction and whole epoch", "resume to the next micro-batch"), speed),
}


if __name__ == "__main__":
    typer.run(main)
