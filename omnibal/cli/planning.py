"""The parts of `omnibal plan`: read its options, show and draw what came of them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from omnibal.cli.costs import check_run
from omnibal.cli.inputs import Reading, read_lengths
from omnibal.cli.weighed import record_of, weighed_table
from omnibal.cluster import Cluster, Layout, Links
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES, Device
from omnibal.errors import ConfigError
from omnibal.memory.footprint import StageMemory
from omnibal.plan import Plan
from omnibal.planner import PlanResult
from omnibal.profile.levels import Level
from omnibal.profile.records import ModelProfile
from omnibal.report.memory import memory_table, plot_memory
from omnibal.report.stages import slowest_replica, stage_plan_table
from omnibal.report.timeline import plot_timeline
from omnibal.report.trials import TrialFigures, trials_table

GIB: Final = 2**30


def count_devices(
    num_stages: int | None, num_replicas: int | None, num_devices: int | None, profile: ModelProfile
) -> int:
    """Stages × replicas; devices that share layers count as one.

    Raises:
        ConfigError: The options do not say how many, or contradict each other.
    """
    if num_devices is None:
        if num_stages is None or num_replicas is None:
            raise ConfigError(
                "devices must be given as --num-devices, or as --num-stages and --num-replicas, got neither"
            )
        return num_stages * num_replicas
    if num_replicas is not None:
        raise ConfigError(f"--num-replicas must be left out beside --num-devices, got {num_replicas}")
    degree = profile.tensor_parallel
    if num_devices % degree:
        raise ConfigError(f"--num-devices must be a multiple of the {degree} that share each layer, got {num_devices}")
    return num_devices // degree


def budget_of(given: str | None, profile: ModelProfile) -> int | tuple[int, ...]:
    """Bytes of a device, or of each stage's; by default what the profile's device has.

    Raises:
        ConfigError: It is not given and the device is unknown, or it is no positive number of GiB.
    """
    if given is None:
        if profile.device not in DEVICES:
            raise ConfigError(
                f"--budget must be given for {profile.device!r}, got none; memory is known of {', '.join(DEVICES)}"
            )
        return int(DEVICES[profile.device].memory_bytes)
    try:
        budgets = tuple(int(float(word) * GIB) for word in given.split(","))
    except (ValueError, OverflowError):
        budgets = (0,)
    if min(budgets) < 1:
        raise ConfigError(f"--budget must be GiB such as 80 or 80,80,40, got {given!r}")
    return budgets[0] if len(budgets) == 1 else budgets


def cluster_of(
    profile: ModelProfile, budget: str | None, links: Links, *, layout: Layout, overhead_bytes: int
) -> Cluster:
    """The hardware that the options describe, with as many devices as the layout needs.

    Raises:
        ConfigError: The budget is not given and the device is unknown, or it is not one for each stage.
    """
    budgets = budget_of(budget, profile)
    devices_per_stage = layout.num_replicas * layout.num_tensor
    if isinstance(budgets, tuple) and len(budgets) != layout.num_stages:
        raise ConfigError(f"--budget must be one for each of {layout.num_stages} stages, got {budget!r}")
    memory = budgets if isinstance(budgets, int) else tuple(size for size in budgets for _ in range(devices_per_stage))
    device = DEVICES.get(profile.device) or Device(
        profile.device, memory_bytes=memory if isinstance(memory, int) else max(memory),
        link_bytes_per_second=min(links.bandwidth_bytes_per_second, sys.float_info.max),
    )  # fmt: skip
    return Cluster(1, layout.num_devices, device, memory_bytes=memory, overhead_bytes=overhead_bytes, links=links)


def on_cluster(
    plan: Plan,
    profile: ModelProfile,
    links: Links,
    *,
    num_replicas: int,
    zero_stage: int,
    budget: str | None,
    overhead_bytes: int,
) -> Plan:
    """The plan on the hardware that the options describe."""
    layout = Layout(
        plan.num_stages, num_replicas, num_tensor=profile.tensor_parallel, zero_stage=zero_stage,
        precision=profile.dtype,  # type: ignore[arg-type]  # a layout checks it
    )  # fmt: skip
    cluster = cluster_of(profile, budget, links, layout=layout, overhead_bytes=overhead_bytes)
    return replace(plan, layout=layout, cluster=cluster)


def fixed_limits(vision_units: int | None, llm_tokens: int | None) -> PackLimits | None:
    """Limits that the user wants to keep.

    Raises:
        ConfigError: One is given without the other.
    """
    if vision_units is None and llm_tokens is None:
        return None
    if vision_units is None or llm_tokens is None:
        raise ConfigError("limits must be given as both --vision-units and --llm-tokens, got one of them")
    return PackLimits(vision_units, llm_tokens)


def lengths_of(paths: Sequence[Path] | None) -> SampleLengths:
    """The lengths that the option names.

    Raises:
        ConfigError: None are named.
    """
    if not paths:
        raise ConfigError("--lengths must name sample lengths, got none; `omnibal lengths` writes them")
    return read_lengths(paths, Reading()).lengths


def check_trials(
    profile: ModelProfile,
    *,
    trials: int,
    four_steps: bool,
    config: Path | None,
    zero_stage: int,
    float32_gradients: bool | None,
) -> None:
    """Refuse, before anything is planned, trials that cannot be.

    Raises:
        ConfigError: Trials are asked for without a ds_config, in two ways at once, or of another run than the profile's
            (on one device a layer); or the ds_config has the optimizer keep other memory than is planned.
    """
    if not trials and not four_steps:
        if config is not None:
            raise ConfigError(f"--config must come with --trials or --four-steps, got {config} alone")
        return
    if trials and four_steps:
        raise ConfigError(f"--trials must be left out beside --four-steps, got {trials}")
    if config is None:
        raise ConfigError("--config must name a ds_config for --trials and --four-steps, got none")
    from omnibal.config import read_config, sums_in_float32

    deepspeed_config, section = read_config(config)
    check_run(profile, deepspeed_config, section.model, is_tried=True)
    tried = deepspeed_config.get("zero_optimization", {}).get("stage", 0)
    if zero_stage != tried:
        raise ConfigError(f"--zero-stage must be the ds_config's {tried} for trials, got {zero_stage}")
    planned = zero_stage == 1 if float32_gradients is None else float32_gradients
    if planned != sums_in_float32(deepspeed_config) and profile.dtype != "float32":
        option = "--no-float32-gradients" if planned else "--float32-gradients"
        raise ConfigError(f"{option} must be given for trials as the ds_config says, got the contrary")


def try_on_engine(
    result: PlanResult, *, trials: int, four_steps: bool, config: Path | None, launcher: str | None
) -> tuple[PlanResult, Plan, tuple[TrialFigures, ...]]:
    """The result after the trials that were asked for, the plan to keep, and the trials.

    Raises:
        InfeasibleError: None of them runs.
    """
    if config is None:
        return result, result.plan, ()
    from omnibal.cli.plan_trials import Engine

    engine = Engine(config, result, launcher)
    if four_steps:
        kept = engine.take_four_steps()
    else:
        result = engine.try_best(trials)
        kept = result.plan
    return result, kept, tuple(engine.trials)


@dataclass(frozen=True)
class PlanReport:
    """All that `omnibal plan` says.

    Attributes:
        result: The solver's plan, after trials the best of those that ran, and how it came about.
        kept: The plan that was written: this one, or that of the paper's four steps.
        out: Where.
        folder: Where pictures go, or None.
        trials: Plans on the real engine.
    """

    result: PlanResult
    kept: Plan
    out: Path
    folder: Path | None
    trials: tuple[TrialFigures, ...] = ()

    def draw(self) -> None:
        """Draw memory and timeline."""
        if self.folder is None:
            return
        choice = self.result.choice
        step = choice.plan.simulate(choice.model.profile, choice.model.packing.steps[0], mode=choice.model.request.mode)
        slowest = slowest_replica(step)
        plot_memory(
            {"all recomputed": self._memory_at("full"), "plan": self._memory()}, self._budgets, self._pictures[0]
        )
        plot_timeline({f"replica {slowest}, the slowest": step.replicas[slowest]}, self._pictures[1])

    def to_record(self) -> dict[str, Any]:
        """The report as JSON values."""
        result = self.result
        return {
            "plan": self.kept.to_record(),
            "written": str(self.out),
            "plots": [str(path) for path in self._pictures],
            "lower_bound_seconds": result.choice.model.lower_bound_seconds,
            "two_phase": None if result.two_phase is None else record_of(result.two_phase),
            "two_phase_failure": result.two_phase_failure,
            "tried": [record_of(choice) for choice in result.tried],
            "trials": [trial.to_record() for trial in self.trials],
        }

    def print(self, console: Console, *, explain: bool) -> None:
        """Print the plan in a few lines; explained, every stage and every packing that was weighed."""
        result, model = self.result, self.result.choice.model
        predicted = result.plan.predicted
        assert predicted is not None
        if explain:
            console.print(stage_plan_table(result.plan, [layer.module for layer in model.profile.layers]))
            console.print(memory_table(self._memory(), self._budgets))
            console.print(weighed_table(result.tried))
        gap = predicted.step_seconds / model.lower_bound_seconds - 1
        fullest = max(m.total / budget for m, budget in zip(self._memory(), self._budgets, strict=True))
        rate = predicted.samples_per_step / predicted.step_seconds
        lines = [
            str(model),
            f"step {predicted.step_seconds:.3f} s of {predicted.samples_per_step:,.0f} samples: {rate:,.1f} samples/s, "
            f"bubble {predicted.bubble_ratio:.1%}; at most {gap:.1%} above the best partition of these packs",
            f"{sum(level != 'none' for level in result.plan.recompute)} of {len(result.plan.recompute)} layers "
            f"recompute; the fullest device holds {fullest:.1%} of its budget",
            self._comparison(),
        ]
        for line in lines:
            console.print(line, highlight=False, markup=False)
        if self.trials:
            console.print(trials_table(self.trials))
            for trial in self.trials:
                console.print(f"{trial.name}: {trial.outcome}", highlight=False, markup=False)
        if self.kept is not result.plan:
            console.print("written is the plan of the paper's four steps, above is the solver's", highlight=False)
        for path in [self.out, *self._pictures]:
            console.print(f"written: {path}", highlight=False, markup=False)

    def _comparison(self) -> str:
        result = self.result
        if result.two_phase is None:
            return f"in two phases nothing fits: {result.two_phase_failure}"
        if result.gain < 5e-4:
            return "planning in two phases, data and model and then memory, would be as fast here"
        return f"{result.gain:.1%} less time per sample than the plan made in two phases ({result.two_phase.model})"

    @property
    def _budgets(self) -> tuple[int, ...]:
        """As the user gave them: after a retreat a plan was made for less."""
        model = self.result.choice.model
        return model.request.budgets(model.layout)

    def _memory(self) -> tuple[StageMemory, ...]:
        assert self.result.plan.predicted is not None
        return tuple(stage.memory for stage in self.result.plan.predicted.stages)

    def _memory_at(self, level: Level) -> tuple[StageMemory, ...]:
        model = self.result.choice.model
        return model.footprint.stages(self.result.plan.partition, (level,) * len(model.profile.layers))

    @property
    def _pictures(self) -> list[Path]:
        return [] if self.folder is None else [self.folder / "memory.png", self.folder / "timeline.png"]
