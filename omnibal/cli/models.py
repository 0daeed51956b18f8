"""omnibal demo, profile, check-packing, export and ask: a model to try, its costs, what it leaks, what it says."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LimitsOption,
    answer,
    check_file,
    check_new_folder,
    expect,
    open_workspace,
    read_cluster,
    read_limits,
    working,
)
from omnibal.config import read_config
from omnibal.config.section import ModelSection, OmnibalSection, RunFiles
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.families.base import vision_unit_of
from omnibal.profile.records import LayerCost, ModelProfile
from omnibal.report.style import MIB, Row, make_table, scaled, table_of
from omnibal.workspace import Overrides, Workspace


def demo(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")],
    samples: Annotated[int, typer.Option(help="Training samples.", min=20)] = 4000,
    held_out: Annotated[int, typer.Option(help="Samples to measure accuracy on.", min=20)] = 300,
    as_json: JsonOption = False,
) -> None:
    """Write pictures of coloured shapes, questions about them, and a small InternVL to learn them.

    The data has the form of real InternVL data: image files, JSONL conversations, and a meta file that names them.
    The model is a configuration, a tokenizer and a preprocessor; its weights are yours to train.

    Example: omnibal demo runs/quickstart/data
    """
    from omnibal.demo import majority_accuracy, write_demo

    check_new_folder("folder", folder)
    paths = write_demo(folder, samples=samples, held_out=held_out)
    chance = majority_accuracy(paths.train_annotations, paths.held_out_annotations)
    answer(
        {**asdict(paths), "chance": chance},
        f"data {paths.meta}, held out {paths.held_out_meta}, model {paths.model}",
        f"always the most frequent answer to a question is right for {chance:.1%} of the held-out ones",
        f"next: omnibal lengths {paths.meta} {folder / 'lengths'} --model {paths.model}",
        as_json=as_json,
    )


def profile(
    source: Annotated[
        Path, typer.Argument(help="A ds_config; or, without one, a Hugging Face folder (its config.json is enough).")
    ],
    out: Annotated[Path | None, typer.Argument(help="File to write; by default in the ds_config's run.output.")] = None,
    cluster: ClusterOption = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure on this machine's accelerator, or CPU where it has none; else costs are counted."
        ),
    ] = False,
    limits: LimitsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what each layer of a model costs: time, bytes sent, bytes kept.

    Measured, one layer of each kind at a quarter, a half and all of the pack size; or counted from operations and
    bytes for a device that you need not have. The costs are functions of what a pack holds; the table shows them for
    the full pack.

    Example: omnibal profile ds_configs/mine.json --measure

    Example: omnibal profile models/InternVL3-14B-hf profile.json --cluster a100
    """
    from omnibal.cli.planning import usual_limits  # with compiled loops, which no other verb here needs

    kind = expect("source", source, ("ds_config", "model"))
    check_file("out", out)
    fixed = read_limits(limits)
    if kind == "ds_config":
        workspace = open_workspace(source, cluster=cluster, measures=measure, replaces=out is None)
        out = out or workspace.section.run.files.profile
        check_file("out", out)
    elif out is None:
        raise ConfigError(f"out must name a file for the profile, got none; type omnibal profile {source} profile.json")
    elif measure == (cluster is not None):
        got = "both" if measure else "neither"
        raise ConfigError(f"costs must be counted for a --cluster or come from --measure, got {got}")
    else:
        # What a ds_config would say of a model's folder: all of it is trained, in bfloat16.
        config, section = {"bf16": {"enabled": True}}, OmnibalSection(model=ModelSection(path=str(source)))
        named = Overrides(cluster=None if cluster is None else read_cluster(cluster))
        workspace = Workspace(config, section, overrides=named, measures=measure, working=working)
    if measure:
        if fixed is None:
            usual = workspace.limits if kind == "ds_config" else PackLimits(*usual_limits(workspace.records))
            fixed = usual.vision_units, usual.llm_tokens
        made = workspace.make_profile(PackLimits(*fixed))
    else:
        made = workspace.profile
    out.parent.mkdir(parents=True, exist_ok=True)
    made.save(out)
    _say(made, fixed or usual_limits(made.layers), workspace.warnings, out, as_json=as_json)


