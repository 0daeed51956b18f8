"""Where each sample of a micro-batch is encoded, by each encoder, and where the LLM gets it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from omnibal.cost import CostModel, FloatArray, IntArray, Load
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.dispatch.divide import METHODS, DivideMethod, divide
from omnibal.dispatch.rearrangement import Rearrangement, keep_in_nodes
from omnibal.errors import ConfigError, DataError, InfeasibleError

PER_UNIT: Final = CostModel(vision_units=1)
MOST_ENCODERS: Final = 4  # with a link, all 2^(encoders + 1) choices of which phases move are weighed
PADDED: Final = ("padded", "padded_attention")
BY_LENGTH: Final = (*PADDED, "least_squares_within")
"""Methods that divide by the lengths of samples; the others divide by their costs."""


def columns(encoders: Sequence[str]) -> tuple[str, ...]:
    """What a plan knows of each sample: units, Σ units² and features of each encoder; tokens and targets of the LLM."""
    return (
        *(f"{name}_{what}" for name in encoders for what in ("units", "squared", "tokens")),
        *("llm_tokens", "target_tokens"),
    )


def phase_name(phase: str) -> str:
    return "LLM" if phase == "llm" else f"{phase} encoder"


@dataclass(frozen=True)
class Link:
    """What it takes to exchange samples, measured on the ranks that do."""

    latency_seconds: float  # seconds of an exchange, however little moves
    bytes_per_second: float  # bytes that a rank sends while it receives as many
    # Of each encoder: the input of one unit, such as the pixels of a tile or patch.
    unit_bytes: Mapping[str, float]
    # Of each encoder: the features of one token, and their gradients on the way back.
    feature_bytes: Mapping[str, float]
    token_bytes: float  # id, label and positions of a text token
    # Whether ranks wait for each other between phases even where nothing moves, as under ZeRO 3 and FSDP.
    phases_meet: bool = True

    def _exchange(self, traffic: Sequence[FloatArray | None]) -> float:
        """Seconds of one exchange: those of the rank that sends or receives most; 0 where nothing moves."""
        moving = [loads for loads in traffic if loads is not None]
        if not moving:
            return 0.0
        busiest = float(np.sum(moving, axis=0).max())
        return self.latency_seconds + busiest / self.bytes_per_second

    def seconds_of_all(
        self,
        moves: Mapping[str, Rearrangement],
        sizes: Mapping[str, IntArray],
        known: dict[tuple[Rearrangement, ...], FloatArray | None] | None = None,
    ) -> float:
        """Seconds of both exchanges of a micro-batch: of all inputs with the text, then of all features.

        ``moves`` has an entry for each encoder, by its name, and ``"llm"``. ``known`` is what ranks send and receive by
        the moves of earlier calls with these sizes, and is added to.
        """
        known = {} if known is None else known
        llm, encoders = moves["llm"], {name: move for name, move in moves.items() if name != "llm"}
        for name, move in encoders.items():
            if (move,) not in known:
                known[move,] = _traffic(move, sizes[f"{name}_units"] * self.unit_bytes[name])
            if (move, llm) not in known:
                size = sizes[f"{name}_tokens"] * self.feature_bytes[name]
                known[move, llm] = _traffic(llm.after(move.inverse()), size)
        if (llm,) not in known:
            known[llm,] = _traffic(llm, sizes["llm_tokens"] * self.token_bytes)
        inputs = [known[move,] for move in moves.values()]
        return self._exchange(inputs) + self._exchange([known[move, llm] for move in encoders.values()])


def _traffic(move: Rearrangement, sizes: npt.ArrayLike) -> FloatArray | None:
    """What each rank sends, and what it receives, (2, num_ranks); None where nothing moves."""
    if move.is_still:
        return None
    moved = np.where(move.source != move.destination, sizes, 0)
    return np.stack([np.bincount(ranks, moved, move.num_ranks) for ranks in (move.source, move.destination)])


@dataclass(frozen=True)
class PhaseCosts:
    """What a sample costs in one phase, and how samples are divided for it."""

    cost: CostModel = PER_UNIT
    """In seconds or in any unit. An encoder's units, whichever they are, count as ``vision_units``, and the sum of
    their squares as ``vision_squared``."""
    limit: int | None = None
    """The most units that a rank encodes, or tokens that its LLM gets, where memory is short."""
    method: DivideMethod | None = None
    """One of ``divide``: by default ``"longest_first"``, with a limit ``"even"``. ``"padded"``: samples are rows, each
    as long as the longest on its rank; ``"padded_attention"``: in attention alone."""

    def __post_init__(self) -> None:
        if self.method not in (None, "even", *METHODS):
            raise ConfigError(f"method must be one of even, {', '.join(METHODS)}, got {self.method!r}")


@dataclass(frozen=True)
class Costs:
    """What a sample costs in each phase. Source: Zheng et al., OrchMLLM, equation 2 and section 6."""

    encoders: Mapping[str, PhaseCosts] = field(default_factory=lambda: {"vision": PhaseCosts()})
    """Of each encoder, in the order in which they run; at most four."""
    llm: PhaseCosts = PhaseCosts(DEFAULT_COST)
    ranks_per_node: int | None = None
    """If given, lists of samples stay within nodes as far as they can."""
    link: Link | None = None
    """If given, costs are in seconds, and the moves minimize computing plus exchanging."""
    least_gain: float = 0.01
    """Without a link: a phase that would gain less than this share of its largest rank's cost stays as drawn."""

    def __post_init__(self) -> None:
        if len(self.encoders) > MOST_ENCODERS or "llm" in self.encoders:
            got = ", ".join(self.encoders)
            raise ConfigError(f"encoders must be at most {MOST_ENCODERS}, none of them called llm, got {got}")


