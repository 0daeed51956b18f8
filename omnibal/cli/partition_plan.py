"""The plan that a searched partition becomes, and its trials on the real engine."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from omnibal.cli.steps import StepTask
from omnibal.errors import InfeasibleError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import Candidate
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.report.stages import cut_of
from omnibal.report.trials import TrialFigures


def plan_of(task: StepTask, partition: Partition, method: str) -> Plan:
    """A plan with this partition, and what a step under it is predicted to be like."""
    return Plan(
        limits=task.packs.limits,
        micro_batches=task.packs.micro_batches,
        partition=partition,
        recompute=task.recompute,
        predicted=_predict(task, partition),
        layout=task.layout(partition),
        made_from={"method": method, "frozen": list(task.profile.frozen_kinds), **task.to_record()},
    )


def _predict(task: StepTask, partition: Partition) -> Prediction:
    figures, memory = task.figures(partition), task.memory(partition)
    fastest = task.without_recompute().figures(partition)
    stages = [
        StagePrediction(
            forward_seconds=_short(stage.forward_seconds),
            backward_seconds=_short(stage.backward_seconds),
            recompute_seconds=_short(stage.backward_seconds - plain.backward_seconds),
            idle_ratio=_short(stage.idle_ratio),
            pending_bytes=0,
            memory=held,
        )
        for stage, plain, held in zip(figures.stages, fastest.stages, memory, strict=True)
    ]
    return Prediction(
        step_seconds=_short(figures.step_seconds),
        samples_per_step=task.packs.num_samples,
        bubble_ratio=_short(figures.bubble_ratio),
        stages=tuple(stages),
    )


def _short(value: float) -> float:
    """As many digits as a plan should say."""
    return float(f"{value:.6g}")


def try_candidates(
    task: StepTask, candidates: Sequence[Candidate], method: str, config: dict[str, Any], launcher: str | None
) -> list[TrialFigures]:
    """Run candidates on the real engine, a line for each as it comes; the fastest first, failed ones last.

    Raises:
        InfeasibleError: None of them runs.
    """
    from omnibal.trials.run import Trial, run_trials

    console = Console(stderr=True)
    num_processes = len(task.packs.loads) * candidates[0].partition.num_stages
    options = shlex.split(launcher) if launcher is not None else ["--num_gpus", str(num_processes)]
    done: list[TrialFigures] = []

    def figures_of(trial: Trial) -> TrialFigures:
        return TrialFigures.of(cut_of(trial.plan.partition.boundaries), trial)

    def show(trial: Trial) -> None:
        done.append(figures_of(trial))
        console.print(
            f"trial {len(done)} of {len(candidates)}: {done[-1]}", highlight=False, markup=False, soft_wrap=True
        )

    plans = [plan_of(task, candidate.partition, method) for candidate in candidates]
    trials = run_trials(config, plans, launcher_options=options, on_trial=show)
    if trials[0].error is not None:
        raise InfeasibleError(f"a candidate must run, got {len(trials)} failures; the first: {trials[0].error}")
    return [figures_of(trial) for trial in trials]


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.save(path)
