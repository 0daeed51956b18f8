"""omnibal lengths: what every sample of a dataset brings to the ViT and to the LLM."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table

from omnibal.cli.opening import expect, open_workspace, problem_lines, read_lengths
from omnibal.cli.options import JsonOption, answer, check_folder, refuse
from omnibal.config import DataSection, ModelSection, OmnibalSection
from omnibal.data.lengths import IMAGE, VIDEO, IntArray, SampleLengths
from omnibal.errors import ConfigError
from omnibal.families.base import vision_unit_of
from omnibal.report.style import make_table
from omnibal.workspace import FoundLengths, Workspace

BROKEN_FILE = "broken.json"
LOADS = ("vision_units", "llm_tokens", "target_tokens")


def lengths(
    source: Annotated[
        Path,
        typer.Argument(
            help="A ds_config; or, without one, an InternVL meta file or conversations, as docs/data.md lists them "
            '(with --model), or a JSON list of {"vit_num", "token_num"}.',
        ),
    ],
    out: Annotated[
        Path | None, typer.Argument(help="Folder to write lengths to; by default in the ds_config's run.output.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The model's Hugging Face folder: its tokenizer and how it cuts images.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of images that annotations name; by default the annotations' own.")
    ] = None,
    max_tiles: Annotated[
        int | None,
        typer.Option(help="The most tiles an image is cut into; by default what the model's folder says.", min=1),
    ] = None,
    broken: Annotated[
        Literal["error", "skip"] | None,
        typer.Option(help="What to do with samples that cannot be read: stop and report them all, or leave them out."),
    ] = None,
    decode: Annotated[
        bool | None,
        typer.Option(
            "--decode/--no-decode",
            help="Decode images, videos and sounds to find broken ones, or read their headers alone; by default decode "
            "if there are at most 5,000 items.",
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Most processes; by default one for each core, at most 32.", min=1)
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="Show these samples by their numbers, such as 4,17, as messages of training name them."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure all samples of a dataset, save their lengths, show what they are like.

    Headers say how many tiles images make; files are decoded only to find
    broken ones. A pass that is interrupted goes on where it was, and the training
    of a ds_config measures nothing again. SampleLengths.load opens the folder,
    memory-mapped.

    Example: omnibal lengths ds_configs/mine.json

    Example: omnibal lengths ds_configs/mine.json --samples 4,17

    Example: omnibal lengths data/train.json runs/lengths
    --model models/InternVL3-1B-hf
    """
    kind = expect("source", source, ("ds_config", "dataset", "token lengths", "saved lengths"))
    check_folder("out", out)
    if samples is not None and kind != "ds_config":
        raise ConfigError(f"source must be the run's ds_config to show --samples, got {source}")
    options = {"model": model, "images": images, "max-tiles": max_tiles}
    # Lengths come from a ds_config's workspace, from lists or a folder of lengths, or from a dataset measured now.
    if kind == "ds_config":
        refuse(options, "a ds_config names data and model")
        workspace = open_workspace(source, broken=broken, decode=decode, processes=processes)
        if not workspace.section.data.train:
            raise ConfigError(f"omnibal.data.train must name the data, got none in {source}")
        folder = out or workspace.section.run.files.lengths
        check_folder("out", folder)
        if samples is not None:
            _show(workspace, samples, as_json=as_json)
            return
        found, unit = workspace.found_lengths, workspace.vision_unit
    elif out is None:
        raise ConfigError(f"out must name a folder for the lengths, got none: {source} is no ds_config")
    elif kind != "dataset":
        refuse(options, f"{source} holds lengths")
        folder, found = out, read_lengths([source], "source")
        unit = found.lengths.vision_unit
    elif model is None:
        raise ConfigError(f"--model must name the model's folder, got nothing: {source} is a dataset")
    else:
        # The section that a ds_config with this data and model would have: one path measures for both.
        place = None if images is None else str(images)
        data = DataSection(
            train=str(source), images=place, max_tiles=max_tiles, broken=broken or "error", decode=decode
        )
        section = OmnibalSection(model=ModelSection(path=str(model)), data=data)
        workspace, folder = Workspace({}, section, processes=processes), out
        unit = vision_unit_of(workspace.records)
        found = workspace.measured_lengths(folder)
    _say(found, folder, unit, as_json=as_json)