@dataclass(frozen=True)
class StepPlan:
    """Where the samples of a micro-batch go, on all ranks. Every rank makes the same plan from the same numbers."""

    # Each of ``columns(encoders)``, (samples,), over all ranks; other columns may stand beside them.
    sizes: Mapping[str, IntArray]
    # From where samples were drawn to where each encoder works on them, by its name, and the LLM, ``"llm"``.
    moves: Mapping[str, Rearrangement]
    costs: Costs
    total_targets: float  # target tokens of the whole step: of all its micro-batches
    # With a link, of each phase: seconds of computing that its move saves, and seconds that its exchanges take.
    weighed: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def features(self) -> dict[str, Rearrangement]:
        """Of each encoder: from where samples are encoded to where the LLM gets them, at once."""
        return {name: self.moves["llm"].after(self.moves[name].inverse()) for name in self.costs.encoders}

    @cached_property
    def digest(self) -> int:
        """62 bits of a hash of where all samples go, by which ranks notice that they hold other plans."""
        digest = sha256()
        for ranks in (self.moves["llm"].source, *(move.destination for move in self.moves.values())):
            digest.update(ranks.astype(np.int32).tobytes())
        return int.from_bytes(digest.digest()[:8], "little") >> 2

    @cached_property
    def imbalance(self) -> dict[str, tuple[float, float]]:
        """The largest rank's cost over the mean, as drawn and as planned, of each phase; 1 where nothing is to do."""
        drawn = self.moves["llm"].inverse().after(self.moves["llm"])
        phases = _phases(self.sizes, self.costs)
        return {
            name: (phases[name].over_mean(drawn), phases[name].over_mean(move)) for name, move in self.moves.items()
        }

    def describe(self) -> str:
        parts = []
        for phase, (before, after) in self.imbalance.items():
            move = self.moves[phase]
            if moved := np.count_nonzero(move.source != move.destination):
                then = f"-> {after:.2f}, {moved} of {len(move)} samples move"
            elif phase in self.weighed:
                saved, taken = (f"{seconds * 1e3:.2f} ms" for seconds in self.weighed[phase])
                then = f"as drawn (to move would save {saved} of computing and take {taken} of exchange)"
            else:
                then = f"as drawn (less than {self.costs.least_gain:.0%} to gain)"
            parts.append(f"{phase_name(phase)} {before:.2f} {then}")
        return f"largest rank over mean: {'; '.join(parts)}"


