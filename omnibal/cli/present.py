"""The present configuration as a plan, and the packs that it, or any plan, is predicted on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from omnibal.cli.costs import usual_limits
from omnibal.cli.run import Run
from omnibal.cluster import Layout
from omnibal.config import PackingSection
from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.pipeline.partition import parameter_cut
from omnibal.plan import Plan
from omnibal.planner.packings import Packing, spread_steps
from omnibal.profile.records import every_layer

MICRO_BATCHES_PER_STAGE: Final = 4
"""As many make a step where nothing is said: the bubble is then a fifth at most."""
MEDIAN_OF: Final = 32
"""Steps, spread over an epoch, of which the median one is taken."""


def present_plan(
    run: Run,
    num_stages: int | None = None,
    *,
    limits: tuple[int, int] | None = None,
    pipeline: Mapping[str, Any] | None = None,
) -> Plan:
    """What training does now, as a plan on the cluster: what the ds_config names or spells out.

    Without one the model is cut by parameters and nothing recomputes.

    Args:
        run: What the command line names.
        num_stages: In place of the ds_config's.
        limits: Vision units and LLM tokens, likewise.
        pipeline: Keys of its ``pipeline``, likewise.

    Raises:
        ConfigError: Its keys do not fit the model or the cluster.
    """
    layout = run.layout(num_stages)
    if run.has_config and run.section.model.path is not None:
        plan = _resolved(run, layout, limits, pipeline or {})
    else:
        most = choose_limits(run.lengths, *(limits or ())) if run.has_lengths else None
        plan = Plan(
            most or PackLimits(*(limits or usual_limits(run.profile.layers))),
            MICRO_BATCHES_PER_STAGE * layout.num_stages,
            parameter_cut(run.profile, layout.num_stages),
            every_layer("none", len(run.profile.layers)),
        )
    # Trained are all layers at the level that the ds_config says, but costs do not tell all levels of all layers apart.
    return replace(plan, recompute=run.profile.levels_like(plan.recompute), layout=layout, cluster=run.cluster)


def _resolved(run: Run, layout: Layout, limits: tuple[int, int] | None, pipeline: Mapping[str, Any]) -> Plan:
    from omnibal.engine.resolve import ResolvedRun, resolve_plan

    most = {} if limits is None else dict(zip(("vision_units", "llm_tokens"), limits, strict=True))
    section = run.section.model_copy(
        update={
            "pipeline": run.section.pipeline.model_copy(update=dict(pipeline)),
            "packing": run.section.packing.model_copy(update=most),
        }
    )
    return resolve_plan(ResolvedRun(run.config, section, run.model_folder, run.model, layout), run.lengths)


def real_packs(run: Run, plan: Plan, *, steps: int) -> Packing:
    """Steps of real packs under a plan, packed as the ds_config says; of equal packs where lengths are not known.

    Args:
        run: What the command line names.
        plan: Limits, micro-batches and layout.
        steps: So many at most, spread over the first epoch.
    """
    if not run.has_lengths:
        return Packing.alike(plan.limits, num_replicas=plan.layout.num_replicas, micro_batches=plan.micro_batches)
    replicas = plan.layout.num_replicas
    epoch = arrange(
        run.lengths, plan.limits, run.section.packing, num_replicas=replicas, micro_batches=plan.micro_batches
    )
    return Packing.of(epoch, run.lengths, plan.limits, spread_steps(epoch.num_steps, steps))


def median_packs(run: Run, plan: Plan) -> Packing:
    """Packs of the median one of some steps."""
    return real_packs(run, plan, steps=MEDIAN_OF).median_step(run.profile)


def arrange(
    lengths: SampleLengths, limits: PackLimits, packing: PackingSection, *, num_replicas: int, micro_batches: int
) -> Epoch:
    """The first epoch, as a ds_config says how to pack."""
    return arrange_epoch(
        lengths, limits, num_replicas=num_replicas, micro_batches=micro_batches, method=packing.method,
        seed=packing.seed, oversized=packing.oversized, exchange_steps=packing.exchange_steps,
    )  # fmt: skip
