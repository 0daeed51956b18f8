"""The joint solver: pack limits, partition and recompute together, under memory budgets.

The files:

    packings    what is asked for; layouts that can be; for some pack limits a few steps that represent an epoch
    step_model  the simulated step of one packing, layout and schedule, by where the model is cut, within the budgets
    search      the fastest cut of each, the plan of the fastest of all, its prediction, and what it gains
    allocation  DistTrain's devices for encoder and language model, from which `omnibal advise --layouts` takes units
"""

from omnibal.planner.packings import PlanRequest
from omnibal.planner.search import PlanResult, make_plan

__all__ = ["PlanRequest", "PlanResult", "make_plan"]
