"""Dividing a list of samples over ranks, or rollouts over ranks' micro-batches, so that all ranks are done together."""

from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from omnibal.advise.models import Model, read_model
from omnibal.advise.wait import sample_costs
from omnibal.compiled import compiled
from omnibal.cost import CostModel, FloatArray, IntArray, Load, finite_sizes
from omnibal.data.lengths import SampleLengths
from omnibal.device import Device
from omnibal.dispatch.one_cost import differencing, least_squares_within, longest_first, padded, padded_attention
from omnibal.errors import ConfigError, DataError, InfeasibleError
from omnibal.profile.counted import COUNTED_DEVICE, analytic_profile

DivideMethod = Literal["even", "longest_first", "least_squares_within", "padded", "padded_attention", "differencing"]

# Methods for one cost, without limits. ``"even"`` takes several costs and limits, and is not among them.
METHODS: Final[Mapping[str, Callable[[FloatArray, int], IntArray]]] = MappingProxyType(
    {
        "longest_first": longest_first,  # Algorithm 1 of OrchMLLM
        "padded": padded,  # Algorithm 2
        "least_squares_within": least_squares_within,  # Algorithm 4
        "padded_attention": padded_attention,  # Algorithm 5
        "differencing": differencing,  # Karmarkar and Karp
    }
)
PARTNERS: Final = 4  # ranks with least of a cost that the rank with most of it tries to exchange with
EXCHANGES: Final = 8  # at most, per rank
DIFFERENCING_SIZE: Final = 2**18  # samples x ranks up to which differencing takes at most about 0.2 s
ROUNDING: Final = 1e-9  # share of a limit by which sums may exceed it: 0.1 + 0.1 + 0.1 is more than 0.3


def divide(
    costs: npt.ArrayLike,
    num_ranks: int,
    *,
    method: DivideMethod = "even",
    sizes: npt.ArrayLike | None = None,
    limits: npt.ArrayLike | None = None,
) -> IntArray:
    """Say which rank works on which sample.

    Gradients do not depend on it if the loss is a sum over all ranks' samples. Costs may be seconds, tokens, or a
    CostModel of loads (``CostModel(llm_tokens=a, llm_tokens_squared=b)`` is the paper's equation 2).

    Args:
        costs: What each sample costs, (samples,); or several costs that are to be even at once, such as those of the
            vision encoder and of the LLM, (samples, costs). Finite, not negative. For the padded methods: lengths.
        num_ranks: At least 1.
        method: ``"even"`` balances any number of costs and obeys limits; it leaves a tenth of what Algorithm 1 leaves
            uneven. The others, in ``METHODS``, take one cost: ``"longest_first"`` is as fast as sorting.
        sizes: What each sample takes of every limit, (samples, limits); with ``limits`` alone: the costs.
        limits: The most that a rank may hold, (limits,): of tokens, of vision units, of bytes.

    Returns:
        The rank of each sample, (samples,), the same wherever it is computed from the same numbers.

    Raises:
        ConfigError: The arrays do not fit together or hold other numbers; the method is unknown or has no limits.
        InfeasibleError: No division within the limits was found.

    Source: Zheng et al., OrchMLLM, section 5.1 and appendix A; Karmarkar and Karp 1982. Ties go to the lower rank.

    >>> divide([7, 5, 4, 4, 2], 2).tolist()
    [0, 1, 1, 0, 1]
    >>> divide([[3, 0], [3, 0], [0, 9], [0, 9]], 2).tolist()  # each rank gets of both
    [0, 1, 0, 1]
    >>> divide([5, 1, 1], 2, limits=[4])
    Traceback (most recent call last):
        ...
    omnibal.errors.InfeasibleError: sizes must fit within limits on a rank, got 5 of at most 4 (sample 0)
    """
    values = _numbers("costs", costs)
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    if method != "even":
        if method not in METHODS:
            raise ConfigError(f"method must be one of even, {', '.join(METHODS)}, got {method!r}")
        if values.ndim == 2 or limits is not None:
            what = "limits" if limits is not None else f"{values.shape[1]} costs"
            raise ConfigError(f"method must be 'even' for several costs or limits, got {method!r} with {what}")
        return METHODS[method](values, int(num_ranks))
    columns = _columns(values)
    taken, most = _limited(columns, num_ranks, sizes, limits)
    destination = _even(columns, int(num_ranks), taken, most, columns.sum(axis=0) / num_ranks)
    if destination is None:
        fullest = (taken.sum(axis=0) / (num_ranks * most)).max()
        raise InfeasibleError(
            f"limits must leave room for all samples, got {fullest:.1%} full ranks on average and found no division "
            f"of {len(columns)} samples over {num_ranks} ranks; raise the limits or take fewer samples"
        )
    return destination


