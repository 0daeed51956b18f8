"""The joint solver: pack limits, partition and recompute together, under memory budgets."""

from omnibal.planner.packings import PlanRequest
from omnibal.planner.search import PlanResult, make_plan

__all__ = ["PlanRequest", "PlanResult", "make_plan"]
