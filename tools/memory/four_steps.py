"""The paper's four steps for models that nobody here can run, with our footprint in the place of measurements."""

from dataclasses import fields

from omnibal.cost import IntArray
from omnibal.memory.footprint import Footprint
from omnibal.memory.paper import block_modules
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.planner.step_model import StepModel
from omnibal.profile.levels import Level
from omnibal.trials.four_steps import take_four_steps
from omnibal.trials.run import Trial, within_budget


class Passes(Footprint):
    """The memory of forward and backward passes, without the optimizer's step."""

    def update_bytes(self, stage: int) -> IntArray:
        """So little that a pass always takes more."""
        return super().update_bytes(stage) - 2**60


def four_steps(model: StepModel, partition: Partition) -> tuple[Level, ...]:
    """The levels that the four steps find.

    Raises:
        InfeasibleError: A stage does not fit with every block recomputed.
    """
    footprint, layers = model.footprint, model.profile.layers
    passes = Passes(*(getattr(footprint, field.name) for field in fields(footprint) if field.init))

    def run(plan: Plan) -> Trial:
        step, in_passes = (
            tuple(stage.total for stage in held.stages(partition, plan.recompute)) for held in (footprint, passes)
        )
        return within_budget(Trial(plan, (1.0,), step, in_passes), model.budgets)

    packing = model.packing
    plan = Plan(packing.limits, packing.micro_batches, partition, ("none",) * len(layers))
    in_flight = footprint.schedule.in_flight
    return take_four_steps(plan, block_modules(layers), in_flight, model.budgets, run).plan.recompute
