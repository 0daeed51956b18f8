"""Samplers side by side on the same lengths; see README.md."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.ticker import LogLocator, NullLocator
from tqdm import tqdm

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import PackingFigures
from omnibal.report.style import BLUE, GREY, ORANGE, VERMILION, drawing
from tools.bench import machine, table
from tools.sampling.data import mixed_lengths, real_lengths
from tools.sampling.measure import figures_of, plan_by_peers, plan_by_rule, plan_ours
from tools.sampling.paper import RANKS as PAPER_RANKS
from tools.sampling.paper import as_the_paper_counts, fit_of_the_mix, table_3, table_6
from tools.sampling.rules import Task

HERE = Path(__file__).parent
FILES = (HERE / "requirements.txt", HERE / "requirements-bare.txt")
LEAST = 1e-4
"""Smaller Dist Ratios are drawn here."""
SETTINGS = ((PackLimits(9, 4096), 4), (PackLimits(16, 5120), 4), (PackLimits(33, 10240), 8))
"""Limits, and the samples per micro-batch of methods that know none: the paper's, and two with little waste."""
DRAWN = SETTINGS[1][0]
RANKS = (8, 16)

METHODS = {
    "transformers_random": "random batches, padded (transformers)",
    "transformers_group_by_length": "group_by_length, padded (transformers)",
    "transformers_batch_rebalance": "batch_rebalance, padded (transformers)",
    "length_grouped": "length-grouped, padded (LLaVA) ¹",
    "device_grouped": "device-grouped, padded (OmniBal's Table 3) ¹",
    "verl_karmarkar_karp": "Karmarkar–Karp per step, no limits (verl)",
    "trl_best_fit": "best fit by tokens (trl)",
    "axolotl_multipack": "first fit by tokens (axolotl)",
    "binpacking_constant_volume": "to_constant_volume by tokens (binpacking, as ms-swift)",
    "best_fit": "best fit in both dimensions ¹",
    "best_fit_sorted": "best fit in both, packs sorted across steps ¹",
    "published_isf": "ISF, 10 iterations, as published ¹",
    "published_isf_50": "ISF, 50 iterations, as published ¹",
    "random": "**omnibal random**",
    "isf": "**omnibal isf**",
    "balanced": "**omnibal balanced**",
}
OURS = ("random", "isf", "balanced")
PEERS = ("transformers", "accelerate", "trl", "axolotl", "binpacking", "verl", "torch")

LEGEND = """
- DR: Dist Ratio, dp 8 / dp 16; the share of time that ranks wait for the slowest.
- Cost: 24576·l + l², squares summed within samples: a decoder block of hidden size 4096.
- χ²: of the steps' mixes of sources, per degree of freedom; 1 is as random as shuffling, more is sorted.
- Over limit: share of micro-batches of several samples that exceed a limit; where there are any, packs cannot be
  compared with the fewest. Over fewest below 0: samples were lost.
- Seconds: one process, after what is compiled has been compiled.
- ¹ Our own statement of a published rule, with its time; all others run in their own packages."""
REMARKS = """
Text lengths of four of the nine sources are published by nobody. The mix that the paper describes has shorter texts
and more images of three tiles than their own papers suggest: with both fitted to its tiles of a sample and its
samples per pack, ISF has the paper's Dist Ratios, but for the LLM's: 0.11 on the paper's 4 ranks, 0.14 on the 8 of
its published test script, with which random batches agree as well (0.33 / 0.30; 0.25 / 0.23 on 4). Qv is the paper's
9 because its code rounds lengths up to multiples of 256 before it takes their mean: by lengths as they are it is 10.6
with the blank tiles counted, 10.4 without. Grouping by length and by device is not described closely enough to be
repeated. Of the three sources whose real lengths we have, half of the samples have five tiles, of which no two share
a pack of 9: hence their uneven vision units."""

Found = dict[str, list[PackingFigures]]


def main(
    out: Annotated[Path, typer.Option(help="Where the Markdown goes.")] = HERE / "RESULTS.md",
    peers_venv: Annotated[Path, typer.Option(help="The peers' environment; made if missing.")] = HERE / ".venv",
    mix: Annotated[bool, typer.Option(help="Also measure the paper's tables on 1.3 million made-up samples.")] = True,
) -> None:
    """Compare samplers and write the result as Markdown."""
    python = peers_python(peers_venv)
    lengths, name = real_lengths()
    parts = [_head(name)]
    for limits, batch in SETTINGS:
        found = _compare(lengths, limits, batch, python)
        parts += _section(limits, batch, found)
        if limits == DRAWN:
            title = f"dp {RANKS[0]}, limits {limits.vision_units} vision units and {limits.llm_tokens} LLM tokens"
            shown = {METHODS[key]: figures[0] for key, figures in found.items()}
            draw_tradeoff(shown, title, out.with_name("tradeoff.png"))
    parts += _paper_section(lengths, name)
    if mix:
        made_up, name = mixed_lengths()
        parts += _paper_section(as_the_paper_counts(made_up), name)
        parts += _fit_section(made_up)
    out.write_text("\n".join(parts) + "\n")
    typer.echo(f"written: {out}")


def _compare(lengths: SampleLengths, limits: PackLimits, batch: int, python: Path) -> Found:
    """Figures of every method, one entry per number of ranks."""
    found: Found = {key: [] for key in METHODS}
    for ranks in tqdm(RANKS, desc=f"{limits.vision_units} / {limits.llm_tokens}"):
        task = Task(lengths, limits, ranks, batch)
        peers = plan_by_peers(task, python)
        for key in METHODS:
            plan = plan_ours if key in OURS else plan_by_rule
            found[key].append(figures_of(key, peers[key] if key in peers else plan(key, task), task))
    return found


