"""Combinations of settings: random ones, and few of them that hold every pair of values that may meet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

CANDIDATES = 60
"""Combinations of which the one with most new pairs is taken."""


@dataclass(frozen=True)
class Design:
    """Factors with their values; rules name, for some factors, values that must not meet."""

    factors: Mapping[str, tuple]
    rules: tuple[Mapping[str, tuple], ...] = ()
    once: Mapping[str, tuple] = field(default_factory=dict)
    """Values of factors that are held once each, and not in pairs."""
    also: tuple[Mapping, ...] = ()
    """More values of several factors that are held together."""

    def completed(self, partial, random):
        """A random combination that holds some values and breaks no rule; None where there is none."""
        if any(all(partial.get(name, self) in values for name, values in rule.items()) for rule in self.rules):
            return None
        left = [name for name in self.factors if name not in partial]
        if not left:
            return {name: partial[name] for name in self.factors}
        for value in random.sample(self.factors[left[0]], len(self.factors[left[0]])):
            found = self.completed(partial | {left[0]: value}, random)
            if found:
                return found
        return None

    def parts(self):
        """What is to be held: pairs of values of two factors, and single values of those that are held once."""
        crossed = {
            name: [value for value in values if value not in self.once.get(name, ())]
            for name, values in self.factors.items()
        }
        for one, other in combinations(crossed, 2):
            yield from (frozenset({(one, a), (other, b)}) for a in crossed[one] for b in crossed[other])
        yield from (frozenset({(name, value)}) for name, values in self.once.items() for value in values)
        yield from (frozenset(values.items()) for values in self.also)

    def covering(self, seed):
        """Combinations that hold each part that may be held, and the parts that no combination holds.

        Source: Cohen et al., The AETG System, IEEE TSE 1997: each next combination is the best of some candidates.
        """
        random, left, found, impossible = Random(seed), dict.fromkeys(self.parts()), [], []
        while left:
            first = next(iter(left))
            if self.completed(dict(first), random) is None:
                impossible.append(first)
                del left[first]
                continue
            candidates = [self.completed(dict(first), random) for _ in range(CANDIDATES)]
            best = max(candidates, key=lambda each: sum(part <= each.items() for part in left))
            found.append(best)
            left = {part: None for part in left if not part <= best.items()}
        return found, impossible
