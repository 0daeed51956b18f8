"""Rollouts of reinforcement learning, divided into every rank's micro-batches."""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np

from omnibal.advise.models import Model, read_model
from omnibal.advise.wait import sample_costs
from omnibal.cost import CostModel, FloatArray, IntArray, Load
from omnibal.data.lengths import SampleLengths
from omnibal.device import Device
from omnibal.dispatch.divide import divide
from omnibal.errors import ConfigError, DataError, InfeasibleError
from omnibal.profile.counted import analytic_profile

COUNTED_ON: Final = "A100-80GB"
"""The device whose seconds are counted; only the ratio of the encoder's to the LLM's matters to a division."""

Rows = list[list[IntArray]]
"""``rows[rank][micro_batch]``: numbers of rollouts."""


def balanced_rows(
    lengths: SampleLengths,
    model: Any,
    ranks: int,
    token_budget: int,
    *,
    micro_batches: int = 1,
    equal_counts: bool = False,
) -> Rows:
    """Divide rollouts into micro-batches that take all ranks equally long, in the vision encoder and in the LLM.

    All ranks get equally many micro-batches, as few as the budget allows. Ranks run micro-batches of nearest cost at
    the same time. Gradients do not depend on the division if the loss is a sum over all ranks' tokens divided by their
    number. Every rank computes the same division from the same numbers.

    Args:
        lengths: What each rollout brings, prompt and answer together: ``vision_units`` of the prompt's images (tiles,
            or patches with their ``vision_squared``) and ``llm_tokens``. The answers to one prompt are one entry each.
        model: What sets the costs: a published model's name (``"Qwen2.5-VL-7B"``), a Hugging Face folder or
            ``config.json``, a configuration of transformers, a model that has one as ``.config``, or the two
            ``CostModel`` of encoder and LLM, in one unit.
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
    for name, number in (("ranks", ranks), ("token_budget", token_budget), ("micro_batches", micro_batches)):
        if number < 1:
            raise ConfigError(f"{name} must be at least 1, got {number}")
    _check(lengths, token_budget)
    costs, tokens = _costs(lengths, model), lengths.llm_tokens.astype(np.int64)
    fewest = max(micro_batches, ceil(int(tokens.sum()) / (ranks * token_budget)))
    # Rollouts are indivisible, so the fewest micro-batches may not do. One rollout in each always does.
    for number in range(fewest, max(fewest, ceil(len(lengths) / ranks)) + 1):
        places = ranks * number
        if equal_counts and len(lengths) % places:
            continue
        counts, most = np.ones_like(tokens), len(lengths) // places if equal_counts else len(lengths)
        try:
            place = divide(costs, places, sizes=np.stack([tokens, counts], axis=1), limits=[token_budget, most])
        except InfeasibleError:
            continue
        return _rows(place, costs.sum(axis=1), ranks, number)
    raise InfeasibleError(
        f"{len(lengths)} rollouts must divide into equal counts of at most {token_budget} tokens, got no such division "
        f"over {ranks} ranks of at least {fewest} micro-batches; raise token_budget or take another number of rollouts"
    )


def _check(lengths: SampleLengths, token_budget: int) -> None:
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


def _costs(lengths: SampleLengths, model: Any) -> FloatArray:
    """Seconds of each rollout in the encoder and in the LLM, (rollouts, 2)."""
    tokens = lengths.llm_tokens.astype(np.float64)
    squared = 0 if lengths.vision_squared is None else lengths.vision_squared
    load = Load(lengths.vision_units, tokens, tokens**2, squared, lengths.target_tokens)
    return np.stack([np.asarray(cost(load)) for cost in _cost_models(model)], axis=1)


def _cost_models(model: Any) -> tuple[CostModel, CostModel]:
    if isinstance(model, tuple):
        if len(model) != 2 or not all(isinstance(cost, CostModel) for cost in model):
            raise ConfigError(f"model must be the two CostModel of encoder and LLM where it is a tuple, got {model!r}")
        return model
    try:
        costs = sample_costs(analytic_profile(_known(model).records, Device.named(COUNTED_ON)))
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


def _rows(place: IntArray, seconds: FloatArray, ranks: int, micro_batches: int) -> Rows:
    """Deal the places of a division to ranks: those of nearest cost run at the same time, and ranks' sums are even."""
    of_places = np.bincount(place, seconds, minlength=ranks * micro_batches)
    ends = np.bincount(place, minlength=ranks * micro_batches).cumsum()
    rollouts = np.split(np.argsort(place, kind="stable"), ends[:-1])
    held: Rows = [[] for _ in range(ranks)]
    sums = np.zeros(ranks)
    # A row of `ranks` places, dearest first; in each row the rank with least so far gets the dearest place.
    for row in np.argsort(-of_places, kind="stable").reshape(micro_batches, ranks):
        for rank, taken in zip(np.argsort(sums, kind="stable"), row, strict=True):
            held[rank].append(rollouts[taken])
            sums[rank] += of_places[taken]
    return held