def divisions_of_seconds(
    seconds: FloatArray, num_ranks: int, *, sizes: FloatArray, limits: FloatArray
) -> list[IntArray]:
    """Divide samples in several ways that obey the limits; the caller keeps the one with the shortest step.

    ``seconds`` are of each sample in each phase, (samples, phases), ``sizes`` (samples, limits), ``limits`` (limits,).
    """
    # Ways: squares of seconds; squares of each phase in parts of its own mean, which evens a short phase too; and, if
    # samples are few, differencing on the sums of phases.
    mean = seconds.sum(axis=0) / num_ranks
    units = [np.full_like(mean, mean.sum())]
    if np.count_nonzero(mean) > 1:
        units.append(mean)
    found = [_even(seconds, num_ranks, sizes, limits, unit) for unit in units]
    if len(seconds) * num_ranks <= DIFFERENCING_SIZE:
        destination = differencing(seconds.sum(axis=1), num_ranks)
        held = [np.bincount(destination, size, num_ranks).max() for size in sizes.T]
        if np.all(np.array(held) <= limits * (1 + ROUNDING)):
            found.append(destination)
    return [destination for destination in found if destination is not None]


def _limited(
    columns: FloatArray, num_ranks: int, sizes: npt.ArrayLike | None, limits: npt.ArrayLike | None
) -> tuple[FloatArray, FloatArray]:
    most = np.zeros(0) if limits is None else _numbers("limits", limits, (1,))
    if sizes is None:
        taken = columns if limits is not None else np.zeros((len(columns), 0))
    else:
        taken = _columns(_numbers("sizes", sizes))
    if taken.shape != (len(columns), len(most)):
        raise ConfigError(
            f"sizes must be of shape ({len(columns)} samples, {len(most)} limits), got {taken.shape}; give limits too"
        )
    # What no division can mend is named: a sample over a limit, or more in all than all ranks hold. Whether the rest
    # fits, only the search tells.
    for sample, limit in np.argwhere(taken > most):
        got = f"{taken[sample, limit]:g} of at most {most[limit]:g} (sample {sample})"
        raise InfeasibleError(f"sizes must fit within limits on a rank, got {got}")
    for limit in np.flatnonzero(taken.sum(axis=0) > num_ranks * most * (1 + ROUNDING)):
        got = f"{taken[:, limit].sum():g} for {num_ranks} ranks of at most {most[limit]:g}"
        raise InfeasibleError(f"sizes must fit within the limits of all ranks, got {got}")
    return taken, most


def _numbers(name: str, values: npt.ArrayLike, dimensions: tuple[int, ...] = (1, 2)) -> FloatArray:
    array = finite_sizes(name, values)
    if array.ndim not in dimensions:
        raise ConfigError(f"{name} must have {' or '.join(map(str, dimensions))} dimensions, got shape {array.shape}")
    return array


def _columns(values: FloatArray) -> FloatArray:
    return values[:, None] if values.ndim == 1 else values


