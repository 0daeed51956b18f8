"""What is gained, said in one way: against what somebody does today, with the cheapest alternative beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from omnibal.advise.changes import settled
from omnibal.advise.estimate import Estimate, Recipe, Scenario, Speedup
from omnibal.errors import bytes_in_words

TRAINER: Final = "ZeRO with a trainer's own settings"


@dataclass(frozen=True)
class Way:
    """A way to train, in words, and its samples a second where they are to be said."""

    name: str
    samples_per_second: float | None = None
    lacks: str = ""
    """Why nobody can train so."""

    @classmethod
    def of(cls, name: str, estimate: Estimate) -> "Way":
        """A way of data parallelism, as it is estimated."""
        name = f"{name} ({estimate.recipe.text})"
        if not estimate.fits:
            return cls(name, None, f"does not fit: {bytes_in_words(estimate.missing_bytes)} are missing")
        return cls(name, estimate.samples_per_second)


def settings_alone(scenario: Scenario) -> Way:
    """The cheapest alternative to a pipeline or to packs: ZeRO, with what a trainer has by its settings.

    Settings are searched as `omnibal advise` searches its steps 0, from ZeRO 3 with single samples on.
    """
    ranks = scenario.cluster.num_devices
    micro_batches = max(round(scenario.samples_per_step / ranks), 1)
    asked = replace(scenario, samples_per_step=ranks * micro_batches, _batches={})
    return Way.of(TRAINER, settled(asked.estimate(Recipe("zero3", micro_batches=micro_batches))))


def gain_in_words(gains: Sequence[tuple[float | Speedup, Way]]) -> str:
    """Samples a second in multiples of those of other ways: today's first, then the cheapest alternative's.

    >>> gain_in_words([(1.04, Way("the present configuration", 15.3)), (1.07, Way("ZeRO", 14.9))])
    '1.04x the 15.3 samples/s of the present configuration, 1.07x the 14.9 samples/s of ZeRO'
    >>> gain_in_words([(2.5, Way("random batches")), (1.02, Way("group_by_length"))])
    '2.50x the samples a second of random batches, 1.02x those of group_by_length'
    """
    found = list[str]()
    for factor, way in gains:
        times = f"{factor:.2f}x" if isinstance(factor, float) else f"{factor}x"
        plain = "those" if found else "the samples a second"
        rate = plain if way.samples_per_second is None else f"the {way.samples_per_second:,.1f} samples/s"
        found.append(f"{times} {rate} of {way.name}")
    return ", ".join(found)


def gain_over(samples_per_second: float, ways: Sequence[Way]) -> str:
    """The gain of so many samples a second over ways whose rates are known, and which others cannot be taken."""
    known = [(samples_per_second / way.samples_per_second, way) for way in ways if way.samples_per_second is not None]
    return "; ".join([gain_in_words(known), *(f"{way.name} {way.lacks}" for way in ways if way.lacks)]).lstrip("; ")
