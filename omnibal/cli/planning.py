"""Plans of a workspace: the one that is there or a new one, the present configuration, the packs of either, layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from omnibal.advise.changes import TRAINER, settings_alone
from omnibal.advise.estimate import Scenario, Way
from omnibal.advise.layouts import KINDS, Kind, LayoutAnswer, weigh_layouts
from omnibal.advise.paste import offered_by
from omnibal.advise.question import MEASURED
from omnibal.cluster import Cluster
from omnibal.config import layout_of
from omnibal.data.epoch import arrange_epoch
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.families.base import LayerRecord
from omnibal.pipeline.partition import cut_parts
from omnibal.plan import Plan
from omnibal.planner import PlanRequest, PlanResult, make_plan
from omnibal.planner.packings import Packing, spread_steps
from omnibal.planner.search import Variant
from omnibal.profile.records import LayerCost, ModelProfile, every_layer
from omnibal.report.layouts import LayoutReport
from omnibal.workspace import Workspace

# Limits of a pack if nothing says them: with InternVL's 256 tokens per tile the OmniBal paper's, 9 tiles and 4096
# tokens.
LLM_TOKENS: Final = 4096
IMAGE_TOKENS: Final = 9 * 256
MICRO_BATCHES_PER_STAGE: Final = 4  # where nothing is said: the bubble is then a fifth at most
STEPS: Final = 32  # steps of an epoch that the present configuration and the plan are compared on
MEDIAN_OF: Final = 32  # steps, spread over an epoch, of which the median one is taken
LayoutChoice = Literal["auto", "pipeline", "spread", "units"]
WEIGHED: Final[Mapping[LayoutChoice, tuple[Kind, ...]]] = {
    "auto": tuple(KINDS),
    "spread": ("spread",),
    "units": ("units",),
}


def plan_of(workspace: Workspace) -> Plan:
    """The workspace's plan, with a cluster; where it has none, a new one, which is kept."""
    plan, profile = _found_plan(workspace), workspace.profile
    if plan is None:
        plan = solve(workspace, request_of(workspace)).plan
        plan.save(workspace.kept_plan)
        workspace.say(f"planned: {workspace.kept_plan}")
    if plan.partition.num_layers != len(profile.layers):
        raise ConfigError(
            f"plan must be of the profile's {len(profile.layers)} layers, got {plan.partition.num_layers}"
            + "; `omnibal plan --write` makes another" * (workspace.files is not None)
        )
    # A plan may name a level for all layers alike; costs do not tell all levels of all layers apart.
    recompute = profile.levels_like(plan.recompute)
    return replace(plan, recompute=recompute, cluster=workspace.asked_cluster or plan.cluster or workspace.cluster)


def _found_plan(workspace: Workspace) -> Plan | None:
    """The named plan, else the kept one if it still fits; says why it does not."""
    if workspace.named_plan is not None or workspace.files is None or not workspace.kept_plan.is_file():
        return workspace.named_plan
    try:
        plan = Plan.load(workspace.kept_plan)
        now = layout_of(workspace.config, plan.num_stages, plan.layout.num_replicas)
    except ConfigError as error:
        workspace.say(f"{workspace.kept_plan} is made anew: {error}")
        return None
    packing, pipeline, asked = workspace.section.packing, workspace.section.pipeline, plan.made_from.get("request", {})
    # Each setting as the plan has it, and as it is now; "auto" asks for nothing.
    settings = {
        "lengths": (plan.made_from.get("lengths"), workspace.lengths.content_hash),
        "costs": (plan.made_from.get("profile"), workspace.profile.content_hash),
        "ZeRO stage": (plan.layout.zero_stage, now.zero_stage),
        "sums of gradients": (plan.layout.sums_float32, now.sums_float32),
        "cluster": (plan.cluster, workspace.asked_cluster or plan.cluster),
        "number of stages": (plan.num_stages, pipeline.num_stages),
        "encoder": (plan.layout.encoder, pipeline.encoder_on(plan.layout.num_devices, workspace.named_plan)),
        "schedule": (plan.schedule, pipeline.schedule),
        "samples of a step": (asked.get("global_batch"), workspace.samples_per_step or "auto"),
        "method of packing": (asked.get("method", packing.method), packing.method),
        "seed of packing": (asked.get("seed", packing.seed), packing.seed),
    }
    changed = [name for name, (planned, present) in settings.items() if present not in ("auto", planned)]
    if changed:
        workspace.say(f"{workspace.kept_plan} is made anew: {', '.join(changed)} changed")
        return None
    return plan


