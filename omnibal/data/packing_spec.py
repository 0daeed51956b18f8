"""PackingSpec: everything that decides which samples share a pack and a step, on all ranks and after every restart."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, get_args

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from omnibal.cost import CostModel, FloatArray
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError, integer, kind
from omnibal.records import explain

Unit = Literal["samples", "target_tokens", "llm_tokens"]  # what shares of a mixture count

Method = Literal["balanced", "isf", "random"]  # how samples are packed and arranged

Oversized = Literal["alone", "error", "drop"]  # what becomes of a sample that exceeds a limit on its own

DEFAULT_COST: Final = CostModel(llm_tokens=24576, llm_tokens_squared=1)
"""Forward operations of a decoder layer with 4096 hidden units and a fourfold MLP, 24 h² l + 4 h l², over 4 h."""

ITERATIONS: Final = 10  # of ISF: as many as the paper takes in practice
MOST_ITERATIONS: Final = 10_000
EXCHANGE_STEPS: Final = 64  # more have not made steps more alike
MOST_EXCHANGE_STEPS: Final = 2**20
MOST_STEP_PACKS: Final = 2**24
"""Packs of a step: planners hold a few numbers for each, and no cluster runs as many."""
# What fields of ``PackingSpec.fingerprint`` belong to, for messages.
OF: Final = MappingProxyType(
    {"limits": " of a pack", "num_samples": " of the dataset", "content_hash": " of the samples' lengths"}
)
MOST_NAMED: Final = 10  # samples, or sources, that a message names


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
    def steps(self) -> list[int]:
        return [0, *(knot.step for knot in self.schedule)]

    @cached_property
    def sources(self) -> tuple[str, ...]:
        named = [self.shares, *(knot.shares for knot in self.schedule)]
        return tuple(dict.fromkeys(name for shares in named for name in shares))

    def shares_at(self, step: npt.ArrayLike) -> FloatArray:
        """Shares at steps of any shape: one more axis of ``sources``, which sums to 1."""
        steps = np.asarray(step, dtype=np.float64)
        columns = [np.interp(steps, self.steps, column) for column in self._table.T]
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
                known = ", ".join(map(repr, names[:MOST_NAMED])) + (", …" if len(names) > MOST_NAMED else "")
                remedy = f"did you mean {nearest[0]!r}?" if nearest else f"the sources are {known}"
                raise ConfigError(f"mixture must name sources of the data, got {name!r}; {remedy}")
        for name in names:
            if name not in self.sources:
                raise ConfigError(
                    f"mixture must name every source of the data, got no share of {name!r}; give it 0 to leave it out"
                )

    def record(self, names: Sequence[str]) -> dict[str, Any]:
        """What it asks of sources, all of which it names, in JSON values: equal where that is the same."""
        shares = self._table[:, [self.sources.index(name) for name in names]]
        schedule = {"steps": self.steps, "shares": shares.tolist()}
        return {"by": self.by, "sources": list(names), "epoch_samples": self.epoch_samples, **schedule}

    @cached_property
    def _table(self) -> FloatArray:
        """Shares at the beginning and at each knot, shape (1 + knots, sources)."""
        named = [self.shares, *(knot.shares for knot in self.schedule)]
        rows = np.array([[shares.get(name, 0.0) for name in self.sources] for shares in named], dtype=np.float64)
        # A power of two first: shares near the largest float sum to a number, and no digit of others changes.
        rows = np.ldexp(rows, -np.frexp(rows.max(axis=1, keepdims=True))[1])
        table: FloatArray = rows / rows.sum(axis=1, keepdims=True)
        return table


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


@dataclass(frozen=True)
class Ranks:
    """Who runs a step: data-parallel ranks, and the packs that each of them gets."""

    num_replicas: int
    micro_batches: int = 1

    def __post_init__(self) -> None:
        # A frozen record sets its own fields only through object.
        for name in ("num_replicas", "micro_batches"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.step_packs > MOST_STEP_PACKS:
            raise ConfigError(
                f"num_replicas x micro_batches must be at most {MOST_STEP_PACKS}, "
                f"got {self.num_replicas} x {self.micro_batches}"
            )

    @property
    def step_packs(self) -> int:
        return self.num_replicas * self.micro_batches


class PackingOptions(TypedDict, total=False):
    """What a `PackingSpec` holds beside lengths and limits, as keywords of functions that make one."""

    method: Method
    seed: int
    oversized: Oversized
    cost: CostModel | None
    exchange_steps: int
    iterations: int
    mixture: Mixture | Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class PackingSpec:
    """What all ranks must agree on, whoever runs the steps.

    Raises:
        ConfigError: An argument is out of range.
        DataError: ``oversized`` is ``"error"`` and there is such a sample, or ``"drop"`` and there is no other.
    """

    lengths: SampleLengths
    """Loads of every sample; a sample's index is its position here."""
    limits: PackLimits
    """The most a pack may hold."""
    method: Method = "balanced"
    """How packs are made and arranged: ``"balanced"``, ``"isf"`` (as the OmniBal paper has it) or ``"random"`` (samples
    packed in the order in which they are drawn)."""
    seed: int = 0
    """The same seed gives the same epochs."""
    oversized: Oversized = "alone"
    """Samples that exceed a limit on their own: ``"alone"`` gives each a pack of its own, ``"drop"`` leaves them out,
    ``"error"`` refuses them."""
    cost: CostModel | None = None
    """What ``"balanced"`` makes even besides vision units, such as the LLM's seconds; the ``fixed``
    part plays no role. None: the cost of a decoder of 4096 hidden units."""
    exchange_steps: int = EXCHANGE_STEPS
    """Consecutive steps that may exchange samples for the sake of balance, for ``"balanced"``. With 1 every step keeps
    exactly the samples that it drew."""
    iterations: int = ITERATIONS
    """Rounds of ISF (T in the paper), for ``"isf"``."""
    mixture: Mixture | None = None
    """The share of each source, for ``"balanced"``, or a mapping that makes a ``Mixture``. None: all samples once an
    epoch."""

    def __post_init__(self) -> None:
        kind("lengths", self.lengths, SampleLengths)
        kind("limits", self.limits, PackLimits)
        object.__setattr__(self, "seed", integer("seed", self.seed, 0))
        integer("exchange_steps", self.exchange_steps, 1, MOST_EXCHANGE_STEPS)
        integer("iterations", self.iterations, 1, MOST_ITERATIONS)
        if self.method not in get_args(Method):
            raise ConfigError(f"method must be one of {get_args(Method)}, got {self.method!r}")
        if self.oversized not in get_args(Oversized):
            raise ConfigError(f"oversized must be one of {get_args(Oversized)}, got {self.oversized!r}")
        if self.mixture is not None:
            if self.method != "balanced":
                raise ConfigError(f"method must be 'balanced' under a mixture, got {self.method!r}")
            object.__setattr__(self, "mixture", Mixture.of(self.mixture))
        if self.method != "balanced" and self.limits.sound_units is not None:
            raise ConfigError(f"method must be 'balanced' where sounds have a limit, got {self.method!r}")
        if self.oversized == "error":
            self.limits.refuse_oversized(self.lengths)
        if self.oversized == "drop" and len(self.oversized_samples):
            self.limits.refuse_none(self.lengths)

    @property
    def pack_cost(self) -> CostModel:
        """The cost that packs are balanced in."""
        return DEFAULT_COST if self.cost is None else self.cost

    @cached_property
    def samples(self) -> npt.NDArray[np.int64] | None:
        """Samples that take part, ascending; None for all."""
        if self.oversized != "drop" or not len(self.oversized_samples):
            return None
        return np.delete(np.arange(len(self.lengths)), self.oversized_samples)

    @property
    def num_samples(self) -> int:
        return len(self.lengths) if self.samples is None else len(self.samples)

    @cached_property
    def oversized_samples(self) -> npt.NDArray[np.int64]:
        """Samples that exceed a limit on their own."""
        return self.limits.oversized(self.lengths)

    def oversized_report(self) -> str:
        over = self.oversized_samples
        if len(over) == 0:
            return "no sample exceeds the limits"
        fate = "are left out" if self.oversized == "drop" else "have packs of their own"
        named = ", ".join(map(str, over[:MOST_NAMED])) + (", …" if len(over) > MOST_NAMED else "")
        exceed = f"exceed the limits of {self.limits.in_words}"
        return f"{len(over)} of {len(self.lengths)} samples {exceed} and {fate}: {named}"

    def fingerprint(self) -> Mapping[str, Any]:
        """The spec in a few JSON values, equal exactly if the same epochs come out."""
        return {
            "num_samples": len(self.lengths),
            "content_hash": self.lengths.content_hash,
            "limits": list(self.limits.record().values()),
            "method": self.method,
            "seed": self.seed,
            "oversized": self.oversized,
            # An entry for sounds only where there is one: states of older versions stay valid.
            "cost": self.cost and [*asdict(self.cost).values()][: None if self.cost.sound_units else -1],
            "exchange_steps": self.exchange_steps,
            **({"iterations": self.iterations} if self.method == "isf" else {}),
            "mixture": None if self.mixture is None else self.mixture.record(self.lengths.source_names),
        }


def in_words(name: str, value: Any) -> str:
    """A value of ``PackingSpec.fingerprint`` as it is written in Python: limits with the names of their numbers.

    >>> in_words("limits", [9, 4096, 9, 3968]), in_words("seed", 1)
    ('PackLimits(vision_units=9, llm_tokens=4096, full_vision_units=9, full_llm_tokens=3968)', '1')
    """
    if name != "limits" or not isinstance(value, list):
        return repr(value)
    numbers = zip(fields(PackLimits), value, strict=False)  # the last one, of sounds, may be missing
    return f"PackLimits({', '.join(f'{field.name}={number}' for field, number in numbers)})"