def plan_step(
    source: IntArray, sizes: Mapping[str, IntArray], num_ranks: int, costs: Costs, *, total_targets: float
) -> StepPlan:
    """Divide a micro-batch's samples anew for each encoder and for the LLM."""
    if (sizes["llm_tokens"] < 1).any():
        raise DataError(f"samples must have tokens, got none in sample {int(sizes['llm_tokens'].argmin())}")
    # 1. Divide each phase on its own. 2. Keep what was drawn where a move does not pay: by seconds of computing and of
    # exchanges with a link, by the share of the cost that it saves without one.
    phases = _phases(sizes, costs)
    drawn = Rearrangement(source, source, num_ranks)
    moves = {name: _divided(drawn, phase, costs.ranks_per_node) for name, phase in phases.items()}
    if costs.link is not None:
        moves, weighed = _weighed(drawn, moves, phases, sizes, costs.link)
        return StepPlan(sizes, moves, costs, total_targets, weighed)
    for name, phase in phases.items():
        before = phase.largest(drawn)
        gains = before - phase.largest(moves[name]) >= costs.least_gain * before
        if not gains and phase.fits(drawn):
            moves[name] = drawn
    return StepPlan(sizes, moves, costs, total_targets)


@dataclass(frozen=True, eq=False)
class _Phase:
    told: PhaseCosts
    loads: Mapping[str, FloatArray]  # what each sample brings, by the names of ``Load``, (samples,)
    # What the phase works on, and what its limit counts: a column of the loads, whose squares are ``squared``.
    units: str
    squared: str

    @property
    def volumes(self) -> FloatArray:
        return self.loads[self.units]

    @cached_property
    def costs(self) -> FloatArray:
        return self.told.cost(Load(**self.loads))  # of each sample

    def of_ranks(self, move: Rearrangement) -> FloatArray:
        """What each rank computes once samples have moved, (num_ranks,)."""
        ranks, num_ranks = move.destination, move.num_ranks
        if self.told.method not in PADDED:
            return np.bincount(ranks, self.costs, num_ranks).astype(np.float64)
        # Each of a rank's rows is as long as the longest: in all that works on tokens one by one, and in attention.
        rows, longest = self._rows(move)
        sums: dict[str, FloatArray] = {
            name: np.bincount(ranks, values, num_ranks).astype(np.float64) for name, values in self.loads.items()
        }
        if self.told.method == "padded":
            sums[self.units] = rows * longest
        return self.told.cost(Load(**sums | {self.squared: rows * longest**2}))

    def _rows(self, move: Rearrangement) -> tuple[FloatArray, FloatArray]:
        longest = np.zeros(move.num_ranks)
        np.maximum.at(longest, move.destination, self.volumes)
        return np.bincount(move.destination, self.volumes > 0, move.num_ranks).astype(np.float64), longest

    def largest(self, move: Rearrangement) -> float:
        return float(self.of_ranks(move).max(initial=0))

    def over_mean(self, move: Rearrangement) -> float:
        """The rank with most over the mean; 1 where nothing is to do."""
        # Padding is waste: the mean is of real rows, so that the figure counts it.
        mean = float(self.costs.sum()) / move.num_ranks
        return self.largest(move) / mean if mean else 1.0

    def fits(self, move: Rearrangement) -> bool:
        if self.told.limit is None:
            return True
        if self.told.method == "padded":
            rows, longest = self._rows(move)
            return bool((rows * longest).max(initial=0) <= self.told.limit)
        return bool(np.bincount(move.destination, self.volumes, move.num_ranks).max(initial=0) <= self.told.limit)


