"""omnibal lengths: what every sample of a dataset brings to the ViT and to the LLM."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from omnibal.cli.dataset import BrokenOption, CacheOption, ImagesOption, MaxTilesOption
from omnibal.cli.inputs import NamedLengths, Reading, read_lengths
from omnibal.cli.outputs import check_folder
from omnibal.report.lengths import SourceStatistics, lengths_table, source_statistics

BROKEN_FILE = "broken.json"


def lengths(
    source: Annotated[
        Path,
        typer.Argument(
            help="An InternVL meta file or LLaVA's annotations (with --model), or a JSON list of "
            '{"vit_num", "token_num"}.',
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to save the lengths in.", show_default=False)],
    model: Annotated[
        Path | None, typer.Option(help="The model's Hugging Face folder: its tokenizer and how it cuts images.")
    ] = None,
    images: ImagesOption = None,
    max_tiles: MaxTilesOption = None,
    broken: BrokenOption = "error",
    processes: Annotated[int | None, typer.Option(help="Most processes; all cores by default.", min=1)] = None,
    cache: CacheOption = None,
    plot: Annotated[Path | None, typer.Option(help="Folder to draw the histograms into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics as JSON.")] = False,
) -> None:
    """Measure all samples of a dataset, save their lengths, show what they are like.

    No image is decoded: headers say how many tiles they make. The folder is
    what `omnibal pack` and SampleLengths.load read; it is memory-mapped, so
    that any number of samples opens at once.

    Example: omnibal lengths data/train.json runs/lengths
    --model models/InternVL3-1B-hf

    Then: omnibal pack runs/lengths --compare
    """
    for name, folder in (("out", out), ("--plot", plot), ("--cache", cache)):
        check_folder(name, folder)
    named = read_lengths([source], Reading(model, images, max_tiles, broken, processes, cache))
    named.save(out)
    problems = [asdict(problem) for problem in named.problems]
    (out / BROKEN_FILE).write_text(json.dumps(problems, indent=2, default=str) + "\n")
    plots = [plot / "lengths.png"] if plot else []
    for path in plots:
        from omnibal.report.lengths import plot_lengths

        plot_lengths(named.lengths, named.names, path)
    if as_json:
        typer.echo(json.dumps(_record(named, out) | {"broken": problems, "plots": plots}, indent=2, default=str))
    else:
        _print(named, [out, *plots])


def _record(named: NamedLengths, folder: Path) -> dict[str, Any]:
    """What was found, as JSON values."""
    return {
        "folder": str(folder),
        "content_hash": named.lengths.content_hash,
        "all": SourceStatistics.of("all", named.lengths).to_record(),
        "sources": [entry.to_record() for entry in source_statistics(named.lengths, named.names)],
    }


def _print(named: NamedLengths, written: list[Path]) -> None:
    console = Console()
    console.print(lengths_table(named.lengths, named.names))
    if named.problems:
        named.print_problems(console)
        console.print(f"all of them: {written[0] / BROKEN_FILE}", highlight=False)
    console.print(f"written: {', '.join(map(str, written))}", highlight=False, markup=False)
