"""What people have, read: the file that they train with, and a model by its name, folder or ``config.json``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import yaml

from omnibal.advise.models import Model
from omnibal.advise.present import Present, read_present
from omnibal.advise.wait import MEETINGS
from omnibal.errors import ConfigError, said
from omnibal.families import family_of
from omnibal.records import parse_relaxed, read_json

PREPROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class NamedModel:
    """A model as somebody names it.

    Attributes:
        model: Its sizes.
        folder: Its Hugging Face folder; None where a known name is all there is.
    """

    model: Model
    folder: Path | None = None

    def image_options(self, most: int | None) -> dict[str, int]:
        """The most tiles of an image, or at native resolution the most pixels, as its image rule takes it."""
        if most is None:
            return {}
        return {"max_pixels" if family_of(self.model.config).tile_limits is None else "max_tiles": most}


def read_model(named: str) -> NamedModel:
    """A model by a known name, the name of a Hugging Face folder, or that of a ``config.json``."""
    path = Path(named)
    if not path.exists():
        return NamedModel(Model.known(named))
    folder = path if path.is_dir() else path.parent
    config = read_json(path / "config.json" if path.is_dir() else path, "model")
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"model must be a Hugging Face folder or a config.json with a model_type, got {path}")
    beside = next((folder / name for name in PREPROCESSORS if (folder / name).is_file()), None)
    preprocessor = None if beside is None else read_json(beside, "the preprocessor's configuration")
    if isinstance(preprocessor, dict):
        preprocessor = preprocessor.get("image_processor", preprocessor)
    return NamedModel(Model.of(folder.resolve().name, config, preprocessor), folder)


def read_today(today: str) -> Present:
    """The present way of training, by a trainer's name or by the file that says it; ``read_present`` has the kinds."""
    if today in MEETINGS:
        return Present(sharding=cast(Any, today))
    path = Path(today)
    if not path.is_file():
        raise ConfigError(f"today must be one of {', '.join(MEETINGS)}, or a file, got {today!r}")
    return read_present(_content(path), lambda name: _content(_beside(path, name)))


def _beside(path: Path, name: str) -> Path:
    """A file that another one names: relative to where it lies, or to where the command runs."""
    found = next((near for near in (path.parent / name, Path(name)) if near.is_file()), None)
    if found is None:
        raise ConfigError(
            f"deepspeed in {path} must name a file beside it or here, got {name!r}; copy it, or write zero2 or zero3"
        )
    return found


def _content(path: Path) -> dict[str, Any]:
    """The object in a JSON or YAML file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"today must name readable files, got {path}: {said(error)}") from error
    try:
        content = yaml.safe_load(text) if path.suffix.lower() in (".yaml", ".yml") else parse_relaxed(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"today must be JSON or YAML, got {path}: {said(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"today must hold an object, got {path} with a {type(content).__name__}")
    return content