def solve(workspace: Workspace, request: PlanRequest) -> PlanResult:
    profile, lengths = workspace.profile, workspace.lengths  # made before, each with a bar of its own
    with workspace.working("planning") as report:
        return make_plan(profile, lengths, request, report=report)


def request_of(
    workspace: Workspace,
    limits: tuple[int, int] | None = None,
    num_stages: int | None = None,
    *,
    weighs: bool = False,
) -> PlanRequest:
    """What the ds_config asks of a plan, but for what is given; ``weighs``: other layouts are weighed first."""
    packing, pipeline = workspace.section.packing, workspace.section.pipeline
    layout, samples = layout_of(workspace.config, 1, 1), workspace.samples_per_step
    request = PlanRequest(
        cluster=workspace.cluster,
        num_stages=num_stages or (None if pipeline.num_stages == "auto" else pipeline.num_stages),
        encoder=pipeline.encoder_on(workspace.cluster.num_devices, None),
        global_batch=samples or 1,
        zero_stage=layout.zero_stage,
        accumulate_float32=layout.accumulate_float32,
        limits=None if limits is None else PackLimits(*limits),
        method=packing.method,
        schedule=pipeline.schedule,
        seed=packing.seed,
    )
    if samples is None:
        if not weighs:
            request.layouts(workspace.profile)  # refuses stages and ranks that no number of samples could help
        request = replace(request, global_batch=_present_samples(workspace))
    return request


def _present_samples(workspace: Workspace) -> int:
    _readable = workspace.profile, workspace.lengths  # outside: a missing file is no matter of the configuration
    try:
        return round(real_packs(workspace, present_plan(workspace), steps=1).samples_per_step)
    except ConfigError as error:
        followed = workspace.named_plan
        if followed is not None and followed.predicted is not None:  # of other machines: its steps are as large
            return round(followed.predicted.samples_per_step)
        raise ConfigError(
            f"omnibal.packing.samples_per_step must be given, as the present configuration cannot train: {error}"
        ) from error


def present_plan(workspace: Workspace) -> Plan:
    """What training does now, as a plan on the cluster: what the ds_config names or spells out.

    Without a model (costs are named) it is cut by parameters and nothing recomputes.
    """
    layout, profile = workspace.layout(), workspace.profile
    if workspace.section.model.path is not None:
        plan = workspace.resolve_plan(workspace.model.records, layout, workspace.lengths)
    else:
        chosen = choose_limits(workspace.lengths) if workspace.has_lengths else None
        plan = Plan(
            chosen or PackLimits(*usual_limits(profile.layers)),
            MICRO_BATCHES_PER_STAGE * layout.num_stages,
            cut_parts(profile.layers, [layer.gradient_bytes for layer in profile.layers], layout),
            every_layer("none", len(profile.layers)),
        )
    # Trained are all layers at the level that the ds_config says, but costs do not tell all levels of all layers apart.
    return replace(plan, recompute=profile.levels_like(plan.recompute), layout=layout, cluster=workspace.cluster)


def real_packs(workspace: Workspace, plan: Plan, *, steps: int) -> Packing:
    """At most so many steps of the first epoch under a plan; one step of equal packs where lengths are not known."""
    replicas, micro_batches = plan.layout.num_replicas, plan.micro_batches
    if not workspace.has_lengths:
        return Packing.alike(plan.limits, num_replicas=replicas, micro_batches=micro_batches)
    lengths, options = workspace.lengths, workspace.section.packing.options
    epoch = arrange_epoch(lengths, plan.limits, num_replicas=replicas, micro_batches=micro_batches, **options)
    return Packing.of(epoch, lengths, plan.limits, spread_steps(epoch.num_steps, steps))


def median_packs(workspace: Workspace, plan: Plan) -> Packing:
    return real_packs(workspace, plan, steps=MEDIAN_OF).median_step(workspace.profile)


