"""What verbs share of a command line: options, what their paths hold, the workspace that these make, and answers.

Answers go to stdout, as tables for people or as JSON for programs; what a command says beside them goes to stderr.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from omnibal.cluster import Cluster
from omnibal.config import check_apart_from_layout
from omnibal.config.section import OmnibalSection, RunFiles
from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError
from omnibal.formats.files import KINDS, is_dataset
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile
from omnibal.records import parse_json, parse_relaxed, read_json
from omnibal.report.style import print_parts
from omnibal.workspace import FoundLengths, Overrides, Say, Workspace

MOST_DIGITS: Final = 20

ClusterOption = Annotated[
    str | None,
    typer.Option(help="The machines, such as 4x8xA100-80GB, or a JSON file; by default the ds_config's or these GPUs."),
]
LengthsOption = Annotated[list[Path] | None, typer.Option(help="Lengths in place of the data: a folder or JSON lists.")]
ProfileOption = Annotated[Path | None, typer.Option(help="A file of layers' costs, in place of kept or counted ones.")]
LimitsOption = Annotated[str | None, typer.Option(help="Most vision units and LLM tokens of a pack, such as 16,4096.")]
PictureOption = Annotated[Path | None, typer.Option(help="Draw a picture, into this PNG.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def read_limits(text: str | None) -> tuple[int, int] | None:
    """Vision units and LLM tokens of ``--limits``.

    >>> read_limits("16,4096")
    (16, 4096)
    """
    if text is None:
        return None
    words = text.replace(",", " ").split()
    if len(words) != 2 or not all(word.isdecimal() and len(word) < MOST_DIGITS for word in words):
        raise ConfigError(f"--limits must be vision units and LLM tokens such as 16,4096, got {text!r}")
    return int(words[0]), int(words[1])


def read_cluster(text: str) -> Cluster:
    if text.endswith(".json"):
        return Cluster.of(read_json(text, "--cluster"))
    if not text.lstrip().startswith("{"):
        return Cluster.parse(text)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--cluster must be JSON where it begins with a brace, got {text!r}: {error}") from error
    return Cluster.of(record)


def refuse(options: Mapping[str, object], reason: str) -> None:
    """Refuse options that say what something else says."""
    for name, value in options.items():
        if value:
            raise ConfigError(f"--{name} must be left out here, got {value}: {reason}")


# Paths are checked before a command computes anything: hours of work shall not end at a folder that cannot be written.


def check_folder(name: str, folder: Path | None) -> None:
    """Refuse a folder that cannot be made or written into; makes nothing."""
    if folder is None:
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{name} must be a folder, got {folder}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} must be a folder that can be written to, got {folder}: {there} is read-only")


def check_file(name: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{name} must be a file, got the folder {path}")
    check_folder(f"the folder of {name}", path.parent)


def check_new_folder(name: str, folder: Path) -> None:
    check_folder(name, folder)
    held = next(folder.iterdir(), None) if folder.exists() else None
    if held is not None:
        raise ConfigError(f"{name} must be empty or not exist yet, got {folder} with {held.name} in it")


def check_picture(name: str, path: Path | None) -> None:
    check_file(name, path)
    if path is not None and path.suffix.lower() != ".png":
        raise ConfigError(f"{name} must be a PNG, whose name ends in .png, got {path}")


def say(*lines: str) -> None:
    for line in lines:
        Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def working(doing: str) -> Iterator[Say]:
    """Show on stderr what takes long while it does; what is yielded changes the words."""
    with Console(stderr=True).status(doing) as status:
        yield status.update


def answer(record: Any, *parts: str | Table, as_json: bool) -> None:
    """Print a record as JSON, or its parts."""
    if as_json:
        typer.echo(json.dumps(record, indent=2, default=str))
        return
    print_parts(Console(markup=False), *parts)  # also of cells: what users call things may look like tags


Kind = Literal[
    "ds_config", "plan", "profile", "token lengths", "saved lengths", "dataset", "model", "checkpoint", "checkpoints",
    "run", "something else",
]  # fmt: skip

NAMES: Final[Mapping[Kind, str]] = {
    "ds_config": "a ds_config",
    "plan": "a plan",
    "profile": "a profile",
    "token lengths": 'a JSON list of {"vit_num", "token_num"}',
    "saved lengths": "a folder of lengths",
    "dataset": f"a dataset (an InternVL meta file, or conversations in {KINDS})",
    "model": "a Hugging Face model folder",
    "checkpoint": "a checkpoint",
    "checkpoints": "a folder of checkpoints",
    "run": "a run's folder",
    "something else": "something else",
}
HEAD_CHARACTERS: Final = 1 << 16
# An object with one of these keys is a ds_config.
DEEPSPEED_KEYS: Final = frozenset({
    "omnibal", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer",
    "scheduler", "bf16", "fp16", "zero_optimization", "gradient_clipping", "data_types", "torch_autocast",
})  # fmt: skip
# Pattern of a file or folder within a folder, and the kind that it shows; the first one that is found counts.
FOLDERS: Final[tuple[tuple[str, Kind], ...]] = (
    ("config.json", "model"),
    ("omnibal.json", "checkpoint"),
    ("*/omnibal.json", "checkpoints"),
    ("metrics.jsonl", "run"),
    ("checkpoints", "run"),
    ("lengths.json", "saved lengths"),
)


def expect(name: str, path: Path, kinds: Collection[Kind], *, remedy: str = "") -> Kind:
    kind = kind_of(name, path)
    if kind not in kinds:
        expected = " or ".join(NAMES[possible] for possible in kinds)
        hint = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{name} must be {expected}, got {path}, {_described(kind, path)}{hint}")
    return kind


def kind_of(name: str, path: Path) -> Kind:
    if path.is_dir():
        found = next((kind for pattern, kind in FOLDERS if any(path.glob(pattern))), None)
        return found or ("dataset" if is_dataset(path) else "something else")
    try:
        if is_dataset(path):
            return "dataset"
        # Large files are told by their first characters; only what may be a ds_config, plan or profile is read whole.
        start = _head(name, path)
    except OSError as error:
        raise ConfigError(f"{name} must be a readable file or folder, got {path} ({error.strerror})") from error
    if start.startswith("[") and ('"vit_num"' in start or start.rstrip() == "[]"):
        return "token lengths"
    if _first_line(start) is not None:
        return "something else"
    content = read_json(path, name, parse_relaxed)
    return kind_of_object(content) if isinstance(content, dict) else "something else"


def kind_of_object(content: Mapping[str, Any]) -> Kind:
    keys = content.keys()
    if {"limits", "partition"} <= keys:
        return "plan"
    if {"layers", "device"} <= keys:
        return "profile"
    if keys & DEEPSPEED_KEYS or not keys:  # an empty object is a ds_config of defaults
        return "ds_config"
    return "dataset" if all(isinstance(shard, dict) for shard in content.values()) else "something else"


def _head(name: str, path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            start = file.read(HEAD_CHARACTERS).lstrip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} must be text in UTF-8, got {path} ({error})") from error
    if start[:1] not in ("[", "{", "/", "#"):  # a ds_config may begin with a comment
        raise ConfigError(f"{name} must be a folder, JSON or JSON lines, got {start[:20]!r} in {path}")
    return start


def _first_line(start: str) -> dict[str, Any] | None:
    line, *others = start.splitlines()
    if not others or not line.startswith("{"):
        return None
    try:
        found: dict[str, Any] = parse_json(line)
    except ValueError:
        return None
    return found


def _described(kind: Kind, path: Path) -> str:
    if kind != "something else":
        return f"which is {NAMES[kind]}"
    if path.is_dir():
        return "a folder of something else"
    content = _first_line(_head("file", path)) or parse_relaxed(path.read_bytes())
    entry = content[0] if isinstance(content, list) else content
    return f"which has the keys {', '.join(entry)}" if isinstance(entry, dict) else f"a list with {entry!r:.80}"


CONFIG: Final[tuple[Kind, ...]] = ("ds_config",)


def open_workspace(
    source: Path,
    *,
    kinds: Collection[Kind] = CONFIG,
    profile: Path | None = None,
    lengths: Sequence[Path] | None = None,
    cluster: str | None = None,
    **options: Any,
) -> Workspace:
    """The workspace of a command line: of a ds_config, or of a plan that is only looked at."""
    # What the command line names comes before what the ds_config says or lies in its folder; see Workspace.
    kind = expect("source", source, kinds)
    named = Overrides(
        None if not lengths else read_lengths(lengths, "--lengths"),
        None if profile is None else ModelProfile.load(profile),
        None if cluster is None else read_cluster(cluster),
    )
    options = {"source": source, "makes": True, "say": say, "working": working, **options}
    if kind == "ds_config":
        return _read_config(source, overrides=named, **options)
    # A plan lies in a run's folder, beside the profile and the lengths that it was made from; or names its ds_config.
    plan, beside = Plan.load(source), RunFiles(source.parent)
    if named.profile is None and not beside.profile.is_file():
        made_for = Path(plan.made_from.get("ds_config", ""))
        if made_for.is_file():
            return _read_config(made_for, overrides=replace(named, plan=plan), **options)
        raise ConfigError(f"--profile must name what {source} was made from, got none, and none lies beside it")
    costs = named.profile or ModelProfile.load(beside.profile)
    found = named.lengths
    if lengths is None and (beside.lengths / "lengths.json").is_file():
        found = read_lengths([beside.lengths], "--lengths")
    # The ds_config of someone who has none: what the profile says, and what the plan was asked for.
    packing = {key: value for key, value in plan.made_from.get("request", {}).items() if key in ("method", "seed")}
    section = OmnibalSection.model_validate({"model": {"frozen": list(costs.frozen_parts)}, "packing": packing})
    config = {"bf16": {"enabled": costs.dtype == "bfloat16"}, "zero_optimization": {"stage": plan.layout.zero_stage}}
    return Workspace(config, section, overrides=Overrides(found, costs, named.cluster, plan), **options)


def _read_config(path: Path, **options: Any) -> Workspace:
    try:
        workspace = Workspace.read(path, **options)
        check_apart_from_layout(workspace.config)
    except ConfigError as error:
        raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from error
    return workspace


def read_lengths(paths: Sequence[Path], name: str) -> FoundLengths:
    """Lengths that were measured: JSON lists of ``{"vit_num", "token_num"}``, or one folder of saved ones."""
    for path in paths:
        kind = expect(name, path, ("saved lengths", "token lengths"), remedy="`omnibal lengths` measures a dataset")
        if kind == "saved lengths" and len(paths) > 1:
            raise ConfigError(f"{name} must be {NAMES['token lengths']} where there are several, got the folder {path}")
    twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
    if twice:
        raise ConfigError(f"{name} must be different files, got {twice[0]} twice; all samples would count twice")
    lengths = SampleLengths.load(paths[0]) if paths[0].is_dir() else SampleLengths.from_token_lengths(paths)
    return FoundLengths(lengths, ", ".join(map(str, paths)))
