"""What adopts an advice: the limits to give the planner, and the lines to paste into the trainer that a run has."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, Literal

from omnibal.advise.batches import Batching
from omnibal.advise.changes import Advice
from omnibal.advise.estimate import Estimate, Recipe
from omnibal.advise.present import Host, Present
from omnibal.advise.wait import Sharding
from omnibal.cluster import Cluster
from omnibal.data.epoch import arrange_epoch
from omnibal.data.limits import PackLimits
from omnibal.feeds.buffer_plan import buffer_of
from omnibal.plan import Plan

if TYPE_CHECKING:
    from omnibal.advise.layouts import WeighedLayout  # its loops are compiled, which no other advice needs

DataKind = Literal["annotations", "lengths", "stream"]
MEASURED_STEPS: Final = 30
STAGES: Final[dict[Sharding, int]] = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class HostSyntax:
    """How settings are written where something trains."""

    packs: tuple[str, ...]
    accumulation: str
    batch: str
    checkpointing_off: str
    checkpointing_on: str
    batchings: dict[Batching, str]
    pack_tokens: str = ""  # what says how many tokens a pack of random samples holds
    random: str = ""  # draws samples at random, which packs replace; empty if no setting does
    beside_packs: tuple[str, ...] = ()  # settings without which the drop-in refuses the trainer
    searched: tuple[str, ...] = ()  # packs whose limits the drop-in finds; empty if it must be told
    stream_packs: tuple[str, ...] = (
        "from omnibal import PackLimits",
        "from omnibal.integrations.loops import pack_loss",
        "from omnibal.integrations.streams import balanced_stream",
        "loader = balanced_stream(stream, collate, PackLimits({vision}, {tokens}), model=model, buffer={buffer}, "
        "micro_batches={micro_batches})",
    )
    """What makes packs of a stream: but for transformers' Trainer, a loop of one's own."""


_PLUGINS: Final = '$(python -c "import omnibal; print(omnibal.__path__[0])")/integrations/plugins'
HOSTS: Final[dict[Host, HostSyntax]] = {
    "transformers": HostSyntax(
        packs=(
            "from omnibal import PackLimits",
            "from omnibal.integrations.transformers import balance",
            "balance(trainer, PackLimits({vision}, {tokens}), samples_per_step={samples})  # before trainer.train()",
        ),
        searched=(
            "from omnibal.integrations.transformers import balance",
            "balance(trainer)  # before trainer.train(); it finds limits of packs by itself",
        ),
        stream_packs=(
            "from omnibal import PackLimits",
            "from omnibal.integrations.transformers import balance_stream",
            "balance_stream(trainer, PackLimits({vision}, {tokens}))  # before trainer.train(), with max_steps set",
        ),
        accumulation="gradient_accumulation_steps={}",
        batch="per_device_train_batch_size={}",
        checkpointing_off="gradient_checkpointing=False",
        checkpointing_on="gradient_checkpointing=True",
        batchings={
            "group_by_length": 'train_sampling_strategy="group_by_length" (before transformers 5 group_by_length=True)',
            "batch_rebalance": 'train_sampling_strategy="batch_rebalance"',
        },
        random='train_sampling_strategy="random" (before transformers 5 group_by_length=False)',
        beside_packs=("remove_unused_columns=False",),
    ),
    "ms-swift": HostSyntax(
        packs=(
            "OMNIBAL_LIMITS={vision},{tokens} swift sft ... --padding_free true --packing false --strict true \\",
            f"    --external_plugins {_PLUGINS}/ms_swift.py",
        ),
        accumulation="--gradient_accumulation_steps {}",
        batch="--per_device_train_batch_size {}",
        checkpointing_off="--gradient_checkpointing false",
        checkpointing_on="--gradient_checkpointing true",
        batchings={"group_by_length": "--group_by_length true", "flattened": "--padding_free true"},
        random="--group_by_length false",
    ),
    "llama-factory": HostSyntax(
        packs=(
            "OMNIBAL_LIMITS={vision},{tokens} torchrun --nproc-per-node {devices} "
            "-m omnibal.integrations.plugins.llama_factory train.yaml  # with packing and neat_packing off",
        ),
        accumulation="gradient_accumulation_steps: {}",
        batch="per_device_train_batch_size: {}",
        checkpointing_off="disable_gradient_checkpointing: true",
        checkpointing_on="disable_gradient_checkpointing: false",
        batchings={"group_by_length": "group_by_length: true", "packed": "neat_packing: true"},
        pack_tokens="cutoff_len: {}",
        random="group_by_length: false",
    ),
    "deepspeed": HostSyntax(
        packs=(
            "from omnibal import PackLimits",
            "from omnibal.integrations.loops import balanced_loader, pack_loss",
            "loader = balanced_loader(dataset, collate, PackLimits({vision}, {tokens}), model=model, "
            "micro_batches={micro_batches})",
        ),
        accumulation='"gradient_accumulation_steps": {}',
        batch='"train_micro_batch_size_per_gpu": {}',
        checkpointing_off="no model.gradient_checkpointing_enable()",
        checkpointing_on="model.gradient_checkpointing_enable()",
        batchings={"group_by_length": "the sampler transformers.trainer_pt_utils.LengthGroupedSampler"},
    ),
}


def offered_by(host: Host, *, has_targets: bool) -> tuple[Batching | Literal["head"], ...]:
    """What a host has by one setting or call: ways to batch, and a head on target rows if lengths tell them."""
    return (*(("head",) if host == "transformers" and has_targets else ()), *HOSTS[host].batchings)


TARGET_ROWS: Final = (
    "from omnibal.packs.losses import target_rows",
    "target_rows(model)  # before the trainer",
)


COMPARE: Final = (
    "from omnibal.integrations.transformers import compare",
    "compare(make_trainer)  # in place of trainer.train(); make_trainer() returns your model in a new Trainer",
)


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


@dataclass(frozen=True)
class Proposal:
    """Limits of packs, and what the planner makes under them."""

    limits: PackLimits
    samples_per_step: float  # mean number of samples of all ranks in a step of an epoch
    oversized: float  # share of the samples that are larger than a pack and have one of their own


def propose(estimate: Estimate) -> Proposal:
    """What adopts even packs."""
    recipe, scenario = estimate.recipe, estimate.scenario
    assert recipe.limits is not None, "packs have limits"
    lengths, ranks = scenario.typical, scenario.cluster.num_devices
    epoch = arrange_epoch(lengths, recipe.limits, num_replicas=ranks, micro_batches=recipe.micro_batches)
    oversized = len(recipe.limits.oversized(scenario.lengths)) / len(scenario.lengths)
    return Proposal(recipe.limits, len(lengths) / epoch.num_steps, oversized)


def lines_to_paste(
    advice: Advice,
    present: Present,
    cluster: Cluster,
    proposal: Proposal | None,
    *,
    data: str,
    model: str,
    kind: DataKind,
) -> list[str]:
    """What to paste into the present trainer, what to set there, and how to measure what it brings."""
    today, after = advice.today, advice.after
    if after is today:
        return []
    host: Host = present.host or "transformers"
    lines, per_step = list[str](), after.samples_per_step
    if proposal is not None:
        per_step = proposal.samples_per_step
        values = {
            "vision": proposal.limits.vision_units, "tokens": proposal.limits.llm_tokens,
            "devices": cluster.devices_per_node, "micro_batches": after.recipe.micro_batches,
            "buffer": buffer_of(after.recipe.micro_batches), "samples": round(per_step),
        }  # fmt: skip
        packs = HOSTS[host].stream_packs if kind == "stream" else HOSTS[host].packs
        if HOSTS[host].searched and kind != "stream" and after.recipe.batch == today.recipe.batch:
            packs = HOSTS[host].searched
        lines += ["paste:", *(f"    {line.format(**values)}" for line in packs)]
    elif after.recipe.target_rows:
        lines += ["paste:", *(f"    {line}" for line in TARGET_ROWS)]
    settings = _settings(advice, host, kind)
    if proposal is not None:
        settings += [*_random(today.recipe, host), *HOSTS[host].beside_packs]
    lines += [f"set: {', '.join(settings)}"] if settings else []
    by_compare = host == "transformers" and kind != "stream"
    lines += [] if by_compare else [_to_measure(today, per_step)]
    if proposal is not None and kind in ("annotations", "lengths"):
        named = quote(data) if kind == "lengths" else f"{quote(data)} lengths --model {quote(model)}"
        lines.append(
            f"optional, plans packs of all samples: omnibal lengths {named} --limits "
            f"{proposal.limits.vision_units},{proposal.limits.llm_tokens} --num-replicas {cluster.num_devices} "
            f"--micro-batches {after.recipe.micro_batches}"
        )
    told = f"measure it ({today.samples_per_step:,.0f} samples a step today, {per_step:,.0f} with packs):"
    return [*lines, told, *(f"    {line}" for line in COMPARE)] if by_compare else lines


def _settings(advice: Advice, host: Host, kind: DataKind) -> list[str]:
    today, after, syntax = advice.today.recipe, advice.after.recipe, HOSTS[host]
    found = []
    if after.batching != today.batching and not advice.takes_packs:
        found.append(syntax.batchings[after.batching])
        if after.limits is not None and after.limits.llm_tokens != advice.today.scenario.cutoff:
            found.append(syntax.pack_tokens.format(after.limits.llm_tokens))
    if after.batch != today.batch and not advice.takes_packs:
        found.append(syntax.batch.format(after.batch))
    # The drop-in for Trainer finds by itself how many packs of a rank hold the samples of a step.
    by_balance = advice.takes_packs and host == "transformers" and kind != "stream"
    if not by_balance and (after.micro_batches != today.micro_batches or advice.takes_packs):
        found.append(syntax.accumulation.format(after.micro_batches))
    return found + _changed(today, after, host)


def _random(today: Recipe, host: Host) -> list[str]:
    """What switches off the batches whose place packs take: `balance` refuses these beside packs."""
    grouped = today.batching in ("group_by_length", "batch_rebalance")
    return [HOSTS[host].random] if grouped and HOSTS[host].random else []


def _changed(today: Recipe, after: Recipe, host: Host) -> list[str]:
    found = []
    if (after.recompute == "none") != (today.recompute == "none"):
        found.append(HOSTS[host].checkpointing_off if after.recompute == "none" else HOSTS[host].checkpointing_on)
    if after.sharding != today.sharding:
        found.append(f'"zero_optimization": {{"stage": {STAGES[after.sharding]}}} in the ds_config')
    return found


def _to_measure(today: Estimate, samples: float) -> str:
    return (
        f"measure: {MEASURED_STEPS} steps without and with these lines; samples a step: "
        f"{today.samples_per_step:,.0f} today, {samples:,.0f} with them"
    )


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
    ranks, syntax = today.scenario.cluster.num_devices, HOSTS[host]
    batch, micro_batches = recipe.batch, max(round(today.samples_per_step / ranks / recipe.batch), 1)
    settings = [
        syntax.batch.format(batch), syntax.accumulation.format(micro_batches), *_random(today.recipe, host),
        *_changed(today.recipe, recipe, host), *syntax.beside_packs,
    ]  # fmt: skip
    pasted = (f"    {line}" for line in REARRANGE)
    measured = _to_measure(today, batch * micro_batches * ranks)
    return ["paste:", *pasted, f"set: {', '.join(settings)}", measured]


def recompute_lines(present: Present, found: WeighedLayout) -> list[str]:
    """What lets a share of the layers recompute, where a layout does and ``balance`` does not see to it."""
    is_trainer = (present.host or "transformers") == "transformers"
    if not 0 < found.recomputed < 1 or (is_trainer and found.kind != "rearranged"):
        return []
    if not is_trainer:
        return [f"{found.recomputed:.0%} of the layers recompute: docs/layouts.md says how to take layers out"]
    lines = RECOMPUTE_SOME.format(share=found.recomputed).splitlines()
    return ["paste, so that some layers recompute:", *(f"    {line}" for line in lines)]


def pipeline_lines(plan: Plan, present: Present, *, data: str, model: str) -> list[str]:
    """The ds_config of a planned pipeline, and the commands that plan all data, measure, and train."""
    layout, own = plan.layout, plan.layout.encoder
    cut: dict[str, Any] = {"num_tensor": layout.num_tensor} if own is None and layout.num_tensor > 1 else {}
    if own is not None:
        own_devices = {"num_stages": own.num_stages, "num_replicas": own.num_replicas}
        cut = {"encoder": "spread" if layout.is_spread else own_devices}
    named: dict[str, Any] = {"path": model, "weights": "load"}
    if present.lora:
        named["lora"] = {"rank": present.lora}
    elif present.frozen:
        named["frozen"] = list(present.frozen)
    config = {
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.zero_stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "torch_adam": True}},
        "omnibal": {
            "cluster": str(plan.cluster),
            "model": named,
            "data": {"train": data},
            "packing": {"vision_units": plan.limits.vision_units, "llm_tokens": plan.limits.llm_tokens},
            "pipeline": {"num_stages": plan.num_stages, "schedule": plan.schedule, **cut},
            "run": {"output": "runs/pipeline"},
        },
    }
    return [
        "write pipeline.json, with the folders that you have:",
        f"    {json.dumps(config)}",
        "measure: omnibal plan pipeline.json --measure --trials 3 --write",
        "train: deepspeed launch/train.py --deepspeed_config pipeline.json",
    ]