def usual_limits(layers: Sequence[LayerCost | LayerRecord]) -> tuple[int, int]:
    """Vision units and LLM tokens of a pack where nothing is said: as many units as bring ``IMAGE_TOKENS``."""
    for layer in layers:
        if "image_tokens_per_tile" in layer.sizes:
            return max(IMAGE_TOKENS // layer.sizes["image_tokens_per_tile"], 1), LLM_TOKENS
        if "units_per_token" in layer.sizes:
            return IMAGE_TOKENS * layer.sizes["units_per_token"], LLM_TOKENS
    return IMAGE_TOKENS // 256, LLM_TOKENS


def counts_layers(workspace: Workspace) -> bool:
    """Whether layers' costs are counted, so that they can be counted for other numbers of tensor ranks, too."""
    return not workspace.profile.versions and workspace.section.model.path is not None


def scenario_of(workspace: Workspace, cluster: Cluster, samples_per_step: int) -> Scenario:
    """Model and data where every device has whole layers and batches of its own."""
    profile, lengths = workspace.profile, workspace.lengths
    if not any(layer.kind == "head" and "vocab" in layer.sizes for layer in profile.layers):
        raise ConfigError("profile must have a head of a known vocabulary for --layout, got none; make it again")
    if counts_layers(workspace) and workspace.num_tensor > 1:
        profile = workspace.counted_profile(cluster.device, 1)
    profile.check_matches(tensor_parallel=1)
    has_targets = lengths.target_tokens is not None
    offered = offered_by("transformers", has_targets=has_targets)
    return Scenario(lengths, profile, cluster, samples_per_step, spares_rows=has_targets, offered=offered)


def rate_of(workspace: Workspace, plan: Plan) -> float:
    packing = real_packs(workspace, plan, steps=STEPS)
    return Variant("plan", workspace.profile, plan, packing.steps, packing.samples_per_step).samples_per_second


def present_rate(workspace: Workspace) -> float | None:
    if workspace.files is None:
        return None
    try:
        return rate_of(workspace, present_plan(workspace))
    except ConfigError:
        return None


def cheapest_way(workspace: Workspace, cluster: Cluster, samples_per_step: float) -> Way:
    """What a plan competes with: ZeRO with a trainer's own settings, for as many samples a step."""
    try:
        return settings_alone(scenario_of(workspace, cluster, max(round(samples_per_step), cluster.num_devices)))
    except ConfigError as error:  # what only reports never ends a run
        return Way(TRAINER, lacks=f"is not estimated: {error}")


def weigh(workspace: Workspace, request: PlanRequest, choice: LayoutChoice) -> LayoutReport:
    is_counted = counts_layers(workspace)

    def profiles(encoder: int, language: int) -> ModelProfile:
        # A plan is asked for, and the engine runs no others.
        if choice in ("spread", "units") and (encoder, language) != (1, 1):
            raise ConfigError(f"{choice} with tensor ranks, which omnibal cannot train")
        if not is_counted:
            raise ConfigError(MEASURED)
        return workspace.counted_profile(request.cluster.device, {"vision": encoder, "language": language})

    scenario = scenario_of(workspace, request.cluster, request.global_batch)
    with workspace.working("weighing layouts") as said:
        answer = weigh_layouts(scenario, profiles, kinds=WEIGHED[choice], num_stages=request.num_stages, report=said)
    cheapest = cheapest_way(workspace, request.cluster, request.global_batch)
    report = LayoutReport(answer, scenario, present_rate(workspace), best=cheapest)
    if answer.winner is None:
        raise InfeasibleError(f"a layout must fit {request.cluster}, got none; {'; '.join(report.lines()[1:])}")
    return report


def request_for_winner(workspace: Workspace, asked: PlanRequest, answer: LayoutAnswer) -> PlanRequest | str:
    """What to ask of a plan of the layout that won; or in words why none is made."""
    winner, today = answer.winner, answer.winner_today
    if today is None:
        return "omnibal trains none of these layouts; `--layout pipeline` plans a pipeline"
    found = winner if winner is not None and winner.runs_today else today
    if found.plan is None:
        return "what wins needs no pipeline; `omnibal advise --layouts` has the lines for your trainer"
    layout = found.plan.layout
    if layout.num_tensor != workspace.num_tensor:
        return f'set "num_tensor": {layout.num_tensor} in "pipeline" of the ds_config, and plan again'
    if found is not winner:
        choice = "pipeline" if found.kind == "tensor" else found.kind
        return f"omnibal cannot train the winner; `--layout {choice}` plans what does"
    # Of pipelines all numbers of stages are searched again; of units, those of the encoder's devices that won.
    stages = layout.num_stages if layout.has_units else asked.num_stages
    return replace(asked, encoder=layout.encoder, num_stages=stages)
