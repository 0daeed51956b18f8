"""How the processes of a run agree: a failure on one rank is raised on all, and none is left waiting.

`agreement` is for failures that a rank can report when all ranks meet, `failures` for one that ends a rank in between,
`meeting` for ranks that go on apart from one another, `hosts` for the network that all of these need.
"""

from omnibal.ranks.agreement import (
    check_shared,
    gather,
    place,
    rank_zero_first,
    rank_zero_only,
    run_on_all_ranks,
)
from omnibal.ranks.failures import failures_reach_all_ranks
from omnibal.ranks.hosts import new_gloo_group
from omnibal.ranks.meeting import Meeting

__all__ = [
    "Meeting",
    "check_shared",
    "failures_reach_all_ranks",
    "gather",
    "new_gloo_group",
    "place",
    "rank_zero_first",
    "rank_zero_only",
    "run_on_all_ranks",
]