def _say(made: ModelProfile, limits: tuple[int, int], notes: list[str], out: Path, *, as_json: bool) -> None:
    units, tokens = limits
    rows = _layer_rows(made, Load(units, tokens, tokens**2, units**2))
    record = {
        "profile": out,
        "hash": made.content_hash,
        "device": made.devices,
        "dtype": made.dtype,
        "pack": dict(zip(("vision units", "LLM tokens"), limits, strict=True)),
        "warnings": notes,
        "kinds": rows,
    }
    pack_of = f"{units:,} {vision_unit_of(made.layers)} and {tokens:,} LLM tokens"
    answer(
        record,
        f"a layer of each kind on {made.devices} ({made.dtype}), a pack of {pack_of}",
        _layer_table(rows),
        *(f"warning: {note}" for note in notes),
        f"written: {out} (hash {made.content_hash})",
        as_json=as_json,
    )


def _layer_rows(profile: ModelProfile, load: Load) -> list[dict[str, Any]]:
    """What layers cost for one micro-batch, as JSON values, a row for each run of equal layers.

    Figures are one layer's; ``share`` is that of all of them in the time of the model.
    """
    groups = ([*group] for _, group in groupby(profile.layers, key=lambda layer: replace(layer, name="")))
    runs = [(group[0], len(group)) for group in groups]
    total = sum(count * _seconds(layer, load) for layer, count in runs)
    return [
        {
            "kind": layer.kind,
            "layers": count,
            "forward_seconds": float(layer.forward_seconds(load)),
            "backward_seconds": float(layer.backward_seconds(load)),
            "weight_seconds": float(layer.weight_seconds(load)),
            "share": count * _seconds(layer, load) / total if total else 0.0,
            "output_bytes": float(layer.output_bytes(load)),
            "saved_bytes": {level: float(model(load)) for level, model in layer.saved_bytes.items()},
            "parameter_bytes": layer.parameter_bytes,
            "trainable": layer.trainable,
            "spread": layer.spread,
        }
        for layer, count in runs
    ]


def _seconds(layer: LayerCost, load: Load) -> float:
    return float((layer.forward_seconds + layer.backward_seconds + layer.weight_seconds)(load))


def _layer_table(rows: Sequence[Row]) -> Table:
    """Of one layer of each kind: milliseconds, and MiB that it sends, keeps at each recompute level, holds in weights.

    ``of all`` is the share of the model's time that all layers of the kind take.
    """

    def kept(level: str) -> Callable[[Row], str]:
        return lambda row: _mebi(row["saved_bytes"].get(level))

    levels = dict.fromkeys(level for row in rows for level in row["saved_bytes"])
    spread = [("spread", "{spread:.1%}")] if any(row["spread"] for row in rows) else []
    return table_of(
        rows,
        [
            ("kind", lambda row: row["kind"] + "\n(frozen)" * (not row["trainable"])),
            ("layers", "{layers}"),
            ("forward\nms", scaled("forward_seconds", 1e-3, ",.3g")),
            ("back-\nward", lambda row: f"{1e3 * (row['backward_seconds'] + row['weight_seconds']):,.3g}"),
            ("of all", "{share:.0%}"),
            *spread,
            ("sends\nMiB", lambda row: _mebi(row["output_bytes"])),
            *((f"keeps\n{level}", kept(level)) for level in levels),
            ("weights\nMiB", lambda row: _mebi(row["parameter_bytes"])),
        ],
    )


def _mebi(size: float | None) -> str:
    if size is None:
        return "–"
    return f"{size / MIB:,.0f}" if size >= 10 * MIB else f"{size / MIB:.1f}"