def _show(workspace: Workspace, numbers: str, *, as_json: bool) -> None:
    """Print where samples of a run stand, what they are long, and their records."""
    dataset = workspace.dataset("train")
    count, lengths, shown = len(dataset), dataset.lengths(), []
    for number in numbers.split(","):
        if not number.strip().isdecimal() or int(number) >= count:
            raise ConfigError(f"--samples must be numbers below {count} with commas between them, got {numbers!r:.80}")
        index = int(number)
        row = dataset.row_of(index)
        loads = {name: int(column[index]) for name, column in lengths.columns().items() if name in LOADS}
        shown.append({"sample": index, "file": row.file, "line": row.number, **loads, "record": row.read()})
    lines = (
        f"sample {each['sample']}: {each['file']}, line {each['line']}, "
        + ", ".join(f"{name} {each[name]}" for name in LOADS if name in each)
        + f"\n{json.dumps(each['record'], ensure_ascii=False):.2000}"
        for each in shown
    )
    answer(shown, *lines, as_json=as_json)


def _say(found: FoundLengths, folder: Path, vision_unit: str, *, as_json: bool) -> None:
    """Keep and show the lengths."""
    found.lengths.save(folder)
    problems = [asdict(problem) for problem in found.problems]
    (folder / BROKEN_FILE).write_text(json.dumps(problems, indent=2, default=str) + "\n")
    figures = statistics_of(found.lengths)
    record = {"folder": folder, "content_hash": found.lengths.content_hash, **figures, "broken": problems}
    whole = [f"all of them: {folder / BROKEN_FILE}"] if problems else []
    answer(
        record,
        lengths_table(figures, vision_unit),
        *problem_lines(found),
        *whole,
        f"written: {folder}",
        as_json=as_json,
    )


def statistics_of(lengths: SampleLengths) -> dict[str, Any]:
    """What samples are like, all of them and source by source in the order of the sources' numbers, as JSON values."""
    names = lengths.source_names or ("all",)
    source = np.zeros(len(lengths), dtype=np.int64) if lengths.source is None else lengths.source
    # One sort groups the samples of each source; a mask per source would go over all samples once per source.
    order = np.argsort(source, kind="stable")
    members = np.split(order, np.searchsorted(source[order], np.arange(1, len(names))))
    sources = [_statistics(name, lengths.take(samples)) for name, samples in zip(names, members, strict=True)]
    return {"all": _statistics("all", lengths), "sources": sources}


def _statistics(name: str, lengths: SampleLengths) -> dict[str, Any]:
    """Counts and distributions over some samples; None for target tokens that are not known."""
    targets = lengths.target_tokens
    return {
        "name": name,
        "samples": len(lengths),
        "with_image": int((lengths.kinds & IMAGE > 0).sum()),
        "with_video": int((lengths.kinds & VIDEO > 0).sum()),
        "video_units": None if lengths.video_units is None else _distribution(lengths.video_units),
        "vision_units": _distribution(lengths.vision_units),
        "llm_tokens": _distribution(lengths.llm_tokens),
        "target_tokens": None if targets is None else _distribution(targets),
        "sound_units": None if lengths.sound_units is None else _distribution(lengths.sound_units),
    }


def _distribution(values: IntArray) -> dict[str, float]:
    """How a load is distributed over samples: zeros where there are none."""
    if len(values) == 0:
        return {"total": 0, "mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0}
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    total = int(values.sum(dtype=np.int64))
    return {"total": total, "mean": float(values.mean()), "p50": p50, "p99": p99, "max": int(values.max())}


def lengths_table(figures: Mapping[str, Any], vision_unit: str = "vision units") -> Table:
    """A section per source, and one for all where there are several; a row per load."""

    def cells(load: Mapping[str, float]) -> list[str]:
        forms = {"mean": ",.1f", "p50": ",.0f", "p99": ",.0f", "max": ",d"}
        return [format(load[name], form) for name, form in forms.items()]

    sources = figures["sources"]
    rows: list[Sequence[str]] = []
    for entry in [*sources, *([figures["all"]] if len(sources) > 1 else [])]:
        targets, sounds, videos = entry["target_tokens"], entry["sound_units"], entry["video_units"]
        of_videos = f"{entry['with_video'] / max(entry['samples'], 1):.1%} with video"
        rows += [
            (entry["name"], vision_unit, *cells(entry["vision_units"])),
            *([("", "sound units", *cells(sounds))] if sounds else []),
            (f"  {entry['samples']:,} samples", "LLM tokens", *cells(entry["llm_tokens"])),
            (
                f"  {entry['with_image'] / max(entry['samples'], 1):.1%} with image",
                *(["target tokens", *cells(targets)] if targets else []),
            ),
            *([(f"  {of_videos}", f"{vision_unit} of videos", *cells(videos))] if videos else []),
            (),
        ]
    return make_table(("source", "", "mean", "median", "99 %", "largest"), rows, words=2)
