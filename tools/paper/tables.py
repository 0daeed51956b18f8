"""The paper's Tables 3, 4, 8 to 12, 14, 15 and 16, simulated: python -m tools.paper.tables 9; see README.md."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Annotated

import numpy as np
import typer

from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.device import DEVICES
from omnibal.pipeline.partition import parameter_cut
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.pipeline.search import PartitionProblem, greedy_anchor, search_partition
from omnibal.pipeline.times import step_times
from tools.bench import table
from tools.paper.datasets import captions, cut_into, llava
from tools.paper.ladder import gpu_days, ladder, paper_cut, rung
from tools.paper.setting import Setting
from tools.partition.paper_models import TABLE_9, Published, factor_of
from tools.synthetic import patch_lengths

A100, H100 = (replace(DEVICES[name], memory_bytes=80 * 2**30) for name in ("A100-80GB", "H100-80GB"))
TABLE_3 = {
    "random": ("random_batches", 61.8, 42.2),
    "length-group": ("length_grouped", 54.0, 40.0),
    "device-group": ("device_grouped", 54.5, 43.6),
    "ISF": (None, 51.9, 29.0),
}
"""Rule, GPU days without and with model balance."""
TABLE_8 = {"LLaVA-665K": (43.3, 12.4), "InternVL-1.2M": (61.8, 21.3), "LCS-558K": (23.8, 7.5)}
TABLE_9_DAYS = ((27.7, 13.8), (61.8, 21.3), (75.4, 30.5), (129, 52.5), (243, 75.2), (23.6, 12.2), (38.1, 17.0),
                (41.8, 20.3), (63.6, 33.8))  # fmt: skip
TABLE_10 = {1: (9, 4096, 28.6, 13.7), 4: (9, 4096, 61.8, 21.3), 6: (14, 5120, 147, 72), 12: (14, 5120, 209, 105)}
"""By the most tiles of an image: limits; GPU days before and after."""
TABLE_11 = {
    "6B + 20B, ViT and MLP": (TABLE_9[1], ("language",), 9.9, 6.0),
    "6B + 34B, MLP": (TABLE_9[2], ("vision", "language"), 8.3, 4.9),
    "6B + 70B, MLP": (TABLE_9[3], ("vision", "language"), 16.8, 9.6),
}
"""By what is trained; the rest is frozen. GPU days before and after."""
TABLE_12 = {224: (20, 4096, 32.0, 20.0), 336: (11, 4096, 62.0, 33.0), 448: (9, 4096, 61.8, 21.3)}
"""By the pixels of a tile's side: limits, with which packs hold the paper's 4.8, 3.3 and 4.6 samples; GPU days."""
TABLE_15 = {"A100, 4 × 200G": (A100, 20e9, 61.8, 21.3), "A100, 2 × 200G": (A100, 10e9, 64.0, 24.8),
            "H100, 8 × 400G": (H100, 50e9, 32.5, 12.2)}  # fmt: skip
TABLE_16 = {64: (72.8, 29.3), 128: (75.2, 29.7), 256: (82.1, 30.4), 512: (85.3, 30.9)}
GAINS = ("", "paper", "gain", "simulated", "gain", "ours", "gain")


def gains(name: str, setting: Setting, before: float, after: float) -> tuple[str, ...]:
    """The paper's days before and after, the simulator's, and ours."""
    rungs = ladder(setting)
    first, last, ours = (gpu_days(setting, rungs[place]) for place in (0, 3, 4))
    return (
        name, f"{before:g} → {after:g}", f"{before / after:.2f}", f"{first:.1f} → {last:.1f}", f"{first / last:.2f}",
        f"{ours:.1f}", f"{first / ours:.2f}",
    )  # fmt: skip


def table_3() -> str:
    """GPU days of each data method, everything recomputed, under both cuts."""
    setting, rows = Setting(), []
    full = ("full",) * len(setting.profile.layers)
    by_parameters = parameter_cut(setting.profile, setting.num_stages)
    for name, (rule, *published) in TABLE_3.items():
        batches = setting.packed if rule is None else setting.padded(rule)
        cuts = by_parameters, paper_cut(setting, batches)
        days = [gpu_days(setting, rung(setting, name, batches, cut, full)) for cut in cuts]
        rows.append((name, *(f"{said:.1f}" for said in published), *(f"{value:.1f}" for value in days)))
    names = ("", "paper, parameter cut", "paper, balanced cut", "simulated, parameter cut", "simulated, balanced cut")
    return table(names, rows)


def table_8() -> str:
    """Other datasets."""
    settings = {
        "LLaVA-665K": Setting(lengths=llava(), samples=665_000),
        "InternVL-1.2M": Setting(),
        "LCS-558K": Setting(lengths=captions(), samples=558_000),
    }
    return table(GAINS, [gains(name, settings[name], *days) for name, days in TABLE_8.items()])


def table_9() -> str:
    """Other models; the last column is how far our best cut's boundaries lie from the greedy anchor's at most."""
    rows = []
    for row, days in zip(TABLE_9, TABLE_9_DAYS, strict=True):
        setting = Setting(row=row, vision_factor=factor_of(row))
        name = f"{row.name}, {row.tensor_parallel} {len(row.blocks)} {row.num_replicas}"
        rows.append((*gains(name, setting, *days), f"{_from_anchor(setting)}"))
    return table((*GAINS, "r"), rows)


def table_4() -> str:
    """The best cut within a distance of the greedy anchor, against the search's; simulated on one step."""
    setting = Setting()
    problem, anchor = _problem(setting), _anchor(setting)
    best = float(problem.evaluate(np.array([_searched(setting)]))[0])
    rows = []
    for radius in range(6):
        shifts = np.array(list(product(range(-radius, radius + 1), repeat=setting.num_stages - 1)))
        cuts = np.array(anchor) + np.pad(shifts, ((0, 0), (1, 1)))
        seconds = problem.evaluate(cuts)
        found = cuts[seconds.argmin()]
        rows.append((f"r = {radius}", f"{len(cuts):,}", " ".join(map(str, found)), f"{seconds.min() / best - 1:+.2%}"))
    return table(("within", "cuts", "the best of them", "its step, over the search's"), rows)