def check_packing(
    folder: Annotated[Path, typer.Argument(help="A model's Hugging Face folder; its configuration is enough.")],
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="Check the folder's own weights, whole; by default a small model with random ones."
        ),
    ] = False,
    attention: Annotated[
        str | None,
        typer.Option(help="transformers' attention, such as sdpa, eager or flash_attention_2; by default the model's."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, …")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Check whether samples in a pack change each other, and name the layers that let them.

    Packs are rows of samples with positions that restart, no mask and no cache. Logits, gradients and what every layer
    computes are compared with each sample alone. Ends with 1 where packs leak. In Python, omnibal.check_packing does so
    for your own collator.

    Example: omnibal check-packing Qwen3.5-4B

    Example: omnibal check-packing InternVL3-8B-hf --weights --device cuda --attention flash_attention_2
    """
    expect("folder", folder, frozenset({"model"}))
    # Imported once the arguments are right: torch and transformers take seconds.
    from omnibal.packs.proof import check_packing as check
    from omnibal.vlm import usable_device

    target = usable_device(device)
    with working("making the model"):
        model = _made_model(folder, weights=weights, attention=attention).to(target)

    with working("comparing packs with samples alone"):
        found = check(model)
    rows = [(leak.module, leak.class_name, leak.kind, f"{leak.error:.1%}") for leak in found.leaks]
    table = [make_table(("module", "class", "what leaks", "changes by"), rows)] if rows else []
    record = asdict(found) | {"leaks": [leak._asdict() for leak in found.leaks]}
    record |= {"is_exact": found.is_exact, "remedies": found.remedies}
    answer(record, f"{folder}: {found.summary}", *table, *found.remedies, as_json=as_json)
    if not found.is_exact:
        raise typer.Exit(1)


def _made_model(folder: Path, *, weights: bool, attention: str | None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from omnibal.packs.proof import small_config

    config = AutoConfig.from_pretrained(folder)
    options = {} if attention is None else {"attn_implementation": attention}
    kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    try:
        if weights:
            return kind.from_pretrained(folder, **options)
        torch.manual_seed(0)
        return kind.from_config(small_config(config), **options).float()
    except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
        remedy = "" if weights else "; --weights checks the whole model"
        raise ConfigError(
            f"folder must hold a model that transformers can make, got {folder}: {error}{remedy}"
        ) from None


def export(
    source: Annotated[
        Path, typer.Argument(help="A ds_config or a folder of checkpoints, for the newest one; or one checkpoint.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="Where the model goes; by default in the ds_config's run.output.")
    ] = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Add LoRA adapters to the weights of their model, and write the whole of it."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as an ordinary Hugging Face folder.

    Config, weights, tokenizer and preprocessor: what AutoModelForImageTextToText.from_pretrained loads. Of LoRA
    adapters, what PeftModel.from_pretrained loads onto the original model. Layers are read one at a time; no GPU and
    no second process is needed.

    Example: omnibal export ds_configs/mine.json my-model

    Example: omnibal export runs/quickstart/checkpoints/global_step300 model
    """
    from omnibal.engine.checkpoint import export as export_checkpoint
    from omnibal.engine.checkpoint import latest_checkpoint

    kind = expect("source", source, ("ds_config", "checkpoints", "checkpoint", "run"))
    if folder is not None:
        check_new_folder("folder", folder)
    elif merged or kind != "ds_config":
        reason = "--merged writes the whole model" if merged else f"{source} is no ds_config"
        raise ConfigError(f"folder must say where the model goes, got none: {reason}")
    # A run's folder keeps its checkpoints in a folder of their own; in a folder of checkpoints the newest one counts.
    files = read_config(source)[1].run.files if kind == "ds_config" else RunFiles(source)
    folders = {"ds_config": files.checkpoints, "run": files.checkpoints, "checkpoints": source}
    checkpoint = latest_checkpoint(folders[kind]) if kind in folders else source
    if folder is None:
        folder = _newest_model(files)
    else:
        export_checkpoint(checkpoint, folder, merged=merged)
    answer({"checkpoint": checkpoint, "model": folder}, f"{checkpoint} → {folder}", as_json=as_json)


def _newest_model(files: RunFiles) -> Path:
    from omnibal.engine.checkpoint import export_newest

    with working("exporting the newest checkpoint"):
        return export_newest(files)


def ask(
    source: Annotated[Path, typer.Argument(help="A ds_config, for its newest checkpoint; or a Hugging Face folder.")],
    question: Annotated[str, typer.Argument(help="What to ask.")] = "",
    image: Annotated[list[Path] | None, typer.Option(help="An image of the question; repeatable.")] = None,
    meta: Annotated[
        Path | None,
        typer.Option(
            help="Data to take questions, images and right answers from; by default, where no question is given, the "
            "ds_config's held-out data."
        ),
    ] = None,
    count: Annotated[int, typer.Option(help="How many questions to take from data.", min=1)] = 5,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, …")] = "cpu",
    picture: Annotated[
        Path | None, typer.Option(help="Draw the images with questions and answers into this PNG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer.")] = False,
) -> None:
    """Ask a model about images, or about data it has not seen.

    The model is loaded by transformers alone, as anybody else would load it.

    Example: omnibal ask ds_configs/quickstart.json --count 6

    Example: omnibal ask my-model "What colour is the ring?" --image photo.png
    """
    section = None
    if expect("source", source, ("ds_config", "model")) == "ds_config":
        section = read_config(source)[1]
        if not question and meta is None and section.data.held_out is not None:
            meta = Path(section.data.held_out)
    if bool(question) == (meta is not None):
        got = "both" if question else 'neither; type omnibal ask MODEL "What is this?" --image photo.png'
        raise ConfigError(f"ask must get a question or --meta, got {got}")
    # Imported once the arguments are right: torch and transformers take seconds.
    from omnibal.formats.media import named
    from omnibal.vlm import Answerer

    model = source if section is None else _newest_model(section.run.files)
    asked = [(question, tuple(image or ()), None)] if meta is None else list(_questions(meta, count))
    answerer = Answerer(model, device=device)
    answers = [(*entry, answerer.answer(entry[0], entry[1])) for entry in asked]
    if picture is not None:
        from omnibal.formats.media import load_image
        from omnibal.report.training import plot_answers

        plot_answers(
            [(_words(text), [*map(load_image, images)], said, right) for text, images, right, said in answers], picture
        )
    if as_json:
        for text, images, right, said in answers:
            typer.echo(json.dumps({"question": text, "images": [*map(named, images)], "right": right, "answer": said}))
        return
    rows = (
        (_words(text), " ".join(Path(named(image)).name for image in images), said, right or "")
        for text, images, right, said in answers
    )
    table = make_table(("question", "images", "answer", "right answer"), rows, words=4)
    Console(markup=False).print(f"{model} answers", table)  # an answer may hold [/INST]


def _words(question: str) -> str:
    return question.replace("<image>", "").strip()


def _questions(meta: Path, count: int) -> Iterator[tuple[str, tuple[Path | bytes, ...], str]]:
    """The first exchange of ``count`` samples, spread evenly over the data."""
    from omnibal.formats.shards import open_shards

    shards = open_shards(meta)
    entries = [(shard, item) for shard in shards for item in range(len(shard.rows))]
    for number in range(min(count, len(entries))):
        shard, item = entries[number * len(entries) // min(count, len(entries))]
        # Only the pictures of the first question go with it: marks stand in the order of the pictures.
        conversation = shard.conversation(item)
        turns = [turn for turn in conversation.turns if turn.role != "system"]
        marks = turns[0].text.count("<image>")
        yield turns[0].text, conversation.images[:marks], turns[1].text
