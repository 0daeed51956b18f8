"""Where ranks compare what each is about to do, before they exchange data that would fail or hang if they differed."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import Final

import torch
import torch.distributed as dist

from omnibal.errors import ConfigError
from omnibal.ranks.agreement import new_gloo_group
from omnibal.ranks.failures import lost_ranks_named, watch

LONGEST_WAIT: Final = timedelta(minutes=30)  # torch's own for gloo: rank 0 may save a checkpoint meanwhile


class Meeting:
    """Where the ranks of a group compare what each is about to do; all of them create it together.

    They exchange data afterwards, which would fail or hang if they differed. Each rank learns the least and the
    greatest record of all ranks in ⌈log₂ ranks⌉ small messages over gloo: 12 for 2560 ranks, where an all-gather in a
    ring takes 2559 one after another.
    """

    def __init__(self, among: dist.ProcessGroup | None = None) -> None:
        self._group = new_gloo_group(among, timeout=LONGEST_WAIT)
        self._ranks = dist.get_process_group_ranks(self._group)
        self._own = self._ranks.index(dist.get_rank())
        self._last: tuple[int, ...] = ()

    def extremes(self, place: Sequence[int], details: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """The least and the greatest record of all ranks, in the order of their numbers: place, details, rank.

        Args:
            place: Where this rank stands; later places are greater. Once a rank has left behind an earlier place
                (`leave`), those that wait at this one end.
            details: What is compared beside it; as many numbers on all ranks.
        """
        self._last = tuple(place)
        least = greatest = [*place, *details, self._ranks[self._own]]
        distance, num_ranks = 1, len(self._ranks)
        while distance < num_ranks:
            # Each rank sends what it knows to the rank at this distance behind it, and receives from the rank at this
            # distance before it. After the round it knows of the 2 · distance ranks up to itself.
            to, source = self._ranks[(self._own + distance) % num_ranks], self._ranks[self._own - distance]
            received = torch.empty(2, len(least), dtype=torch.int64)
            with watch().waiting_at(self._last):
                try:
                    sending = dist.isend(torch.tensor([least, greatest]), to, group=self._group)
                    dist.recv(received, source, group=self._group)
                    assert sending is not None, "this rank is a member of the group"
                    sending.wait()
                except RuntimeError as error:
                    if (left := watch().left_before(self._last, inf)) is not None:
                        raise ConfigError(f"all ranks must take part in each step, got {left}") from error
                    with lost_ranks_named():
                        raise
            least, greatest = min(least, received[0].tolist()), max(greatest, received[1].tolist())
            distance *= 2
        return least, greatest

    def leave(self, beginning: tuple[int, ...], received: tuple[int, ...]) -> None:
        """Tell the ranks that will wait at a later place of this loop that this rank will not come.

        Args:
            beginning: A place before all others of the loop: where this rank stands if it has met nobody there.
            received: The last place of the loop that this rank can come to.
        """
        with suppress(Exception):  # at the end of the process the store may be gone
            watch().leave(max(self._last, beginning), max(self._last, received))
