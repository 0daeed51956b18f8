"""omnibal advise: where the devices' time goes today, and what would bring how much, before anybody changes a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    PictureOption,
    answer,
    check_picture,
    kind_of,
    read_cluster,
    working,
)
from omnibal.errors import ConfigError
from omnibal.workspace import devices_at_hand

if TYPE_CHECKING:
    from omnibal.advise.changes import Advice
    from omnibal.advise.question import Question
    from omnibal.report.layouts import LayoutReport

# Options, in the order of --help.
DataArgument = Annotated[
    list[Path],
    typer.Argument(
        help="An InternVL meta file or conversations, as docs/data.md lists them; lengths (a folder, or JSON "
        "lists); or a stream (webdataset's .tar shards; - for JSON lines on standard input).",
    ),
]
ModelOption = Annotated[str | None, typer.Option(help="A name (Qwen2.5-VL-7B), a Hugging Face folder or config.json.")]
TodayOption = Annotated[
    str,
    typer.Option(
        help="How you train: ddp, zero1, zero2, zero3, fsdp; or the file that says so (a ds_config, "
        "TrainingArguments, a YAML of LLaMA-Factory or ms-swift)."
    ),
]
BatchOption = Annotated[int | None, typer.Option(help="Samples of a micro-batch; by default --today's, or 1.", min=1)]
AccumulationOption = Annotated[int | None, typer.Option(help="Micro-batches of a step; --today's, or 8.", min=1)]
LoraOption = Annotated[bool | None, typer.Option("--lora/--no-lora", help="Train adapters of rank 16.")]
FrozenOption = Annotated[list[str] | None, typer.Option(help="Not trained (repeatable): vision, projector, language.")]
ImagesOption = Annotated[Path | None, typer.Option(help="Folder of the images; by default the data's own.")]
MaxImageOption = Annotated[int | None, typer.Option(help="Most tiles of an image, or pixels (native ViTs).", min=1)]
CostsOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Measured costs: a profile, or a run's metrics.jsonl, or a trainer's omnibal_calibration.json.",
    ),
]
LayoutsOption = Annotated[
    bool,
    typer.Option("--layouts", help="Weigh pipelines, tensor ranks, a spread encoder and units, too: takes a minute."),
]


def advise(
    data: DataArgument,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    today: TodayOption = "zero3",
    batch: BatchOption = None,
    accumulation: AccumulationOption = None,
    lora: LoraOption = None,
    frozen: FrozenOption = None,
    images: ImagesOption = None,
    max_image: MaxImageOption = None,
    costs: CostsOption = None,
    layouts: LayoutsOption = False,
    plot: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what balancing would bring you, before you change a line.

    Where the devices' time goes today; what settings of the trainer would bring (batches by length or of another size,
    less recomputation, another ZeRO stage), and what packing, balance and larger packs bring beyond these, at today's
    samples a step, and how sure that is; what fits into memory; the lines to paste. A thousand samples are measured;
    nothing runs, no torch is loaded. "Leave it as it is" is an answer.

    Example: omnibal advise train.jsonl --model Qwen2.5-VL-7B
    --cluster 8xA100-80GB --today zero3 --batch 2 --accumulation 8 --lora

    Example: omnibal advise data.json --today llamafactory.yaml --cluster 2x8xH100
    """
    from omnibal.advise.present import Present, read_today
    from omnibal.advise.question import LORA_RANK, Question
    from omnibal.profile.calibration import Calibration
    from omnibal.profile.records import ModelProfile
    from omnibal.report.advise import Report, draw

    check_picture("--plot", plot)
    # Options go before what --today's file says; None leaves a setting to the file.
    own = Present(
        batch=batch,
        accumulation=accumulation,
        frozen=tuple(frozen) if frozen else None,
        lora={True: LORA_RANK, False: 0, None: None}[lora],
    )
    machines = read_cluster(cluster) if cluster else devices_at_hand()
    if machines is None:
        raise ConfigError("--cluster must name the machines, such as 8xA100-80GB, got none and no CUDA device here")
    measured: ModelProfile | Calibration | None = None
    if costs is not None:
        measured = (ModelProfile if kind_of("--profile", costs) == "profile" else Calibration).load(costs)
    question = Question.read(
        data, machines, own.over(read_today(today)), model=model, images=images, max_image=max_image, costs=measured
    )
    report = Report(question, question.answer(must_fit=not layouts))
    weighed = _weigh(question, report.advice) if layouts else None
    if plot is not None:
        draw(report, plot)
    written = [f"written: {plot}"] if plot else []
    record = report.to_record() | ({} if weighed is None else {"layouts": weighed.to_record()}) | {"written": plot}
    table = [] if weighed is None else weighed.parts()
    answer(record, *report.lines(), *table, *report.to_paste(weighed), *written, as_json=as_json)


def _weigh(question: Question, advice: Advice) -> LayoutReport:
    from omnibal.advise.estimate import Way
    from omnibal.report.advise import BEST
    from omnibal.report.layouts import LayoutReport

    with working("weighing layouts") as said:
        found = question.layouts(said)
    today, settled = advice.today, advice.settled
    runs = today.peaks[1] <= today.memory.budget_bytes
    best = Way.of(BEST, settled) if settled is not today else None
    return LayoutReport(found, question.scenario, today.samples_per_second if runs else None, best)