def _even(costs: FloatArray, num_ranks: int, sizes: FloatArray, most: FloatArray, unit: FloatArray) -> IntArray | None:
    """Divide samples so that ranks have about as much of every cost and hold no more than ``most``; None if none fits.

    Costs compare in parts of ``unit``, (costs,). Costs of unlike units need the mean rank's load of each, which weighs
    all costs alike: if a rank gets few samples, a small cost then hinders a large one. Seconds need one unit for all.

    O(n num_ranks), compiled: 0.2 s of one core for 2560 ranks with 60 samples each and one cost.
    """
    # 1. Large samples first, each to the rank where the sum of all squared loads grows least, loads measured in
    #    units: that is the rank with least of what this sample has most of, and for one cost Algorithm 1.
    # 2. The rank with most of a cost exchanges a sample (for one or for none) with a rank that has little of it, as
    #    long as squares fall.
    # Sizes are in parts of the limits, so that limits of unlike units compare.
    parts = np.ascontiguousarray(costs / np.where(unit > 0, unit, 1.0))
    shares = np.ascontiguousarray(sizes / np.where(most > 0, most, 1.0))
    room = np.where(most > 0, 1 + ROUNDING, 0.0)
    # Where samples do not fit in the order of their costs, they may fit in the order of what they take of the limits.
    for key in (parts, shares):
        destination = _place(np.argsort(-key.max(axis=1, initial=0.0), kind="stable"), parts, shares, room, num_ranks)
        if len(destination) == len(costs):
            _exchange(destination, parts, shares, room, num_ranks)
            return destination
    return None


@compiled
def _place(order: IntArray, parts: FloatArray, shares: FloatArray, room: FloatArray, num_ranks: int) -> IntArray:
    """Each sample in ``order`` to the rank with room where squares grow least; an empty array if one has none.

    ``parts`` are costs in parts of their units, (samples, costs); ``shares`` is what samples take of the limits, in
    parts of them, (samples, limits); ``room`` the most of each that a rank may hold: 1 and a rounding error, or 0.
    """
    loads, held = np.zeros((num_ranks, parts.shape[1])), np.zeros((num_ranks, shares.shape[1]))
    destination = np.empty(len(order), dtype=np.int64)
    for sample in order:
        best, least = -1, np.inf
        for rank in range(num_ranks):
            # (load + part)² - load² is part² + 2 load part; the first is the same on all ranks.
            growth = 0.0
            for cost in range(parts.shape[1]):
                growth += loads[rank, cost] * parts[sample, cost]
            if growth < least:
                fits = True
                for limit in range(len(room)):
                    fits = fits and held[rank, limit] + shares[sample, limit] <= room[limit]
                if fits:
                    best, least = rank, growth
        if best < 0:
            return destination[:0]
        destination[sample] = best
        loads[best] += parts[sample]
        held[best] += shares[sample]
    return destination


@compiled
def _exchange(destination: IntArray, parts: FloatArray, shares: FloatArray, room: FloatArray, num_ranks: int) -> None:
    """Even out the ranks with most of a cost, cost by cost in turn, until none of them can be mended."""
    num_costs = parts.shape[1]
    loads, held = np.zeros((num_ranks, num_costs)), np.zeros((num_ranks, shares.shape[1]))
    for sample, rank in enumerate(destination):
        loads[rank] += parts[sample]
        held[rank] += shares[sample]
    stuck, tries = 0, EXCHANGES * num_ranks
    # Costs take turns; all are stuck when the rank with most of each has found no exchange.
    while stuck < num_costs and tries > 0:
        cost = tries % num_costs
        tries -= 1
        full = int(np.argmax(loads[:, cost]))
        mended = False
        for partner in np.argsort(loads[:, cost])[:PARTNERS]:
            if partner != full and _exchange_best(destination, parts, shares, room, loads, held, full, partner):
                mended = True
                break
        stuck = 0 if mended else stuck + 1


