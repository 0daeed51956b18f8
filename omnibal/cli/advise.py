"""omnibal advise: where the devices' time goes today, and what would bring how much, before anybody changes a line."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import numpy as np
import typer
from rich.console import Console

from omnibal.cli.costs import devices_at_hand, read_cluster
from omnibal.cli.files import check_file
from omnibal.cli.options import ClusterOption, JsonOption
from omnibal.errors import ConfigError, DataError, said

if TYPE_CHECKING:
    from omnibal.advise.models import Model
    from omnibal.advise.present import Present
    from omnibal.data.lengths import SampleLengths

LORA_RANK: Final = 16
"""Of adapters where nothing else is said."""
PICTURES: Final = (".png", ".html")
FIXED_TOKENS: Final = ("internvl", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose vision units bring so many tokens each."""


def advise(
    data: Annotated[
        Path,
        typer.Argument(
            help="Annotations (InternVL's meta file, LLaVA, ShareGPT, Qwen, ms-swift; JSON or JSON lines), a folder "
            "of Hugging Face datasets, or lengths (a folder, or a JSON list).",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="A known name (Qwen2.5-VL-7B), a Hugging Face folder, or a config.json.", show_default=False),
    ] = None,
    cluster: ClusterOption = None,
    today: Annotated[
        str,
        typer.Option(
            help="How you train: ddp, zero1, zero2, zero3, fsdp; or the file that says so (a ds_config, "
            "TrainingArguments, a YAML of LLaMA-Factory or ms-swift)."
        ),
    ] = "zero3",
    batch: Annotated[
        int | None, typer.Option(help="Samples of a device's micro-batch; 1.", min=1, show_default=False)
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Micro-batches of a device's step; 8.", min=1, show_default=False)
    ] = None,
    batching: Annotated[
        Literal["random", "group_by_length", "flattened", "packed"] | None,
        typer.Option(help="What shares a micro-batch; random samples, padded.", show_default=False),
    ] = None,
    cutoff: Annotated[
        int | None,
        typer.Option(help="Tokens that a sample is cut at, or that a pack holds.", min=1, show_default=False),
    ] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--no-lora", help="Train adapters of rank 16.")] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option(help="What is not trained (repeatable): vision, projector, language.", show_default=False),
    ] = None,
    recompute: Annotated[
        bool | None, typer.Option("--recompute/--no-recompute", help="Gradient checkpointing; on.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="What the paths of images are relative to; the data's folder.")
    ] = None,
    max_image: Annotated[
        int | None,
        typer.Option(help="Most tiles of an image, or most pixels at native resolution.", min=1, show_default=False),
    ] = None,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Plan a pipeline too: takes a minute.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a picture (a PNG) or write a page (HTML).", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what balancing would bring you, before you change a line.

    Where the devices' time goes today; what packing, balance, larger packs,
    less recomputation or another ZeRO stage would each bring on top of the
    one before, and how sure that is; what fits into memory; the lines to
    paste. A thousand samples are measured; nothing runs, no torch is loaded.
    "Leave it as it is" is an answer.

    Example: omnibal advise train.jsonl --model Qwen2.5-VL-7B
    --cluster 8xA100-80GB --today zero3 --batch 2 --accumulation 8 --lora

    Example: omnibal advise data.json --today llamafactory.yaml
    --cluster 2x8xH100
    """
    from omnibal.advise.changes import advise as advised
    from omnibal.advise.present import Present
    from omnibal.report.advise import Report, draw, write_advice_page

    _check_plot(plot)
    own = Present(
        batch=batch, accumulation=accumulation, batching=batching, cutoff=cutoff, recompute=recompute,
        frozen=tuple(frozen) if frozen else None, lora={True: LORA_RANK, False: 0, None: None}[lora],
    )  # fmt: skip
    present = own.over(_present(today))
    known = _model(model or present.model, max_image or present.max_pixels)
    machines = read_cluster(cluster) if cluster else devices_at_hand()
    if machines is None:
        raise ConfigError("--cluster must name the machines, such as 8xA100-80GB, got none and no CUDA device here")
    measured = _measure(data, known, images, present)
    setting, way = _setting(measured.lengths, known.model, machines, present)
    report = Report(
        advised(setting, way, with_pipeline=pipeline), known.model.name, machines, present, measured.said,
        str(data), setting.lengths,
    )  # fmt: skip
    if plot is not None:
        (draw if plot.suffix == ".png" else write_advice_page)(report, plot)
    if as_json:
        typer.echo(json.dumps(report.to_record() | {"written": plot}, indent=2, default=str))
        return
    console = Console()
    for line in [*report.lines(), *([f"written: {plot}"] if plot else [])]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Known:
    model: "Model"
    folder: Path | None
    max_image: int | None

    @property
    def options(self) -> dict[str, int]:
        """Of the image rule."""
        from omnibal.families import family_of

        if self.max_image is None:
            return {}
        has_tiles = family_of(self.model.config).tile_limits is not None
        return {"max_tiles" if has_tiles else "max_pixels": self.max_image}


@dataclass(frozen=True)
class _Measured:
    lengths: "SampleLengths"
    said: str


def _check_plot(plot: Path | None) -> None:
    check_file("--plot", plot)
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot must end in {' or '.join(PICTURES)}, got {plot}")


def _present(today: str) -> "Present":
    from omnibal.advise.present import Present, read_present
    from omnibal.advise.wait import MEETINGS

    if today in MEETINGS:
        return Present(trainer=cast(Any, today), said={"--today": today})
    path = Path(today)
    if not path.is_file():
        raise ConfigError(f"--today must be one of {', '.join(MEETINGS)}, or a file, got {today!r}")
    return read_present(_content(path), lambda name: _content(_beside(path, name)))


def _beside(path: Path, name: str) -> Path:
    """A file that another one names: relative to where it lies, or to where the command runs."""
    near = path.parent / name
    return near if near.is_file() else Path(name)


def _content(path: Path) -> dict[str, Any]:
    """The object in a JSON or YAML file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--today must name readable files, got {path}: {said(error)}") from error
    try:
        content = _yaml(path).safe_load(text) if path.suffix.lower() in (".yaml", ".yml") else json.loads(text)
    except Exception as error:  # PyYAML's errors are of no kind that could be named without it
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--today must be JSON or YAML, got {path}: {said(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--today must hold an object, got {path} with a {type(content).__name__}")
    return content


def _yaml(path: Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError(f"PyYAML must be installed to read {path}, got none; run pip install pyyaml") from error
    return yaml


def _model(named: str | None, max_image: int | None) -> _Known:
    from omnibal.advise.models import Model
    from omnibal.records import read_json

    if named is None:
        raise ConfigError("--model must name the model, got none; give a known name, a folder or a config.json")
    path = Path(named)
    if not path.exists():
        return _Known(Model.known(named), None, max_image)
    folder = path if path.is_dir() else path.parent
    config = folder / "config.json" if path.is_dir() else path
    beside = next((folder / name for name in PREPROCESSORS if (folder / name).is_file()), None)
    preprocessor = None if beside is None else read_json(beside, "the preprocessor's configuration")
    if isinstance(preprocessor, dict):
        preprocessor = preprocessor.get("image_processor", preprocessor)
    model = Model.of(folder.name, read_json(config, "--model"), preprocessor)
    return _Known(model, folder, max_image)


PREPROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")


def _measure(data: Path, known: _Known, images: Path | None, present: "Present") -> _Measured:
    """Lengths of the data, and in words where they come from."""
    from omnibal.data.lengths import SampleLengths

    if not data.exists():
        raise DataError(f"data must be a file or a folder, got {data}, which does not exist")
    if _holds_lengths(data):
        from omnibal.cli.inputs import read_lengths

        lengths = read_lengths([data], "data").lengths
        _check_tokens(lengths, known.model)
        text = f"{len(lengths):,} samples of measured lengths"
    else:
        from omnibal.data.sources.drawn import ESTIMATE_ERROR, draw_lengths

        count, counter = _counter(known.folder)
        drawn = draw_lengths(data, known.model.image_rule(**known.options), image_folder=images, count_tokens=count)
        lengths, unusable = drawn.lengths, len(drawn.problems)
        text = f"{len(lengths):,} of {drawn.num_samples:,} samples measured"
        if counter is None:
            share = ESTIMATE_ERROR * drawn.text_tokens / max(float(lengths.llm_tokens.mean()), 1)
            text += f"; tokens of text estimated (±{ESTIMATE_ERROR:.0%}, ±{share:.0%} of all), for want of a tokenizer"
        if unusable:
            text += f"; {unusable} could not be read, the first: {drawn.problems[0]}"
    if present.mixture is not None:
        from omnibal.data.mixing import typical_lengths

        lengths = typical_lengths(lengths, present.mixture)
        text += "; drawn with the mixture's first shares"
    if known.model.config["model_type"].startswith("qwen") and lengths.vision_squared is None:
        squared = np.asarray(lengths.vision_units, dtype=np.int64) ** 2
        lengths = SampleLengths(**{**lengths.columns(), "vision_squared": squared})
        text += "; each taken to have one image"
    if present.cutoff is not None and present.batching != "packed":
        over = lengths.llm_tokens > present.cutoff
        cut = np.minimum(lengths.llm_tokens, present.cutoff)
        lengths = SampleLengths(**{**lengths.columns(), "llm_tokens": cut})
        text += f"; {over.mean():.1%} are cut at {present.cutoff:,} tokens" if over.any() else ""
    return _Measured(lengths, text)


def _holds_lengths(data: Path) -> bool:
    if data.is_dir():
        return (data / "lengths.json").is_file()
    with data.open("rb") as file:
        return b'"vit_num"' in file.read(1 << 12)


def _counter(folder: Path | None) -> tuple[Callable[[str], int], str | None]:
    """How many tokens a text has: by the folder's tokenizer where it can be run, else about."""
    from omnibal.data.sources.drawn import estimated_tokens

    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return estimated_tokens, None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return estimated_tokens, None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), str(file)


def _check_tokens(lengths: "SampleLengths", model: "Model") -> None:
    """Refuse lengths whose image tokens cannot be the model's.

    Raises:
        DataError: A sample has fewer tokens than its images bring, or no whole number of them.
    """
    if model.config["model_type"] not in FIXED_TOKENS:
        return
    projector = next(record.sizes for record in model.records if record.kind == "projector")
    group = projector.get("units_per_token", 1)
    least = lengths.vision_units.astype(np.int64) * projector.get("image_tokens_per_tile", 1) // group
    wrong = (lengths.llm_tokens < least) | (lengths.vision_units % group != 0)
    if wrong.any():
        first = int(np.argmax(wrong))
        rule = f"{group} patches for each image token" if group > 1 else f"{least.max() // lengths.vision_units.max()}"
        rule = rule if group > 1 else f"{rule} LLM tokens for each tile"
        raise DataError(
            f"lengths must be of {model.name}, with {rule}, got sample {first} of "
            f"{lengths.vision_units[first]} vision units and {lengths.llm_tokens[first]} tokens "
            f"({int(wrong.sum())} such samples); they are of another model or tokenizer"
        )


def _setting(lengths: "SampleLengths", model: "Model", machines: Any, present: "Present") -> tuple[Any, Any]:
    """What stays, and the present way."""
    from omnibal.advise.costs import adapted_profile
    from omnibal.advise.estimate import Setting, Way
    from omnibal.data.limits import MOST, PackLimits
    from omnibal.profile.counted import analytic_profile

    frozen = present.frozen or ()
    if present.lora:
        profile = adapted_profile(model.records, machines.device, rank=present.lora)
    else:
        profile = analytic_profile(model.records, machines.device, frozen=frozen)
    batching = present.batching or "random"
    if batching == "packed" and present.cutoff is None:
        raise ConfigError("--cutoff must say how many tokens a pack holds, got none")
    way = Way(
        present.trainer or "ddp", batching, present.batch or 1, present.accumulation or 8,
        "none" if present.recompute is False else "full",
        PackLimits(MOST, cast(int, present.cutoff)) if batching == "packed" else None,
    )  # fmt: skip
    per_step = machines.num_devices * way.micro_batches * way.batch
    if batching == "packed":  # as many as its packs hold
        mean = max(float(lengths.llm_tokens.mean()), 1.0)
        per_step = max(round(machines.num_devices * way.micro_batches * cast(int, present.cutoff) / mean), 1)
    return Setting(lengths, profile, machines, per_step), way
