"""omnibal lengths: what every sample of a dataset brings to the ViT and to the LLM, and how the samples pack."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import numpy as np
import typer
from rich.table import Table

from omnibal.cli.options import (
    JsonOption,
    LimitsOption,
    answer,
    check_folder,
    expect,
    open_workspace,
    read_lengths,
    read_limits,
    refuse,
)
from omnibal.config.section import DataSection, ModelSection, OmnibalSection, PackingSection
from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.lengths import IMAGE, VIDEO, IntArray, SampleLengths
from omnibal.data.limit_search import find_trap
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.data.metrics import PackingFigures, measure_packing
from omnibal.data.packing_spec import Method, Oversized
from omnibal.errors import ConfigError
from omnibal.families.base import vision_unit_of
from omnibal.report.style import make_table
from omnibal.workspace import FoundLengths, Workspace

BROKEN_FILE, SHOWN_PROBLEMS = "broken.json", 10
LOADS = ("vision_units", "llm_tokens", "target_tokens")
REPLICAS: Final = 8  # if neither the command line nor a cluster says how many
# Samples packed before the clock starts: compiled code is compiled once and then cached.
SAMPLES_TO_COMPILE: Final = 64
FATES: Final[dict[Oversized, str]] = {"alone": "each has a pack of its own", "drop": "they are left out", "error": ""}

# Options, in the order of --help.
SourceArgument = Annotated[
    Path,
    typer.Argument(
        help="A ds_config; or, without one, an InternVL meta file or conversations, as docs/data.md lists them "
        '(with --model), a folder of lengths, or a JSON list of {"vit_num", "token_num"}.',
    ),
]
OutArgument = Annotated[Path | None, typer.Argument(help="Folder for the lengths; by default in run.output.")]
ModelOption = Annotated[Path | None, typer.Option(help="The model's Hugging Face folder.")]
ImagesOption = Annotated[Path | None, typer.Option(help="Folder of the images; by default the annotations' own.")]
TilesOption = Annotated[int | None, typer.Option(help="Most tiles of an image; by default the model's.", min=1)]
BrokenOption = Annotated[
    Literal["error", "skip"] | None, typer.Option(help="Report all samples that cannot be read, or leave them out.")
]
SamplesOption = Annotated[
    str | None, typer.Option(help="Show samples by the numbers that messages of training name, such as 4,17.")
]
ReplicasOption = Annotated[int | None, typer.Option(help="Data-parallel ranks; by default the cluster's, or 8.", min=1)]
MicroBatchesOption = Annotated[
    int | None, typer.Option(help="Packs of a rank and step; by default the ds_config's, or 1.", min=1)
]
CompareOption = Annotated[bool, typer.Option("--compare", help="Show all methods of packing side by side.")]


def lengths(
    source: SourceArgument,
    out: OutArgument = None,
    model: ModelOption = None,
    images: ImagesOption = None,
    max_tiles: TilesOption = None,
    broken: BrokenOption = None,
    samples: SamplesOption = None,
    limits: LimitsOption = None,
    num_replicas: ReplicasOption = None,
    micro_batches: MicroBatchesOption = None,
    compare: CompareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure all samples of a dataset, save their lengths, show what they are like and how they pack.

    Headers say how many tiles images make; files are decoded only to find broken ones. The training of a ds_config
    measures nothing again. Of packs: the fewest possible; how long ranks wait for the slowest one in the ViT and in
    the LLM (Dist Ratio); how random steps are; the largest packs.

    Example: omnibal lengths ds_configs/mine.json

    Example: omnibal lengths ds_configs/mine.json --samples 4,17

    Example: omnibal lengths data/train.json runs/lengths --model models/InternVL3-1B-hf --images data/images

    Example: omnibal lengths runs/lengths --num-replicas 16 --limits 40,12288 --compare
    """
    kind = expect("source", source, ("ds_config", "dataset", "token lengths", "saved lengths"))
    fixed, of_data = read_limits(limits), {"model": model, "images": images, "max-tiles": max_tiles}
    if samples is not None and kind != "ds_config":
        raise ConfigError(f"source must be the run's ds_config to show --samples, got {source}")
    workspace = open_workspace(source) if kind == "ds_config" else None
    out = workspace.section.run.files.lengths if workspace is not None and out is None else out
    check_folder("out", out)
    if workspace is not None:
        refuse(of_data, "a ds_config names data and model")
        if broken is not None:
            data = workspace.section.data.model_copy(update={"broken": broken})
            workspace.section = workspace.section.model_copy(update={"data": data})
        if not workspace.section.data.train:
            raise ConfigError(f"omnibal.data.train must name the data, got none in {source}")
        if samples is not None:
            _show(workspace, samples, as_json=as_json)
            return
        found, knows = workspace.found_lengths, workspace.section.model.path is not None
        unit = vision_unit_of(workspace.records) if knows else found.lengths.vision_unit
    elif kind == "dataset":
        folder = None if images is None else str(images)
        data = DataSection(train=str(source), images=folder, max_tiles=max_tiles, broken=broken or "error")
        found, unit = _measured(data, model, out)
    else:
        refuse(of_data, f"{source} holds lengths")
        found = read_lengths([source], "source")
        unit = found.lengths.vision_unit
    if out is not None:
        found.lengths.save(out)
        (out / BROKEN_FILE).write_text(json.dumps(list(map(asdict, found.problems)), indent=2, default=str) + "\n")
    task = _packing_of(workspace, found.lengths, fixed, (num_replicas, micro_batches), unit)
    _answer(task, found, out, compare=compare, as_json=as_json)


