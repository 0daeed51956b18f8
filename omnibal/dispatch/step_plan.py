"""Where each sample of a micro-batch is encoded, and where the LLM gets it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from omnibal.cost import CostModel, FloatArray, IntArray, Load
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.dispatch.divide import divide
from omnibal.dispatch.nodes import keep_in_nodes
from omnibal.dispatch.rearrangement import Rearrangement
from omnibal.errors import DataError, InfeasibleError

COLUMNS: Final = ("vision_units", "vision_squared", "image_tokens", "llm_tokens", "target_tokens")
"""What a plan knows of each sample: rows of pixels, Σ patches² over its images, features, tokens, targets."""
PER_VISION_UNIT: Final = CostModel(vision_units=1)


@dataclass(frozen=True)
class Link:
    """What it takes to exchange samples, measured on the ranks that do."""

    latency_seconds: float
    """Seconds of an exchange, however little moves."""
    bytes_per_second: float
    """Bytes that a rank sends while it receives as many."""
    vision_unit_bytes: float
    """Pixels of a tile or patch."""
    image_token_bytes: float
    """Features of an image token, and their gradients on the way back."""
    token_bytes: float
    """Id, label and positions of a text token."""
    phases_meet: bool = True
    """Whether ranks wait for each other between phases even where nothing moves, as under ZeRO 3 and FSDP."""

    def seconds(self, *moves: tuple[Rearrangement, npt.ArrayLike]) -> float:
        """Seconds of one exchange: those of the rank that sends or receives most; 0 where nothing moves.

        Args:
            moves: Rearrangements that travel together, each with the bytes of its samples, (samples,).
        """
        carried = [(move, np.where(move.source != move.destination, sizes, 0)) for move, sizes in moves]
        if all(move.is_still for move, _ in carried):
            return 0.0
        sent = sum(np.bincount(move.source, moved, move.num_ranks) for move, moved in carried)
        received = sum(np.bincount(move.destination, moved, move.num_ranks) for move, moved in carried)
        return self.latency_seconds + float(np.maximum(sent, received).max()) / self.bytes_per_second


@dataclass(frozen=True)
class Costs:
    """What a sample costs in each phase, in seconds or in any unit. Source: OrchMLLM, equation 2."""

    vision: CostModel = PER_VISION_UNIT
    llm: CostModel = DEFAULT_COST
    limits: PackLimits | None = None
    """The most vision units that a rank encodes and the most tokens that its LLM gets, where memory is short."""
    padded: bool = False
    """Whether the LLM gets a rank's samples as rows, padded to the longest of them: Algorithm 2 divides them then."""
    ranks_per_node: int | None = None
    """If given, lists of samples stay within nodes as far as they can."""
    link: Link | None = None
    """If given, costs are in seconds, and the moves minimize computing plus exchanging."""
    least_gain: float = 0.01
    """Without a link: a phase that would gain less than this share of its largest rank's cost stays as drawn."""


@dataclass(frozen=True)
class StepPlan:
    """Where the samples of a micro-batch go, on all ranks. Every rank makes the same plan from the same numbers."""

    sizes: Mapping[str, IntArray]
    """Each of ``COLUMNS``, (samples,), over all ranks; other columns may stand beside them."""
    to_vision: Rearrangement
    to_llm: Rearrangement
    costs: Costs
    total_targets: int
    """Target tokens of the whole step: of all its micro-batches."""
    weighed: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """With a link, of each phase: seconds of computing that its move saves, and seconds that its exchanges take."""

    @cached_property
    def features(self) -> Rearrangement:
        """From where samples are encoded to where the LLM gets them, at once."""
        return self.to_llm.after(self.to_vision.inverse())

    @cached_property
    def digest(self) -> int:
        """62 bits of a hash of where all samples go, by which ranks notice that they hold other plans."""
        digest = sha256()
        for ranks in (self.to_vision.source, self.to_vision.destination, self.to_llm.destination):
            digest.update(ranks.astype(np.int32).tobytes())
        return int.from_bytes(digest.digest()[:8], "little") >> 2

    @cached_property
    def imbalance(self) -> dict[str, tuple[float, float]]:
        """The largest rank's cost over the mean, as drawn and as planned, of both phases; 1 where nothing is to do."""
        moves = zip(("vision", "llm"), _phases(self.sizes, self.costs), (self.to_vision, self.to_llm), strict=True)
        return {
            name: (phase.over_mean(Rearrangement(move.source, move.source, move.num_ranks)), phase.over_mean(move))
            for name, phase, move in moves
        }

    def describe(self) -> str:
        """One line, to be printed: how even each phase was and is, or why it stays as it was drawn."""
        parts = []
        moves = (("vision encoder", self.to_vision), ("LLM", self.to_llm))
        for (name, move), (phase, (before, after)) in zip(moves, self.imbalance.items(), strict=True):
            if moved := np.count_nonzero(move.source != move.destination):
                then = f"-> {after:.2f}, {moved} of {len(move)} samples move"
            elif phase in self.weighed:
                saved, taken = (f"{seconds * 1e3:.2f} ms" for seconds in self.weighed[phase])
                then = f"as drawn (to move would save {saved} of computing and take {taken} of exchange)"
            else:
                then = f"as drawn (less than {self.costs.least_gain:.0%} to gain)"
            parts.append(f"{name} {before:.2f} {then}")
        return f"largest rank over mean: {'; '.join(parts)}"


