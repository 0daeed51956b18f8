"""What a command line names, opened: a ds_config, or files where someone has none."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omnibal.cli.files import Kind, expect
from omnibal.cli.run import Run
from omnibal.config import OmnibalSection, RunFiles, check_apart_from_layout, read_config
from omnibal.errors import ConfigError
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile

CONFIG: Final[tuple[Kind, ...]] = ("ds_config",)


def open_run(
    source: Path,
    *,
    kinds: Collection[Kind] = CONFIG,
    profile: Path | None = None,
    lengths: Sequence[Path] | None = None,
    **options: Any,
) -> Run:
    """Read what the command line names.

    Args:
        source: A ds_config, a plan or a profile, told by its content.
        kinds: Which of them.
        profile: Of the command line.
        lengths: Of the command line.
        **options: As of ``Run``.

    Raises:
        ConfigError: It is something else, or wrong; the message names the file.
    """
    kind = expect("source", source, kinds)
    named = None if profile is None else ModelProfile.load(profile)
    if kind == "ds_config":
        config, section = _read_config(source)
        return Run(source, config, section, section.run.files, profile=named, lengths=lengths or (), **options)
    if kind == "profile":
        costs = ModelProfile.load(source)
        return Run(source, *_config_of(costs, 1), None, profile=costs, lengths=lengths or (), **options)
    plan, beside = Plan.load(source), RunFiles(source.parent)
    if named is None:
        if not beside.profile.is_file():
            raise ConfigError(f"--profile must name what {source} was made from, got none, and none lies beside it")
        named = ModelProfile.load(beside.profile)
    if lengths is None and (beside.lengths / "lengths.json").is_file():
        lengths = [beside.lengths]
    config, section = _config_of(named, plan.layout.zero_stage, plan.made_from.get("request", {}))
    return Run(source, config, section, None, profile=named, plan=plan, lengths=lengths or (), **options)


def _read_config(path: Path) -> tuple[dict[str, Any], OmnibalSection]:
    """A ds_config whose keys can be right; errors name the file."""
    try:
        config, section = read_config(path)
        check_apart_from_layout(config)
    except ConfigError as error:
        raise error if str(path) in str(error) else ConfigError(f"{path}: {error}") from error
    return config, section


def _config_of(
    profile: ModelProfile, zero_stage: int, request: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], OmnibalSection]:
    """The ds_config of someone who has none: what a profile says, and what a plan was asked for."""
    packing = {key: (request or {})[key] for key in ("method", "seed") if key in (request or {})}
    config = {"bf16": {"enabled": profile.dtype == "bfloat16"}, "zero_optimization": {"stage": zero_stage}}
    return config, OmnibalSection.model_validate({"model": {"frozen": list(profile.frozen_parts)}, "packing": packing})
