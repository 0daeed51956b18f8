"""Balanced training of vision-language models on DeepSpeed: data, pipeline and memory.

The public names are loaded when they are first used, so that ``import omnibal`` costs nothing and the sampler works
where neither torch nor DeepSpeed is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnibal.data.lengths import SampleLengths
    from omnibal.data.limits import PackLimits
    from omnibal.dispatch.divide import balanced_rows
    from omnibal.engine.initialize import initialize
    from omnibal.feeds.sampler import BalancedBatchSampler
    from omnibal.packs.proof import check_packing
    from omnibal.plan import Plan

__all__ = [
    "BalancedBatchSampler", "PackLimits", "Plan", "SampleLengths", "balanced_rows", "check_packing", "initialize",
]  # fmt: skip

_MODULES = {
    "SampleLengths": "omnibal.data.lengths",
    "PackLimits": "omnibal.data.limits",
    "BalancedBatchSampler": "omnibal.feeds.sampler",
    "Plan": "omnibal.plan",
    "balanced_rows": "omnibal.dispatch.divide",
    "check_packing": "omnibal.packs.proof",
    "initialize": "omnibal.engine.initialize",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
