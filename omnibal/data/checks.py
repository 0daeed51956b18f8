"""Checks of arguments that several parts of the sampler take."""

from typing import Any, Final, TypeVar

import numpy as np

from omnibal.errors import ConfigError

MOST_STEP_PACKS: Final = 2**24
"""Packs of a step: planners hold a few numbers for each, and no cluster runs as many."""

T = TypeVar("T")


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


def ranks(num_replicas: Any, micro_batches: Any) -> tuple[int, int]:
    """Data-parallel ranks and each one's packs of a step, as plain integers.

    Raises:
        ConfigError: One is no integer or below 1, or a step would have more than ``MOST_STEP_PACKS`` packs.

    >>> ranks(8, np.int64(4))
    (8, 4)
    """
    replicas, packs = integer("num_replicas", num_replicas, 1), integer("micro_batches", micro_batches, 1)
    if replicas * packs > MOST_STEP_PACKS:
        raise ConfigError(f"num_replicas x micro_batches must be at most {MOST_STEP_PACKS}, got {replicas} x {packs}")
    return replicas, packs


def kind(name: str, value: Any, expected: type[T]) -> T:
    """The value, which must be of a kind.

    Raises:
        ConfigError: It is something else.

    >>> kind("name", "a", str)
    'a'
    """
    if not isinstance(value, expected):
        raise ConfigError(f"{name} must be {expected.__name__}, got {value!r:.80}")
    return value