def _problem(setting: Setting) -> PartitionProblem:
    links = setting.cluster.links_of(setting.layout)
    times = step_times(setting.profile, setting.packed.steps[0], links, zero_stage=1)
    schedule = one_f_one_b(setting.num_stages, setting.micro_batches)
    return PartitionProblem(setting.profile, times, schedule, "rendezvous")


def _anchor(setting: Setting) -> tuple[int, ...]:
    return greedy_anchor(_problem(setting).mean.forward, setting.num_stages)


def _searched(setting: Setting) -> tuple[int, ...]:
    links = setting.cluster.links_of(setting.layout)
    found = search_partition(setting.profile, setting.packed.steps[0], setting.num_stages, links, zero_stage=1)
    return found.best.partition.boundaries


def _from_anchor(setting: Setting) -> int:
    """How far the search's boundaries lie from the greedy anchor's at most."""
    return max(abs(a - b) for a, b in zip(_anchor(setting), _searched(setting), strict=True))


def table_10() -> str:
    """Other limits of tiles."""
    rows = []
    for tiles, (vision, tokens, *days) in TABLE_10.items():
        setting = Setting(lengths=cut_into(tiles), limits=PackLimits(vision, tokens))
        rows.append(gains(f"at most {tiles} tiles", setting, *days))
    return table(GAINS, rows)


def table_11() -> str:
    """Pretraining on LCS-558K, one tile a sample, with frozen parts."""
    return table(GAINS, [gains(name, frozen_setting(name), *days) for name, (_, _, *days) in TABLE_11.items()])


def frozen_setting(name: str) -> Setting:
    """A row of Table 11."""
    row, frozen, *_ = TABLE_11[name]
    return Setting(row=row, lengths=captions(), samples=558_000, vision_factor=factor_of(row), frozen=frozen)


def table_12() -> str:
    """Other resolutions."""
    rows = []
    for pixels, (vision, tokens, *days) in TABLE_12.items():
        setting = Setting(lengths=cut_into(pixels=pixels), limits=PackLimits(vision, tokens), image_size=pixels)
        rows.append(gains(f"{pixels}", setting, *days))
    return table(GAINS, rows)


def table_14() -> str:
    """Dist Ratios of native resolutions, 4 ranks: patches, and tokens."""
    lengths, replicas = patch_lengths(60_000, seed=1), 4
    limits = PackLimits(16_384, 5_120)
    setting = Setting(lengths=lengths, limits=limits, micro_batches=1)
    variants = {"random, padded": (setting.padded(), (0.408, 0.393)), "ISF": (setting.packed, (0.12, 0.06)),
                "ours": (setting.balanced(limits, micro_batches=1), None)}  # fmt: skip
    rows = []
    for name, (batches, published) in variants.items():
        load = Load.stack(Load.stack(step) for step in batches.steps)
        found = [dist_ratio(values[..., 0]) for values in (load.vision_units, load.llm_tokens)]
        theirs = (f"{said:g}" for said in published) if published else ("", "")
        rows.append((name, f"{batches.samples_per_step / replicas:.1f}", *theirs, *(f"{value:.3f}" for value in found)))
    return table(("", "samples", "paper, ViT", "paper, LLM", "here, ViT", "here, LLM"), rows)


def table_15() -> str:
    """Other hardware."""
    rows = []
    for name, (device, network, *days) in TABLE_15.items():
        rows.append(gains(name, Setting(device=device, network=network), *days))
    return table(GAINS, rows)


def table_16() -> str:
    """6B + 70B on 64 to 512 H100s: more replicas wait for the slowest of more."""
    rows = []
    for gpus, days in TABLE_16.items():
        row = Published("InternVL-6B", "Llama3-70B", 4, gpus // 32, (22, 23, 13, 14, 14, 14, 13, 12))
        rows.append(gains(f"{gpus} GPUs", Setting(row=row, device=H100, network=50e9), *days))
    return table(GAINS, rows)


TABLES: dict[str, Callable[[], str]] = {
    name.removeprefix("table_"): made for name, made in list(globals().items()) if name.startswith("table_")
}


def main(numbers: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(TABLES)}; all.")] = None) -> None:
    """Print tables as Markdown."""
    for number in numbers or TABLES:
        print(f"### Table {number}\n\n{TABLES[number]()}\n", flush=True)


if __name__ == "__main__":
    typer.run(main)
