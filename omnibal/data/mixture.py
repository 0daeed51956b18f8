"""Mixture: what share of training each source gets, step by step."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from omnibal.errors import ConfigError, integer
from omnibal.records import explain

Unit = Literal["samples", "target_tokens", "llm_tokens"]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Knot:
    """The shares that hold at a step."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    shares: Mapping[str, float]

    def __post_init__(self) -> None:
        integer("step of a mixture's schedule", self.step, 1)
        _check(f"shares at step {self.step}", self.shares)


@dataclass(frozen=True)
class Mixture:
    """What share of training each source gets; shares are weights: only what they are relative to each other counts.

    Each source is drawn without replacement until it is used up, then drawn anew.

    Args:
        shares: Of each source, at the first step.
        by: What is shared: samples, tokens that carry loss, or all tokens of the LLM.
        schedule: Shares at later steps, ascending: from one to the next they change linearly, behind the last they
            stay. A source that a knot does not name has none there.
        epoch_samples: Samples of an epoch, about, at the first shares: what epochs mean is up to whoever counts them.
            By default as many as there are.

    Raises:
        ConfigError: A share is negative or no number, all are 0, or steps do not ascend.

    >>> mixture = Mixture({"chat": 3, "text": 1}, schedule=(Knot(100, {"chat": 1}),))
    >>> mixture.sources, mixture.shares_at([0, 50, 200]).tolist()
    (('chat', 'text'), [[0.75, 0.25], [0.875, 0.125], [1.0, 0.0]])
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    shares: Mapping[str, float]
    by: Unit = "samples"
    schedule: tuple[Knot, ...] = ()
    epoch_samples: int | None = None

    def __post_init__(self) -> None:
        _check("shares", self.shares)
        if self.by not in get_args(Unit):
            raise ConfigError(f"by of a mixture must be one of {', '.join(get_args(Unit))}, got {self.by!r}")
        steps = [knot.step for knot in self.schedule]
        if any(later <= step for step, later in pairwise(steps)):
            raise ConfigError(f"steps of a mixture's schedule must ascend, got {steps}")
        if self.epoch_samples is not None:
            integer("epoch_samples of a mixture", self.epoch_samples, 1)

    @classmethod
    def of(cls, value: Any) -> "Mixture":
        """A mixture as users write it: itself, its fields by name, or shares by source alone.

        Raises:
            ConfigError: It is none of these, or wrong; the message names the key.

        >>> Mixture.of({"chat": 0.5, "text": -0.5})
        Traceback (most recent call last):
        omnibal.errors.ConfigError: mixture: shares must be at least 0, got text: -0.5
        """
        if isinstance(value, Mixture):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"mixture must be shares by source, or an object that has them, got {value!r:.80}")
        # A source may have any name: where "shares" is one, its share is a number.
        spelled_out = dict(value) if isinstance(value.get("shares"), Mapping) else {"shares": dict(value)}
        try:
            return _RECORD.validate_python(spelled_out)
        except ValidationError as error:
            raise ConfigError(explain(cls, error, "mixture")) from None

    @cached_property
    def sources(self) -> tuple[str, ...]:
        named = [self.shares, *(knot.shares for knot in self.schedule)]
        return tuple(dict.fromkeys(name for shares in named for name in shares))

    def shares_at(self, step: npt.ArrayLike) -> FloatArray:
        """Shares at steps of any shape: one more axis of ``sources``, which sums to 1."""
        steps = np.asarray(step, dtype=np.float64)
        columns = [np.interp(steps, self._steps, column) for column in self._table.T]
        return np.stack(columns, axis=-1)

    def shares_of_step(self, step: int, given: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """The share that a step was to hold of each source, and the one that it holds.

        Args:
            step: Number of the step, from 0.
            given: Samples or tokens that each source gave to the step, as ``by`` counts them.
        """
        asked, total = dict(zip(self.sources, self.shares_at(step + 0.5).tolist(), strict=True)), sum(given.values())
        return {name: (asked[name], units / max(total, 1)) for name, units in given.items()}

    def check_sources(self, names: Sequence[str]) -> None:
        """Check that the mixture speaks of just the sources that there are.

        Raises:
            ConfigError: It names one that does not exist (the message says the nearest), or leaves one of them out.
        """
        for name in self.sources:
            if name not in names:
                nearest = get_close_matches(name, names, n=1, cutoff=0.5)
                remedy = f"did you mean {nearest[0]!r}?" if nearest else f"the sources are {_listed(names)}"
                raise ConfigError(f"mixture must name sources of the data, got {name!r}; {remedy}")
        for name in names:
            if name not in self.sources:
                raise ConfigError(
                    f"mixture must name every source of the data, got no share of {name!r}; give it 0 to leave it out"
                )

    def record(self, names: Sequence[str]) -> dict[str, Any]:
        """What it asks of sources, all of which it names, in JSON values: equal where that is the same."""
        shares = self._table[:, [self.sources.index(name) for name in names]]
        schedule = {"steps": self._steps, "shares": shares.tolist()}
        return {"by": self.by, "sources": list(names), "epoch_samples": self.epoch_samples, **schedule}

    @cached_property
    def _steps(self) -> list[int]:
        return [0, *(knot.step for knot in self.schedule)]

    @cached_property
    def _table(self) -> FloatArray:
        """Shares at the beginning and at each knot, shape (1 + knots, sources)."""
        named = [self.shares, *(knot.shares for knot in self.schedule)]
        rows = np.array([[shares.get(name, 0.0) for name in self.sources] for shares in named], dtype=np.float64)
        # A power of two first: shares near the largest float sum to a number, and no digit of others changes.
        rows = np.ldexp(rows, -np.frexp(rows.max(axis=1, keepdims=True))[1])
        table: FloatArray = rows / rows.sum(axis=1, keepdims=True)
        return table


MOST_LISTED: Final = 10


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:MOST_LISTED])) + (", …" if len(names) > MOST_LISTED else "")


def _check(name: str, shares: Any) -> None:
    if not isinstance(shares, Mapping) or not all(isinstance(source, str) for source in shares):
        raise ConfigError(f"{name} must be an object of numbers by source, got {shares!r:.80}")
    for source, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= sys.float_info.max:
            rule = "at least 0" if isinstance(share, int | float) and share < 0 else "numbers"
            raise ConfigError(f"{name} must be {rule}, got {source}: {share!r}")
    if not sum(shares.values()) > 0:
        raise ConfigError(f"{name} must sum to more than 0, got {dict(shares)!r:.80}")


_RECORD: Final = TypeAdapter(Mixture)