def plan_step(
    source: IntArray, sizes: Mapping[str, IntArray], num_ranks: int, costs: Costs, *, total_targets: int
) -> StepPlan:
    """Divide a micro-batch's samples anew for the vision encoder and for the LLM."""
    if (sizes["llm_tokens"] < 1).any():
        raise DataError(f"samples must have tokens, got none in sample {int(sizes['llm_tokens'].argmin())}")
    # 1. Divide each phase on its own. 2. Keep what was drawn where a move does not pay: by seconds of computing and of
    # exchanges with a link, by the share of the cost that it saves without one.
    phases = _phases(sizes, costs)
    drawn = Rearrangement(source, source, num_ranks)
    divided = [_divided(drawn, phase, costs.ranks_per_node) for phase in phases]
    if costs.link is not None:
        vision, llm, weighed = _weighed(drawn, divided, phases, sizes, costs.link)
        return StepPlan(sizes, vision, llm, costs, total_targets, weighed)
    for number, phase in enumerate(phases):
        before = phase.largest(drawn)
        gains = before - phase.largest(divided[number]) >= costs.least_gain * before
        if not gains and phase.fits(drawn):
            divided[number] = drawn
    return StepPlan(sizes, divided[0], divided[1], costs, total_targets)


@dataclass(frozen=True)
class _Phase:
    cost: CostModel
    loads: Load
    volumes: IntArray
    """What each sample brings to the phase and takes of its limit, (samples,)."""
    limit: int | None
    padded: bool = False

    @cached_property
    def costs(self) -> FloatArray:
        return self.cost(self.loads)  # of each sample

    def of_ranks(self, move: Rearrangement) -> FloatArray:
        """What each rank computes once samples have moved, (num_ranks,)."""
        ranks, num_ranks = move.destination, move.num_ranks
        if not self.padded:
            return np.bincount(ranks, self.costs, num_ranks).astype(np.float64)
        # Each of a rank's rows is as long as the longest.
        counts, longest = np.bincount(ranks, minlength=num_ranks), self._longest(move)
        units, squared = (
            np.bincount(ranks, sizes, num_ranks) for sizes in (self.loads.vision_units, self.loads.vision_squared)
        )
        return self.cost(Load(units, counts * longest, counts * longest**2, squared))

    def _longest(self, move: Rearrangement) -> FloatArray:
        longest = np.zeros(move.num_ranks)
        np.maximum.at(longest, move.destination, self.volumes)
        return longest

    def largest(self, move: Rearrangement) -> float:
        return float(self.of_ranks(move).max(initial=0))

    def over_mean(self, move: Rearrangement) -> float:
        """The rank with most over the mean; 1 where nothing is to do."""
        # Padding is waste: the mean is of real rows, so that the figure counts it.
        mean = float(self.costs.sum()) / move.num_ranks
        return self.largest(move) / mean if mean else 1.0

    def fits(self, move: Rearrangement) -> bool:
        """Whether no rank is over the limit, once samples have moved."""
        if self.limit is None:
            return True
        ranks, num_ranks = move.destination, move.num_ranks
        if self.padded:
            return bool((np.bincount(ranks, minlength=num_ranks) * self._longest(move)).max(initial=0) <= self.limit)
        return bool(np.bincount(ranks, self.volumes, num_ranks).max(initial=0) <= self.limit)


