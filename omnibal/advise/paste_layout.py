"""The lines that adopt a layout which `omnibal advise --layouts` has weighed, in the trainer that somebody has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from omnibal.advise.changes import Advice
from omnibal.advise.estimate import Recipe
from omnibal.advise.paste import HOSTS, MEASURED_STEPS, STAGES, pipeline_lines, recompute_setting
from omnibal.advise.present import Host, Present

if TYPE_CHECKING:
    from omnibal.advise.layouts import WeighedLayout  # its loops are compiled, which no other advice needs

REARRANGE: Final = (
    "from omnibal.integrations.transformers import rearrange",
    "rearrange(trainer)  # on all ranks, before trainer.train()",
)
# Trainer switches recomputation on for all layers as it begins to train; the callback takes some out.
RECOMPUTE_SOME: Final = """\
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
class RecomputeSome(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **_):
        layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
        for n, each in enumerate(layers):  # {share:.0%} of the layers recompute
            each.gradient_checkpointing = int((n + 1) * {share:.2f}) > int(n * {share:.2f})
trainer.add_callback(RecomputeSome())"""


def with_layout(advice: Advice, found: WeighedLayout) -> Advice:
    """The advice to take even packs under a weighed recipe of data parallelism."""
    assert found.recipe is not None, "pipelines have plans"
    return replace(advice, after=advice.today.scenario.estimate(found.recipe))


def rearranging_lines(advice: Advice, present: Present, found: WeighedLayout) -> list[str]:
    """What to paste and to set for samples that are rearranged for each encoder and the LLM."""
    recipe, today, host = found.recipe, advice.today, present.host or "transformers"
    assert recipe is not None, "pipelines have plans"
    if host != "transformers":
        return ["paste: docs/rearranging.md has the lines for a loop of your own and for transformers' Trainer"]
    ranks = today.scenario.cluster.num_devices
    batch = max(round(today.samples_per_step / ranks / recipe.micro_batches), 1)
    syntax = HOSTS[host]
    settings = [syntax.batch.format(batch), syntax.accumulation.format(recipe.micro_batches)]
    settings += [*_changed(today.recipe, recipe, host), *syntax.beside_packs, *(present.beside_packs or ())]
    return [
        "paste:",
        *(f"    {line}" for line in REARRANGE),
        f"set: {', '.join(settings)}",
        f"measure: {MEASURED_STEPS} steps without and with; a step has {today.samples_per_step:,.0f} samples today, "
        f"then {batch * recipe.micro_batches * ranks:,}",
    ]


def recompute_lines(present: Present, found: WeighedLayout) -> list[str]:
    """What lets a share of the layers recompute, where a layout does."""
    if not 0 < found.recomputed < 1:
        return []
    if (present.host or "transformers") != "transformers":
        return [f"{found.recomputed:.0%} of the layers recompute: docs/layouts.md says how to take layers out"]
    lines = RECOMPUTE_SOME.format(share=found.recomputed).splitlines()
    return ["paste, so that some layers recompute:", *(f"    {line}" for line in lines)]


def planned_lines(found: WeighedLayout, present: Present, *, data: str, model: str) -> list[str]:
    """The ds_config and the commands of a pipeline, a spread encoder, or units."""
    assert found.plan is not None, "data parallelism has a recipe"
    return pipeline_lines(found.plan, present, data=data, model=model)


def _changed(today: Recipe, after: Recipe, host: Host) -> list[str]:
    found = []
    if today.batching in ("group_by_length", "batch_rebalance"):
        found.append(HOSTS[host].random)
    if after.recompute != today.recompute:
        found.append(recompute_setting(after, host))
    if after.sharding != today.sharding:
        found.append(f'"zero_optimization": {{"stage": {STAGES[after.sharding]}}} in the ds_config')
    return found
