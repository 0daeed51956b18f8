"""Checks of arguments that several parts of the sampler take."""

from typing import Any

import numpy as np

from omnibal.errors import ConfigError


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as a plain integer, which JSON can hold.

    Raises:
        ConfigError: It is no integer (numpy's are), or lies outside ``least`` … ``most``.

    >>> integer("rank", np.int64(1), 0, 3)
    1
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < least or (most is not None and value > most):
        rule = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ConfigError(f"{name} must be {rule}, got {value}")
    return int(value)
