"""Dividing a list of samples over ranks, so that all ranks are done together."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from omnibal.cost import FloatArray, IntArray
from omnibal.dispatch.differencing import differencing
from omnibal.dispatch.even import ROUNDING, even
from omnibal.dispatch.greedy import least_squares_within, longest_first
from omnibal.dispatch.padded import padded, padded_attention
from omnibal.errors import ConfigError, InfeasibleError

DivideMethod = Literal["even", "longest_first", "least_squares_within", "padded", "padded_attention", "differencing"]

METHODS: Final[Mapping[str, Callable[[FloatArray, int], IntArray]]] = MappingProxyType(
    {
        "longest_first": longest_first,  # Algorithm 1 of OrchMLLM
        "padded": padded,  # Algorithm 2
        "least_squares_within": least_squares_within,  # Algorithm 4
        "padded_attention": padded_attention,  # Algorithm 5
        "differencing": differencing,  # Karmarkar and Karp
    }
)
"""Of one cost and without limits. ``"even"`` takes both and is not among them."""


def divide(
    costs: npt.ArrayLike,
    num_ranks: int,
    *,
    method: DivideMethod = "even",
    sizes: npt.ArrayLike | None = None,
    limits: npt.ArrayLike | None = None,
) -> IntArray:
    """Say which rank works on which sample.

    Gradients do not depend on it, as long as the loss is a sum over all ranks' samples; how long the slowest rank takes
    does. Needs no torch and knows nothing of models: costs may be seconds, tokens, or a CostModel of loads
    (``CostModel(llm_tokens=a, llm_tokens_squared=b)(Load(0, tokens, tokens**2))`` is the paper's equation 2).

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
    values = _numbers("costs", costs, dimensions=(1, 2))
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
    most = np.zeros(0) if limits is None else _numbers("limits", limits, dimensions=(1,))
    if sizes is None:
        taken = columns if limits is not None else np.zeros((len(columns), 0))
    else:
        taken = _columns(_numbers("sizes", sizes, dimensions=(1, 2)))
    if taken.shape != (len(columns), len(most)):
        raise ConfigError(
            f"sizes must be of shape ({len(columns)} samples, {len(most)} limits), got {taken.shape}; give limits too"
        )
    _refuse_too_much(taken, most, num_ranks)
    destination = even(columns, int(num_ranks), taken, most)
    if destination is None:
        fullest = (taken.sum(axis=0) / (num_ranks * most)).max()
        raise InfeasibleError(
            f"limits must leave room for all samples, got {fullest:.1%} full ranks on average and found no division "
            f"of {len(columns)} samples over {num_ranks} ranks; raise the limits or take fewer samples"
        )
    return destination


def _refuse_too_much(taken: FloatArray, most: FloatArray, num_ranks: int) -> None:
    """What no division can mend: a sample over a limit, or more in all than all ranks hold."""
    for sample, limit in np.argwhere(taken > most):
        got = f"{taken[sample, limit]:g} of at most {most[limit]:g} (sample {sample})"
        raise InfeasibleError(f"sizes must fit within limits on a rank, got {got}")
    for limit in np.flatnonzero(taken.sum(axis=0) > num_ranks * most * (1 + ROUNDING)):
        got = f"{taken[:, limit].sum():g} for {num_ranks} ranks of at most {most[limit]:g}"
        raise InfeasibleError(f"sizes must fit within the limits of all ranks, got {got}")


def _numbers(name: str, values: npt.ArrayLike, *, dimensions: tuple[int, ...]) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim not in dimensions:
        raise ConfigError(f"{name} must have {' or '.join(map(str, dimensions))} dimensions, got shape {array.shape}")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        raise ConfigError(f"{name} must be finite and not negative, got {array[wrong].flat[0]:g}")
    return array


def _columns(values: FloatArray) -> FloatArray:
    return values[:, None] if values.ndim == 1 else values