@compiled
def _exchange_best(
    destination: IntArray,
    parts: FloatArray,
    shares: FloatArray,
    room: FloatArray,
    loads: FloatArray,
    held: FloatArray,
    full: int,
    partner: int,
) -> bool:
    """Make the one exchange between two ranks that lets squares fall most, if any does."""
    num_costs, num_limits = parts.shape[1], shares.shape[1]
    # All pairs of a sample of the full rank, and one of the partner's or -1, where nothing comes back.
    theirs = np.append(np.flatnonzero(destination == partner), -1)
    best_given, best_taken, best = -1, -1, -1e-12  # a change that is no rounding error
    for given in np.flatnonzero(destination == full):
        for taken in theirs:
            # Moving d from one load to the other changes the sum of squares by 2 d (d - difference).
            change = 0.0
            for cost in range(num_costs):
                moved = parts[given, cost] - (parts[taken, cost] if taken >= 0 else 0.0)
                change += moved * (moved - (loads[full, cost] - loads[partner, cost]))
            if change >= best:
                continue
            fits = True
            for limit in range(num_limits):
                moved = shares[given, limit] - (shares[taken, limit] if taken >= 0 else 0.0)
                fits = fits and held[partner, limit] + moved <= room[limit] and held[full, limit] - moved <= room[limit]
            if fits:
                best_given, best_taken, best = int(given), int(taken), change
    if best_given < 0:
        return False
    for sample, source, target in ((best_given, full, partner), (best_taken, partner, full)):
        if sample >= 0:
            destination[sample] = target
            loads[source] -= parts[sample]
            loads[target] += parts[sample]
            held[source] -= shares[sample]
            held[target] += shares[sample]
    return True