def _phases(sizes: Mapping[str, IntArray], costs: Costs) -> dict[str, _Phase]:
    """Make the phase of each encoder, by its name, and the LLM's, ``"llm"``, which comes last."""
    tokens = sizes["llm_tokens"].astype(np.float64)
    text = {"llm_tokens": tokens, "llm_tokens_squared": tokens**2}

    def loads(encoder: str) -> dict[str, FloatArray]:
        units, squared = (sizes[f"{encoder}_{what}"].astype(np.float64) for what in ("units", "squared"))
        return {"vision_units": units, "vision_squared": squared, **text}

    phases = {
        name: _Phase(told, loads(name), "vision_units", "vision_squared") for name, told in costs.encoders.items()
    }
    zeros = {"vision_units": 0 * tokens, **text}
    return phases | {"llm": _Phase(costs.llm, zeros, "llm_tokens", "llm_tokens_squared")}


def _divided(drawn: Rearrangement, phase: _Phase, ranks_per_node: int | None) -> Rearrangement:
    """Bring samples to where the phase is even; a sample that brings nothing to the phase stays where it was drawn."""
    num_ranks, volumes, limit = drawn.num_ranks, phase.volumes, phase.told.limit
    # Without limits "even" would leave a tenth of what Algorithm 1 leaves, which is 1 % at most, and take longer.
    method = phase.told.method or ("longest_first" if limit is None else "even")
    if method == "even":
        sizes, limits = (None, None) if limit is None else (volumes, [limit])
        destination = divide(phase.costs, num_ranks, sizes=sizes, limits=limits)
    else:
        # A sample without units is no row.
        rows = volumes > 0 if method in PADDED else slice(None)
        destination = drawn.source.copy()
        destination[rows] = divide((volumes if method in BY_LENGTH else phase.costs)[rows], num_ranks, method=method)
        if not phase.fits(Rearrangement(drawn.source, destination, num_ranks)):
            raise InfeasibleError(
                f"rows must fit within the {limit} tokens of limits on every rank, padding among them, got "
                f"{len(volumes)} samples of up to {volumes.max():.0f} on {num_ranks} ranks; draw fewer at once"
            )
    if ranks_per_node is not None:
        # Which rank takes which of the divided lists does not matter to balance.
        carried = Rearrangement(drawn.source, destination, num_ranks).volumes(volumes)
        destination = keep_in_nodes(carried, ranks_per_node).rank_of[destination]
    return Rearrangement(drawn.source, np.where(volumes == 0, drawn.source, destination), num_ranks)


def _weighed(
    drawn: Rearrangement,
    divided: Mapping[str, Rearrangement],
    phases: Mapping[str, _Phase],
    sizes: Mapping[str, IntArray],
    link: Link,
) -> tuple[dict[str, Rearrangement], dict[str, tuple[float, float]]]:
    """The moves of all phases that take least time in all, and what each would save and take beside the others."""
    # As drawn, a move of its own in each phase: what it carries is known by it.
    still = {name: Rearrangement(drawn.source, drawn.source, drawn.num_ranks) for name in phases}
    known: dict[tuple[Rearrangement, ...], FloatArray | None] = {}
    of_ranks = {move: phases[name].of_ranks(move) for moves in (still, divided) for name, move in moves.items()}

    def seconds(moves: Mapping[str, Rearrangement]) -> tuple[float, float]:
        """Seconds of computing, until the last rank is done, and of exchanges."""
        exchanged, busy = link.seconds_of_all(moves, sizes, known), [of_ranks[move] for move in moves.values()]
        if exchanged or link.phases_meet:
            return sum(float(seconds.max(initial=0)) for seconds in busy), exchanged
        # Nobody waits between phases: a rank with less of the one may have more of the other.
        return float(np.sum(busy, axis=0).max()), 0.0

    # Two choices a phase: as drawn, unless that breaks a limit, or as divided.
    choices = [[still[name], divided[name]] if phase.fits(drawn) else [divided[name]] for name, phase in phases.items()]
    combined = (dict(zip(phases, moves, strict=True)) for moves in product(*choices))
    best = min(combined, key=lambda moves: sum(seconds(moves)))  # the first of equals: as drawn
    # For the line that says why: each phase moved and not, beside what the others do.
    weighed = {}
    for name in phases:
        (before, without), (after, taken) = (seconds({**best, name: move}) for move in (still[name], divided[name]))
        weighed[name] = (before - after, taken - without)
    return best, weighed
