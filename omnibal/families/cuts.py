"""How tensor ranks share a layer: which units of which weight each of them holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from omnibal.errors import ConfigError


class Slice(NamedTuple):
    """What a tensor rank holds of a weight: in one dimension these ranges, one behind the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    copies: int = 1
    """Tensor ranks that hold the same slice: consecutive ones."""

    @property
    def width(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Cut:
    """How tensor ranks share a module with weights.

    A *column* layer is cut by its outputs (``dim`` 0), a *row* layer by its inputs (``dim`` 1), whose products tensor
    ranks add up (Shoeybi et al., Megatron-LM, 2019, section 3).
    """

    by: Literal["heads", "kv_heads", "intermediate", "hidden", "inner", "shuffled", "vocab"]
    """The size of the layer's record that counts the units which ranks share out."""
    dim: Literal[0, 1] = 0
    """The dimension of the weight: 0, outputs (rows of a table, elements of a norm's weight); 1, inputs."""
    parts: int = 1
    """Products that lie one behind the other in that dimension, each cut alike: 3 of queries, keys and values."""

    def slice(self, sizes: Mapping[str, int], width: int, num_tensor: int, rank: int) -> Slice:
        """What a tensor rank holds of ``width`` entries along the dimension."""
        units, copies = units_of(sizes, self.by, num_tensor, rank)
        block = width // self.parts
        each = block // sizes[self.by]
        assert self.parts * sizes[self.by] * each == width, "units divide what they are cut from"
        starts = range(0, width, block)
        return Slice(self.dim, tuple((s + units.start * each, s + units.stop * each) for s in starts), copies)


def units_of(sizes: Mapping[str, int], by: str, num_tensor: int, rank: int) -> tuple[range, int]:
    """The units of a size that a tensor rank has, and how many consecutive ranks have the same ones.

    Heads of queries stay with the heads of keys and values that they attend by. Where these are fewer than ranks,
    several ranks have the same one, and share its heads of queries out.

    >>> units_of({"heads": 25}, "heads", 2, 0), units_of({"heads": 25}, "heads", 2, 1)
    ((range(0, 13), 1), (range(13, 25), 1))
    >>> units_of({"heads": 8, "kv_heads": 2}, "kv_heads", 4, 3), units_of({"heads": 8, "kv_heads": 2}, "heads", 4, 3)
    ((range(1, 2), 2), (range(6, 8), 1))
    """
    if by not in ("heads", "kv_heads"):
        return _dealt(sizes[by], num_tensor, rank), 1
    kv_heads = sizes.get("kv_heads", sizes["heads"])
    copies = max(1, num_tensor // kv_heads)
    keys = _dealt(kv_heads, num_tensor // copies, rank // copies)
    if by == "kv_heads":
        return keys, copies
    group = sizes["heads"] // kv_heads
    queries, own = range(keys.start * group, keys.stop * group), _dealt(len(keys) * group, copies, rank % copies)
    return queries[own.start : own.stop], 1


def _dealt(count: int, shares: int, share: int) -> range:
    """The units of a share where shares differ by at most one, the larger ones first."""
    each, more = divmod(count, shares)
    start = share * each + min(share, more)
    return range(start, start + each + (share < more))


class _Sized(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...


def check_degree(records: Iterable[_Sized], num_tensor: int) -> None:
    """Refuse a degree under which a tensor rank would have no head, or ranks MLPs of unequal width."""
    for record in records if num_tensor > 1 else ():
        sizes, heads = record.sizes, record.sizes.get("heads", num_tensor)
        if heads < num_tensor:
            raise ConfigError(f"num_tensor must be at most the {heads} heads of {record.name}, got {num_tensor}")
        kv_heads = sizes.get("kv_heads", num_tensor)
        if kv_heads < num_tensor and num_tensor % kv_heads:
            raise ConfigError(
                f"num_tensor must be a multiple of the {kv_heads} kv_heads of {record.name}, or fewer, got {num_tensor}"
            )
        if sizes.get("intermediate", 0) % num_tensor:
            raise ConfigError(
                f"num_tensor must divide the intermediate {sizes['intermediate']} of {record.name}, got {num_tensor}"
            )