def balanced_rows(
    lengths: SampleLengths,
    model: Any,
    ranks: int,
    token_budget: int,
    *,
    micro_batches: int = 1,
    equal_counts: bool = False,
) -> list[list[IntArray]]:
    """Divide rollouts into micro-batches that take all ranks equally long, in the vision encoder and in the LLM.

    All ranks get equally many micro-batches, as few as the budget allows, and run those of nearest cost at the same
    time. Of several divisions the one is kept whose step is shortest if ranks wait for the slowest encoder and LLM of
    each micro-batch (FSDP, ZeRO 3); every rank finds the same one. Gradients do not depend on it if the loss is a sum
    over all ranks' tokens divided by their number.

    Args:
        lengths: What each rollout brings, prompt and answer together: ``vision_units`` of the prompt's images (tiles,
            or patches with their ``vision_squared``) and ``llm_tokens``. Each answer to a prompt is a rollout.
        model: What sets the costs: a model's name (``"Qwen2.5-VL-7B"``), folder or ``config.json``, a configuration or
            model of transformers, or the two ``CostModel`` of encoder and LLM, in one unit.
        ranks: Data-parallel ranks.
        token_budget: The most tokens that a micro-batch may hold, padding not counted.
        micro_batches: The least number of micro-batches of a rank, where the trainer asks for more than the budget.
        equal_counts: Whether all micro-batches hold equally many rollouts, as some trainers demand.

    Returns:
        ``rows[rank][micro_batch]``, numbers of rollouts, ascending; empty only if rollouts are too few for all.

    Raises:
        ConfigError: The model is unknown, or a number is below 1.
        DataError: ``lengths`` is empty, or a rollout has no tokens.
        InfeasibleError: A rollout is longer than the budget, or equal counts cannot keep to it.

    >>> lengths = SampleLengths([4, 0, 0, 4], [900, 800, 300, 400])
    >>> rows = balanced_rows(lengths, "InternVL3-8B", ranks=2, token_budget=2048)
    >>> [[row.tolist() for row in rank] for rank in rows]
    [[[0, 2]], [[1, 3]]]
    """
    _check_rollouts(lengths, ranks=ranks, token_budget=token_budget, micro_batches=micro_batches)
    costs, tokens = _rollout_costs(lengths, model), lengths.llm_tokens.astype(np.int64)
    fewest = max(micro_batches, ceil(int(tokens.sum()) / (ranks * token_budget)))
    # Rollouts are indivisible, so the fewest micro-batches may not do. One rollout in each always does.
    for number in range(fewest, max(fewest, ceil(len(lengths) / ranks)) + 1):
        places = ranks * number
        if equal_counts and len(lengths) % places:
            continue
        sizes = np.stack([tokens, np.ones_like(tokens)], axis=1, dtype=np.float64)
        limits = np.array([token_budget, len(lengths) // places if equal_counts else len(lengths)], float)
        found = divisions_of_seconds(costs, places, sizes=sizes, limits=limits)
        dealt = [(place, _deal(place, costs, ranks, number)) for place in found]
        if dealt:
            place, held = min(dealt, key=lambda one: _step_seconds(one[0], one[1], costs))
            ends = np.bincount(place, minlength=places).cumsum()
            rollouts = np.split(np.argsort(place, kind="stable"), ends[:-1])
            return [[rollouts[taken] for taken in rank] for rank in held]
    raise InfeasibleError(
        f"{len(lengths)} rollouts must divide into equal counts of at most {token_budget} tokens, got no such division "
        f"over {ranks} ranks of at least {fewest} micro-batches; raise token_budget or take another number of rollouts"
    )


def _check_rollouts(lengths: SampleLengths, *, token_budget: int, **numbers: int) -> None:
    for name, number in {"token_budget": token_budget, **numbers}.items():
        if number < 1:
            raise ConfigError(f"{name} must be at least 1, got {number}")
    if len(lengths) == 0:
        raise DataError("rollouts must be at least one, got none")
    longest, shortest = int(lengths.llm_tokens.argmax()), int(lengths.llm_tokens.argmin())
    if lengths.llm_tokens[shortest] < 1:
        raise DataError(f"rollouts must have tokens, got none in rollout {shortest}")
    if (found := int(lengths.llm_tokens[longest])) > token_budget:
        raise InfeasibleError(
            f"rollouts must be no longer than token_budget, got {found} of at most {token_budget} tokens "
            f"(rollout {longest}); raise token_budget or cut answers at a smaller length"
        )


def _rollout_costs(lengths: SampleLengths, model: Any) -> FloatArray:
    """Seconds of each rollout in the encoder and in the LLM, (rollouts, 2)."""
    tokens = lengths.llm_tokens.astype(np.float64)
    squared = 0 if lengths.vision_squared is None else lengths.vision_squared
    load = Load(lengths.vision_units, tokens, tokens**2, squared, lengths.target_tokens)
    return np.stack([np.asarray(cost(load)) for cost in _cost_models(model)], axis=1)


def _cost_models(model: Any) -> tuple[CostModel, CostModel]:
    if isinstance(model, tuple) and len(model) == 2 and all(isinstance(cost, CostModel) for cost in model):
        return model
    try:
        costs = sample_costs(analytic_profile(_known(model).records, Device.named(COUNTED_DEVICE)))
    except ConfigError as error:
        raise ConfigError(f"{error}; or give the two CostModel of encoder and LLM") from None
    return costs["vision"], costs["language"]


def _known(model: Any) -> Model:
    if isinstance(model, str | Path):
        return read_model(str(model))
    config = getattr(model, "config", model)
    values = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
    if "model_type" not in values:
        got = type(model).__name__
        raise ConfigError(f"model must be a name, a folder, a configuration or a model of transformers, got {got}")
    return Model.of(str(values["model_type"]), values)


def _deal(place: IntArray, costs: FloatArray, ranks: int, micro_batches: int) -> IntArray:
    """Deal the places of a division to ranks, (ranks, micro_batches): places of nearest cost run at the same time."""
    of_places = np.bincount(place, costs.sum(axis=1), minlength=ranks * micro_batches)
    held, sums = np.empty((ranks, micro_batches), dtype=np.int64), np.zeros(ranks)
    # A row of `ranks` places, dearest first; in each row the rank with least so far gets the dearest place.
    for micro_batch, row in enumerate(np.argsort(-of_places, kind="stable").reshape(micro_batches, ranks)):
        taking = np.argsort(sums, kind="stable")
        held[taking, micro_batch] = row
        sums[taking] += of_places[row]
    return held


def _step_seconds(place: IntArray, held: IntArray, costs: FloatArray) -> tuple[float, float]:
    """Seconds of the step where ranks wait in each phase of each micro-batch; then where they wait once a step."""
    of_places = np.stack([np.bincount(place, cost, minlength=held.size) for cost in costs.T], axis=1)
    seconds = of_places[held]  # (ranks, micro-batches, phases)
    return float(seconds.max(axis=0).sum()), float(seconds.sum(axis=(1, 2)).max())