def _measured(data: DataSection, model: Path | None, out: Path | None) -> tuple[FoundLengths, str]:
    """Lengths and vision unit, as a ds_config with this data and model would say them."""
    remedy = f"omnibal lengths {data.train} {out or 'runs/lengths'} --model {model or 'MODEL_FOLDER'}"
    if out is None:
        raise ConfigError(f"out must name a folder for the lengths, got none; type {remedy}")
    if model is None:
        raise ConfigError(f"--model must name the model's folder, got nothing; type {remedy}")
    measured = Workspace({}, OmnibalSection(model=ModelSection(path=str(model)), data=data))
    return measured.measured_lengths(out), vision_unit_of(measured.records)


def _show(workspace: Workspace, numbers: str, *, as_json: bool) -> None:
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


def _answer(task: "_PackingTask", found: FoundLengths, folder: Path | None, *, compare: bool, as_json: bool) -> None:
    packed = [task.run(name) for name in (get_args(Method) if compare else (task.packing.method,))]
    figures, trap = statistics_of(found.lengths), find_trap(task.lengths, task.limits)
    warnings = [] if trap is None else [trap]
    broken = [f"  {problem}" for problem in found.problems[:SHOWN_PROBLEMS]]
    if broken:
        broken.insert(0, f"{len(found.problems)} items cannot be used and are left out:")
        broken += [] if folder is None else [f"all of them: {folder / BROKEN_FILE}"]
    record = {"folder": folder, "content_hash": found.lengths.content_hash, **figures}
    record |= {"broken": [asdict(problem) for problem in found.problems]}
    methods = [entry.to_record() for entry in packed]
    answer(
        record | {"packs": task.to_record() | {"methods": methods, "warnings": warnings}},
        lengths_table(figures, task.vision_unit),
        *broken,
        task.title,
        packing_table(packed, task.num_replicas, task.vision_unit),
        *packing_notes(task.num_replicas),
        *(f"warning: {warning}" for warning in warnings),
        *([] if folder is None else [f"written: {folder}"]),
        as_json=as_json,
    )


