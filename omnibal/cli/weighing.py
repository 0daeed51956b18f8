"""`omnibal plan --layout`: all layouts of a workspace weighed, and what those take that are no pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from omnibal.advise.estimate import Scenario
from omnibal.advise.fitting import check_weighable
from omnibal.advise.layouts import KINDS, Kind, WeighedLayout, weigh_layouts
from omnibal.advise.paste import STAGES, propose
from omnibal.advise.question import MEASURED
from omnibal.cli.planning import cheapest_way, counts_layers, present_rate, scenario_of
from omnibal.config import dtype_of
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.planner import PlanRequest
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from omnibal.report.layouts import LayoutReport
from omnibal.workspace import Workspace

LayoutChoice = Literal["auto", "pipeline", "spread", "units", "zero"]
WEIGHED: Final[Mapping[LayoutChoice, tuple[Kind, ...]]] = {
    "auto": tuple(KINDS), "spread": ("spread",), "units": ("units",), "zero": ("zero", "rearranged"),
}  # fmt: skip
PLANNED: Final[tuple[Kind, ...]] = ("pipeline", "tensor", "spread", "units")
PAGES: Final[Mapping[Kind, str]] = {"zero": "docs/trainer.md", "rearranged": "docs/rearranging.md"}


@dataclass(frozen=True)
class WeighedLayouts:
    """The layouts of a workspace, and what follows."""

    workspace: Workspace
    scenario: Scenario
    report: LayoutReport

    @classmethod
    def of(cls, workspace: Workspace, request: PlanRequest, choice: LayoutChoice) -> WeighedLayouts:
        """Weigh the kinds that a choice names on the workspace's samples."""
        check_weighable(request.cluster, request.global_batch)
        section = workspace.section
        is_counted = counts_layers(workspace)

        def profiles(encoder: int, language: int) -> ModelProfile:
            # A plan is asked for, and the engine runs no others.
            if choice in ("spread", "units") and (encoder, language) != (1, 1):
                raise ConfigError(f"{choice} with tensor ranks, which do not run yet")
            if not is_counted:
                raise ConfigError(MEASURED)
            return analytic_profile(
                workspace.records, request.cluster.device, dtype=dtype_of(workspace.config),
                frozen=section.model.frozen, tensor_parallel={"vision": encoder, "language": language},
            )  # fmt: skip

        scenario = scenario_of(workspace, request.cluster, request.global_batch)
        with workspace.working("weighing layouts") as said:
            answer = weigh_layouts(
                scenario, profiles, kinds=WEIGHED[choice], num_stages=request.num_stages, report=said
            )
        cheapest = cheapest_way(workspace, request.cluster, request.global_batch)
        report = LayoutReport(answer, scenario, present_rate(workspace), best=cheapest)
        if answer.winner is None:
            raise InfeasibleError(f"a layout must fit {request.cluster}, got none; {'; '.join(report.lines()[1:])}")
        return cls(workspace, scenario, report)

    def request(self, asked: PlanRequest) -> PlanRequest | None:
        """What plans the winner; None where it cannot be planned."""
        winner = self.report.answer.winner
        if winner is None or winner.plan is None or _degree(winner) != self.workspace.num_tensor:
            return None
        layout = winner.plan.layout
        # Of pipelines all numbers of stages are searched again; of units, those of the encoder's devices that won.
        stages = layout.num_stages if layout.has_units else asked.num_stages
        return replace(asked, encoder=layout.encoder, num_stages=stages)

    def lines(self) -> list[str]:
        """What to do where the winner is no pipeline."""
        today = self.report.answer.winner_today
        if today is None:
            return ["nothing is written: none of these layouts runs today; `--layout pipeline` plans a pipeline"]
        degree, choice = _degree(today), "pipeline" if today.kind == "tensor" else today.kind
        if degree not in (None, self.workspace.num_tensor):
            return [
                f'set: "num_tensor": {degree} in "pipeline" of the ds_config',
                f"nothing is written: `--layout {choice}` then plans with as many tensor ranks",
            ]
        if today.recipe is None:
            return [f"nothing is written: the winner does not run today; `--layout {choice}` plans what does"]
        set_to = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in self._keys(today).items())
        limits = self._limits(today)
        again = "on" if today.recipe.recompute == "full" else "off"
        return [
            f"set: {set_to} in the ds_config; gradient checkpointing {again}",
            f"packs: PackLimits({limits['vision_units']}, {limits['llm_tokens']}) makes steps of as many samples; "
            f"{PAGES[today.kind]} has the lines for your trainer",
            "nothing is written: a plan is of a pipeline",
        ]

    def to_record(self) -> dict[str, Any]:
        """All of it as JSON values."""
        today = self.report.answer.winner_today
        told = today is not None and today.recipe is not None
        return {
            "layouts": self.report.to_record(),
            "ds_config": self._keys(today) if told and today else None,
            "limits": self._limits(today) if told and today else None,
        }

    def _keys(self, found: WeighedLayout) -> dict[str, Any]:
        assert found.recipe is not None, "the caller asks for data parallelism alone"
        return {
            "zero_optimization": {"stage": STAGES[found.recipe.sharding]},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": found.micro_batches,
        }

    def _limits(self, found: WeighedLayout) -> dict[str, int]:
        assert found.recipe is not None, "the caller asks for data parallelism alone"
        lengths = self.scenario.lengths
        limits = propose(self.scenario.estimate(found.recipe), lengths, num_samples=len(lengths)).limits
        return {"vision_units": limits.vision_units, "llm_tokens": limits.llm_tokens}


def _degree(found: WeighedLayout) -> int | None:
    """Tensor ranks of a layout that `omnibal plan` can plan; None of others."""
    is_planned = found.kind in PLANNED and found.runs_today
    return found.plan.layout.num_tensor if is_planned and found.plan is not None else None
