"""Files that torch writes, read as data: no code runs that a file names, whoever wrote it."""

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from omnibal.errors import ConfigError

# Arrays and their numbers name these, beside what torch itself allows: tensors, containers, numbers and strings.
_NUMPY: Final[tuple[Any, ...]] = (
    np.ndarray(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?US"},
)
_REMEDY: Final = "torch.serialization.add_safe_globals([...]) names a class that you trust"


def load_data(path: Path, *classes: Any, **options: Any) -> Any:
    """Load a file that holds tensors, containers, numbers, strings, arrays, and objects of these classes.

    Args:
        path: What ``torch.save`` wrote.
        *classes: Their objects are made, and get the attributes that the file says.
        **options: For ``torch.load``.

    Raises:
        ConfigError: It names another class or a function; none of them has run.
    """
    try:
        with safe_globals([*_NUMPY, *classes]):
            return torch.load(path, weights_only=True, **options)
    except UnpicklingError as error:
        reason = str(error.__context__ or error)  # torch's own error explains its settings in many lines
        sentence = next(filter(None, re.split(r"\. |\n", reason.strip())), type(error).__name__)
        raise ConfigError(f"{path} must hold data only, got: {sentence.rstrip('.')}; {_REMEDY}") from error


def check_data(path: Path, *classes: Any) -> None:
    """Refuse a file that ``load_data`` would refuse, as far as its list of names tells.

    Raises:
        ConfigError: It names another class or a function.
    """
    with safe_globals([*_NUMPY, *classes]):
        others = get_unsafe_globals_in_checkpoint(str(path))
    if others:
        raise ConfigError(f"{path.name} must hold data only, got {', '.join(sorted(others))}; {_REMEDY}")
