"""What the host knows of a pack, so that it need not ask the device, which would have to catch up with it first."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class PackCounts(NamedTuple):
    """What layers need on the host.

    Attributes:
        image_tokens: In the pack; None where nobody has counted them.
        sample_lengths: Tokens of each sample.
    """

    image_tokens: int | None
    sample_lengths: tuple[int, ...]


def note_counts(tensors: Sequence[Tensor], counts: PackCounts | None) -> None:
    """Keep a pack's counts with its tensors: on the last one, the samples' bounds, which all layers hand on."""
    if counts is not None:
        tensors[-1]._omnibal_counts = counts  # type: ignore[attr-defined]


def counts_of(tensors: Sequence[Tensor]) -> PackCounts | None:
    """The counts that are noted of a pack; None if there are none."""
    counts: PackCounts | None = getattr(tensors[-1], "_omnibal_counts", None)
    return counts
