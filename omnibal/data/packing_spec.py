"""PackingSpec: everything that decides which samples share a pack and a step, on all ranks and after every restart."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, get_args

import numpy as np
import numpy.typing as npt

from omnibal.cost import CostModel
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.errors import ConfigError, integer, kind

Method = Literal["balanced", "isf", "random"]
"""How samples are packed and arranged."""

Oversized = Literal["alone", "error", "drop"]
"""What becomes of a sample that exceeds a limit on its own."""

DEFAULT_COST: Final = CostModel(llm_tokens=24576, llm_tokens_squared=1)
"""Forward operations of a decoder layer with 4096 hidden units and a fourfold MLP, 24 h² l + 4 h l², over 4 h."""

ITERATIONS: Final = 10  # of ISF: as many as the paper takes in practice
MOST_ITERATIONS: Final = 10_000
EXCHANGE_STEPS: Final = 64  # more have not made steps more alike
MOST_EXCHANGE_STEPS: Final = 2**20
MOST_STEP_PACKS: Final = 2**24
"""Packs of a step: planners hold a few numbers for each, and no cluster runs as many."""
OF: Final = MappingProxyType(
    {"limits": " of a pack", "num_samples": " of the dataset", "content_hash": " of the samples' lengths"}
)
"""What fields of ``PackingSpec.fingerprint`` belong to, for messages."""
MOST_NAMED = 10  # samples that a message names


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