def _phases(sizes: Mapping[str, IntArray], costs: Costs) -> tuple[_Phase, _Phase]:
    tokens, limits = sizes["llm_tokens"].astype(np.float64), costs.limits
    loads = Load(sizes["vision_units"], tokens, tokens**2, sizes["vision_squared"])
    most_units, most_tokens = (None, None) if limits is None else (limits.vision_units, limits.llm_tokens)
    return (
        _Phase(costs.vision, loads, sizes["vision_units"], most_units),
        _Phase(costs.llm, loads, sizes["llm_tokens"], most_tokens, costs.padded),
    )


def _divided(drawn: Rearrangement, phase: _Phase, ranks_per_node: int | None) -> Rearrangement:
    """Bring samples to where the phase is even; a sample that brings nothing to the phase stays where it was drawn."""
    num_ranks = drawn.num_ranks
    if phase.padded:
        destination = divide(phase.volumes, num_ranks, method="padded")
        if not phase.fits(Rearrangement(drawn.source, destination, num_ranks)):
            raise InfeasibleError(
                f"rows must fit within the {phase.limit} tokens of limits on every rank, padding among them, got "
                f"{len(phase.volumes)} samples of up to {phase.volumes.max()} on {num_ranks} ranks; draw fewer at once"
            )
    elif phase.limit is None:  # "even" would leave a tenth of the rest, which is 1 % at most, and take longer
        destination = divide(phase.costs, num_ranks, method="longest_first")
    else:
        destination = divide(phase.costs, num_ranks, sizes=phase.volumes, limits=[phase.limit])
    if ranks_per_node is not None:
        # Which rank takes which of the divided lists does not matter to balance.
        volumes = Rearrangement(drawn.source, destination, num_ranks).sparse_volumes(phase.volumes)
        destination = keep_in_nodes(volumes, ranks_per_node).rank_of[destination]
    return Rearrangement(drawn.source, np.where(phase.volumes == 0, drawn.source, destination), num_ranks)


def _weighed(
    drawn: Rearrangement,
    divided: Sequence[Rearrangement],
    phases: Sequence[_Phase],
    sizes: Mapping[str, IntArray],
    link: Link,
) -> tuple[Rearrangement, Rearrangement, dict[str, tuple[float, float]]]:
    """The moves of both phases that take least time in all, and what each would save and take beside the other."""

    def seconds(vision: Rearrangement, llm: Rearrangement) -> tuple[float, float]:
        """Seconds of computing, until the last rank is done, and of exchanges."""
        pixels, tokens = sizes["vision_units"] * link.vision_unit_bytes, sizes["llm_tokens"] * link.token_bytes
        # Pixels and text leave together; features follow when they are encoded.
        features = (llm.after(vision.inverse()), sizes["image_tokens"] * link.image_token_bytes)
        exchanged = link.seconds((vision, pixels), (llm, tokens)) + link.seconds(features)
        if exchanged or link.phases_meet:
            return phases[0].largest(vision) + phases[1].largest(llm), exchanged
        # Nobody waits between phases: a rank with less of the one may have more of the other.
        return float(np.sum([phase.of_ranks(vision) for phase in phases], axis=0).max()), 0.0

    # Four pairs of moves at most: each phase as drawn, unless that breaks a limit, or as divided.
    choices = [[drawn, move] if phase.fits(drawn) else [move] for phase, move in zip(phases, divided, strict=True)]
    vision, llm = min(product(*choices), key=lambda moves: sum(seconds(*moves)))  # the first of equals: as drawn
    # For the line that says why: each phase moved and not, beside what the other does.
    pairs = {"vision": ((drawn, llm), (divided[0], llm)), "llm": ((vision, drawn), (vision, divided[1]))}
    weighed = {}
    for name, (stays, moves) in pairs.items():
        (before, without), (after, taken) = seconds(*stays), seconds(*moves)
        weighed[name] = (before - after, taken - without)
    return vision, llm, weighed
