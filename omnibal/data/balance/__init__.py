"""The balanced planner; ALGORITHM.md, beside this file, explains it."""

from omnibal.data.balance.planner import BalancedPacks

__all__ = ["BalancedPacks"]