def _packing_of(
    workspace: Workspace | None,
    lengths: SampleLengths,
    limits: tuple[int, int] | None,
    ranks: tuple[int | None, int | None],
    vision_unit: str,
) -> "_PackingTask":
    """How samples are packed: as the command line says, else as a ds_config, or the plan that its training follows."""
    packing = PackingSection() if workspace is None else workspace.section.packing
    num_replicas, micro_batches = ranks
    plan = None if workspace is None else workspace.named_plan
    if limits is None and plan is not None:
        chosen = plan.limits
    else:
        chosen = choose_limits(lengths, *(limits or (packing.vision_units, packing.llm_tokens)))
    return _PackingTask(
        lengths,
        chosen,
        num_replicas or _replicas(workspace),
        micro_batches or (1 if workspace is None else workspace.micro_batches),
        packing,
        vision_unit,
    )


def _replicas(workspace: Workspace | None) -> int:
    try:
        return REPLICAS if workspace is None or not workspace.known_cluster else workspace.layout().num_replicas
    except ConfigError:  # no layout, or a model that cannot be planned; `omnibal plan` says which
        return REPLICAS


@dataclass(frozen=True)
class _PackingTask:
    lengths: SampleLengths
    limits: PackLimits
    num_replicas: int
    micro_batches: int
    packing: PackingSection
    vision_unit: str

    def run(self, method: Method) -> PackingFigures:
        # A few samples first: the seconds that are shown are of packing, not of compiling. Under "alone" an oversized
        # one among these raises nothing.
        first = self.lengths.take(np.arange(min(len(self.lengths), SAMPLES_TO_COMPILE)))
        alone = self.packing.model_copy(update={"oversized": "alone"})
        _compiled = replace(self, lengths=first, packing=alone).arrange(method).packs
        started = time.perf_counter()
        epoch = self.arrange(method)
        packs = epoch.packs
        return measure_packing(
            method,
            self.lengths,
            self.limits,
            packs,
            epoch.steps,
            seconds=time.perf_counter() - started,
            left_out=self.num_oversized if self.packing.oversized == "drop" else 0,
        )

    def arrange(self, method: Method) -> Epoch:
        options = self.packing.model_copy(update={"method": method}).options
        shape = {"num_replicas": self.num_replicas, "micro_batches": self.micro_batches}
        return arrange_epoch(self.lengths, self.limits, **shape, **options)

    @property
    def num_oversized(self) -> int:
        return len(self.limits.oversized(self.lengths))

    @property
    def title(self) -> str:
        task = (
            f"{len(self.lengths):,} samples, limits {self.limits.vision_units:,} {self.vision_unit} and "
            f"{self.limits.llm_tokens:,} LLM tokens, {self.num_replicas} ranks × {self.micro_batches} micro-batches"
        )
        if not self.num_oversized:
            return task
        return f"{task}\n{self.num_oversized:,} samples exceed a limit on their own: {FATES[self.packing.oversized]}"

    def to_record(self) -> dict[str, Any]:
        return {
            "samples": len(self.lengths),
            "limits": self.limits.record(),
            "num_replicas": self.num_replicas,
            "micro_batches": self.micro_batches,
            "seed": self.packing.seed,
            "exchange_steps": self.packing.exchange_steps,
            "oversized": {"policy": self.packing.oversized, "samples": self.num_oversized},
        }


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
    ("Dist Ratio, cost, at least", "{0.dist_ratio_least:.4f}"),
    ("χ² of steps (1: shuffled)", "{0.randomness:.2f}"),
    None,
    ("largest, {vision_unit}", "{0.largest[vision_units]:,}"),
    ("largest, LLM tokens", "{0.largest[llm_tokens]:,}"),
    None,
    ("lost, repeated, over limit", "{0.lost}, {0.repeated}, {0.over_limit}"),
    ("seconds", "{0.seconds:.2f}"),
    None,
)


def packing_table(figures: Sequence[PackingFigures], num_replicas: int = 2, vision_unit: str = "vision units") -> Table:
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
        notes.append("at least: what the costliest samples force, whoever gets the others")
    notes.append("χ² of steps: how unlike the mixes of sources (else lengths) are, a degree of freedom")
    return notes
