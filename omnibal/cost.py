"""What a micro-batch holds, and what that costs: the two records that data, pipeline and memory share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from omnibal.errors import ConfigError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Load:
    """The sizes of one micro-batch, or of many: numbers, or arrays with one entry per micro-batch.

    Args:
        vision_units: What the ViT works on (tiles, or patches for native-resolution ViTs).
        llm_tokens: Tokens in the LLM's sequence, image tokens included.
        llm_tokens_squared: Sum over the micro-batch's samples of ``tokens²``: attention never crosses a sample.
        vision_squared: Sum over the micro-batch's images of ``patches²``, for ViTs that attend over a whole image.
        target_tokens: Tokens that carry loss, which is all the head works on; by default all in the LLM's sequence.
        sound_units: What an encoder of sound beside the ViT works on.

    The arguments broadcast to one shape and are kept as read-only float arrays, 0-dimensional for numbers.

    Raises:
        ConfigError: An entry is negative or not finite, or the shapes do not broadcast.

    Example:
        >>> packs = Load(vision_units=[9, 0], llm_tokens=[4096, 100], target_tokens=[512, 30])
        >>> len(packs), packs[1]
        (2, Load(vision_units=0.0, llm_tokens=100.0, llm_tokens_squared=0.0, vision_squared=0.0, target_tokens=30.0))
    """

    __slots__ = ("llm_tokens", "llm_tokens_squared", "sound_units", "target_tokens", "vision_squared", "vision_units")

    vision_units: FloatArray
    llm_tokens: FloatArray
    llm_tokens_squared: FloatArray
    vision_squared: FloatArray
    target_tokens: FloatArray
    sound_units: FloatArray

    def __init__(
        self,
        vision_units: ArrayLike,
        llm_tokens: ArrayLike,
        llm_tokens_squared: ArrayLike = 0,
        vision_squared: ArrayLike = 0,
        target_tokens: ArrayLike | None = None,
        sound_units: ArrayLike = 0,
    ) -> None:
        target_tokens = llm_tokens if target_tokens is None else target_tokens
        given = (vision_units, llm_tokens, llm_tokens_squared, vision_squared, target_tokens, sound_units)
        columns = dict(zip(_SIZES, given, strict=True))
        arrays = {name: finite_sizes(f"Load.{name}", column) for name, column in columns.items()}
        try:
            np.broadcast_shapes(*(array.shape for array in arrays.values()))
        except ValueError:
            shapes = {name: array.shape for name, array in arrays.items()}
            raise ConfigError(f"the columns of a Load must be equally long, got shapes {shapes}") from None
        for name, array in zip(arrays, np.broadcast_arrays(*arrays.values()), strict=True):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Load cannot be changed; make a new one instead of setting {name!r}")

    @classmethod
    def stack(cls, loads: Iterable[Load]) -> Load:
        """Put loads of one shape along a new first axis.

        >>> Load.stack([Load(9, 4096), Load(0, 100)]).llm_tokens
        array([4096.,  100.])
        """
        parts = list(loads)
        shapes = {part.shape for part in parts}
        if len(shapes) != 1:
            raise ConfigError(f"loads must be one or more of one shape, got shapes {sorted(shapes)}")
        return cls(*(np.stack([getattr(part, name) for part in parts]) for name in _SIZES))

    @property
    def shape(self) -> tuple[int, ...]:
        """``()`` for a single micro-batch."""
        return self.llm_tokens.shape

    def ravel(self) -> Load:
        return Load(*(getattr(self, name).ravel() for name in _SIZES))

    def reshape(self, shape: tuple[int, ...]) -> Load:
        return Load(*(getattr(self, name).reshape(shape) for name in _SIZES))

    def mean(self) -> Load:
        return Load(*(getattr(self, name).mean() for name in _SIZES))

    def max(self) -> Load:
        """One micro-batch that holds as much of every size as any."""
        return Load(*(getattr(self, name).max() for name in _SIZES))

    def __mul__(self, factor: float) -> Load:
        return Load(*(getattr(self, name) * factor for name in _SIZES))

    __rmul__ = __mul__

    def __len__(self) -> int:
        return len(self.llm_tokens)

    def __getitem__(self, index: object) -> Load:
        return Load(*(getattr(self, name)[index] for name in _SIZES))

    def __iter__(self) -> Iterator[Load]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Load):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in _SIZES)

    __hash__ = None  # type: ignore[assignment]  # compared by the values of arrays

    def __reduce__(self) -> tuple[type[Load], tuple[FloatArray, ...]]:
        return Load, tuple(getattr(self, name) for name in _SIZES)

    def __repr__(self) -> str:
        shown = (name for name in _SIZES if name != "sound_units" or self.sound_units.any())
        return f"Load({', '.join(f'{name}={getattr(self, name).tolist()}' for name in shown)})"


_SIZES = ("vision_units", "llm_tokens", "llm_tokens_squared", "vision_squared", "target_tokens", "sound_units")
_COEFFICIENTS = ("fixed", *_SIZES)


def finite_sizes(name: str, values: ArrayLike) -> FloatArray:
    """A copy in float64 of values that must be finite and not negative."""
    array = np.array(values, dtype=np.float64, order="C")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        raise ConfigError(f"{name} must be finite and not negative, got {array[wrong].flat[0]:g}")
    return array


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds or bytes that a micro-batch costs, affine in its sizes.

    Calling it with a :class:`Load` gives the cost of every micro-batch in it. Cost models add up
    (the cost of a stage is the sum of its layers') and can be multiplied by a number.

    Raises:
        ConfigError: A coefficient is negative or not finite.

    Example:
        >>> attention = CostModel(fixed=1e-3, llm_tokens=2e-6, llm_tokens_squared=1e-10)
        >>> attention(Load(0, [1000, 0], [1e6, 0])).round(6)
        array([0.0031, 0.001 ])
        >>> (2 * attention + CostModel(fixed=1)).fixed
        1.002
    """

    fixed: float = 0.0
    """Cost of a micro-batch whatever it holds."""
    vision_units: float = 0.0
    """Cost per vision unit."""
    llm_tokens: float = 0.0
    """Cost per LLM token."""
    llm_tokens_squared: float = 0.0
    """Cost per squared LLM token, summed within samples."""
    vision_squared: float = 0.0
    """Cost per squared patch, summed within images."""
    target_tokens: float = 0.0
    """Cost per token that carries loss."""
    sound_units: float = 0.0
    """Cost per unit of an encoder of sound."""

    def __post_init__(self) -> None:
        for name in _COEFFICIENTS:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"CostModel.{name} must be finite and not negative, got {value!r}")

    def __call__(self, load: Load) -> FloatArray:
        """The cost of each micro-batch of ``load``, in the load's shape (a NumPy scalar for a single one)."""
        cost = np.full(load.shape, self.fixed)
        for name in _SIZES:
            coefficient = getattr(self, name)
            if coefficient:
                cost = cost + coefficient * getattr(load, name)
        return cost[()]

    def __add__(self, other: CostModel) -> CostModel:
        return CostModel(**{name: getattr(self, name) + getattr(other, name) for name in _COEFFICIENTS})

    def __mul__(self, factor: float) -> CostModel:
        return CostModel(**{name: getattr(self, name) * factor for name in _COEFFICIENTS})

    __rmul__ = __mul__

    @classmethod
    def fit(cls, loads: Load, values: ArrayLike) -> CostModel:
        """Fit non-negative coefficients to measured costs, least in the squares of the relative errors.

        Args:
            loads: The measured micro-batches, one entry each.
            values: What each cost: finite, not negative; a zero weighs as much as the smallest positive value.

        Raises:
            ConfigError: There are no values, not as many as loads, or one is negative or not finite.

        Example:
            >>> model = CostModel.fit(Load([0, 0, 4], [100, 200, 100]), [3.0, 5.0, 3.0])
            >>> round(model.fixed, 6), round(model.llm_tokens, 6), round(model.vision_units, 6)
            (1.0, 0.02, 0.0)
        """
        costs = np.array(values, dtype=np.float64).ravel()
        # Sizes that are zero in every load get a zero coefficient, and so do target tokens that are all tokens. With
        # fewer different loads than coefficients the fit is one of many that reproduce the values.
        columns = [np.ones(loads.shape), *(getattr(loads, name) for name in _SIZES)]
        if np.array_equal(loads.target_tokens, loads.llm_tokens):
            columns[1 + _SIZES.index("target_tokens")] = np.zeros(loads.shape)
        matrix = np.stack([column.ravel() for column in columns], axis=1)
        if len(costs) == 0 or len(costs) != len(matrix):
            raise ConfigError(f"values must be one per load and at least one, got {len(costs)} for {len(matrix)} loads")
        if not (np.isfinite(costs) & (costs >= 0)).all():
            raise ConfigError(f"values must be finite and not negative, got {costs.tolist()}")
        from scipy.optimize import nnls  # a third of a second that most commands need not wait

        if not costs.any():
            return cls()
        weights = 1 / np.where(costs > 0, costs, costs[costs > 0].min())
        weighted = matrix * weights[:, None]
        scales = np.linalg.norm(weighted, axis=0)
        scales[scales == 0] = 1  # a size that never occurs: its column stays zero and so does its coefficient
        solution, _ = nnls(weighted / scales, costs * weights)
        return cls(**dict(zip(_COEFFICIENTS, (solution / scales).tolist(), strict=True)))


def smallest_first(sizes: ArrayLike) -> IntArray:
    """Order the last axis: the smallest micro-batch first, then all others from the largest on.

    A pipeline fills and drains with small micro-batches, and those that its stages run at one time are neighbours of
    like size.
    """
    return np.roll(np.argsort(sizes, axis=-1, kind="stable")[..., ::-1], 1, axis=-1)