def _head(name: str) -> str:
    versions = ", ".join(f"{package} {peer_version(package)}" for package in PEERS)
    return (
        f"# Samplers side by side\n\n{machine('numpy', 'numba')}; peers: {versions}."
        f"\n\n{name}; one micro-batch per rank and step.\n"
        f"The planner's targets, one by one: [TARGETS.md](TARGETS.md).\n{LEGEND}"
    )


def peer_version(package: str) -> str:
    """The version of a peer that requirements name."""
    lines = (HERE / "requirements.txt").read_text() + (HERE / "requirements-bare.txt").read_text()
    return next(line.split("==")[1] for line in lines.splitlines() if line.startswith(f"{package}=="))


def _section(limits: PackLimits, batch: int, found: Found) -> Iterator[str]:
    fewest = found["balanced"][0].fewest_packs
    yield (
        f"\n## Limits {limits.vision_units} vision units, {limits.llm_tokens} LLM tokens\n\n"
        f"Fewest packs possible: {fewest:,}. Methods without limits: {batch} samples in a micro-batch on average.\n"
    )
    head = "method, packs, over fewest, samples per pack, Pad, DR vision, DR LLM, DR cost, χ², lost, repeated, "
    yield table(
        (head + "over limit, seconds").split(", "), [_row(METHODS[key], *figures) for key, figures in found.items()]
    )


def _row(label: str, eight: PackingFigures, sixteen: PackingFigures) -> Sequence[str]:
    both = (eight, sixteen)
    return (
        label,
        f"{eight.packs:,}",
        "–" if eight.over_limit else f"{eight.packs_over_fewest:+.2%}",
        f"{eight.samples_per_pack:.2f}",
        f"{eight.pad_ratio:.3f}" if eight.pad_ratio else "0",
        " / ".join(f"{entry.dist_ratio_vision:.4f}" for entry in both),
        " / ".join(f"{entry.dist_ratio_tokens:.4f}" for entry in both),
        " / ".join(f"{entry.dist_ratio_cost:.4f}" for entry in both),
        " / ".join(f"{entry.randomness:.2f}" for entry in both),
        " / ".join(str(entry.lost) for entry in both),
        " / ".join(str(entry.repeated) for entry in both),
        f"{eight.over_limit / eight.packs:.0%}" if eight.over_limit else "0",
        f"{eight.seconds:.2f}",
    )


def _paper_section(lengths: SampleLengths, name: str) -> Iterator[str]:
    yield f"\n## The paper's tables on {name}\n"
    yield f"Measured / the paper's figure; limits 9 and 4096, dp {PAPER_RANKS}.\n\nTable 3:\n"
    columns = ["method", "samples per micro-batch", "Pad Ratio", "DR vision", "DR LLM"]
    yield table(columns, table_3(lengths))
    yield "\nTable 6, ISF as published:\n"
    yield table(["Q'v, Q't", "DR vision", "DR LLM", "packs"], table_6(lengths))


def _fit_section(lengths: SampleLengths) -> Iterator[str]:
    yield "\nWhat the made-up mix was fitted to, and what else the paper says of it; ISF as published:\n"
    yield table(["what", "paper", "measured", "fitted"], fit_of_the_mix(lengths))
    yield REMARKS


def peers_python(folder: Path = HERE / ".venv") -> Path:
    """The interpreter of an environment with all peers in it; some minutes the first time.

    Args:
        folder: Where the environment is, or is made.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in FILES)).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing the peers into {folder}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--requirement", FILES[0]], check=True)
    subprocess.run([*install, "--no-deps", "--requirement", FILES[1]], check=True)
    stamp.write_text(wanted)
    return python


def draw_tradeoff(figures: Mapping[str, PackingFigures], title: str, path: Path) -> None:
    """Draw Dist Ratios and the χ² of the steps' mixes, a row per method, the one with the slowest ranks on top.

    Args:
        figures: By label; ours are in bold (``**label**``).
        title: What was packed.
        path: The PNG.
    """
    rows = sorted(figures.items(), key=lambda item: item[1].dist_ratio_cost)
    places = range(len(rows))
    with drawing(path, 9.6, 0.3 * len(rows) + 1.3) as figure:
        waiting, randomness = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for values, colour, label in (
            ([entry.dist_ratio_vision for _, entry in rows], BLUE, "vision units"),
            ([entry.dist_ratio_cost for _, entry in rows], VERMILION, "LLM cost"),
        ):
            waiting.scatter([max(value, LEAST) for value in values], places, s=36, color=colour, label=label, zorder=3)
        randomness.scatter([entry.randomness for _, entry in rows], places, s=36, color=ORANGE, zorder=3)
        randomness.axvline(1, color=GREY, linewidth=1)
        waiting.set(xscale="log", xlabel="Dist Ratio: share of time that ranks wait")
        waiting.xaxis.set_major_formatter("{x:g}")  # powers would be formulas, which ``drawing`` does not parse
        randomness.set(xscale="log", xlabel="χ² of steps (1: as shuffled)")
        randomness.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        randomness.xaxis.set_major_formatter("{x:g}")
        randomness.xaxis.set_minor_locator(NullLocator())
        waiting.set_yticks(places, [label.strip("*¹ ") for label, _ in rows])
        for tick, (label, _) in zip(waiting.get_yticklabels(), rows, strict=True):
            tick.set_fontweight("bold" if label.startswith("**") else "normal")
        waiting.legend(loc="lower right")
        figure.suptitle(title, fontsize=10)


if __name__ == "__main__":
    typer.run(main)
