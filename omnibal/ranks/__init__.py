"""How the processes of a run agree: a failure on one rank is raised on all, and none is left waiting.

`agreement` is for failures that a rank can report when all ranks meet, and the network that they meet by; `failures`
for those between two meetings, and ranks that have ended; `watchdog` for ranks at which nothing moves any more.
"""

from omnibal.ranks.agreement import (
    Meeting,
    any_rank,
    check_same,
    check_shared,
    gather,
    gloo_group,
    new_gloo_group,
    rank_and_size,
    rank_zero_first,
    rank_zero_only,
    run_on_all_ranks,
)
from omnibal.ranks.failures import (
    failures_reach_all_ranks,
    keep_watchdog,
    lost_ranks_named,
    naming_lost_ranks,
    watch,
)
from omnibal.ranks.watchdog import WORK, Watchdog

__all__ = [
    "WORK",
    "Meeting",
    "Watchdog",
    "any_rank",
    "check_same",
    "check_shared",
    "failures_reach_all_ranks",
    "gather",
    "gloo_group",
    "keep_watchdog",
    "lost_ranks_named",
    "naming_lost_ranks",
    "new_gloo_group",
    "rank_and_size",
    "rank_zero_first",
    "rank_zero_only",
    "run_on_all_ranks",
    "watch",
]
