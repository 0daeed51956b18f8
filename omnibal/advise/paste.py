"""What adopts an advice: the limits to give the planner, and the lines to paste into the trainer that a run has."""

import json
from dataclasses import dataclass
from shlex import quote
from typing import Any, Final, Literal

from omnibal.advise.batches import Batching
from omnibal.advise.changes import Advice
from omnibal.advise.estimate import Estimate, Recipe
from omnibal.advise.present import Host, Present
from omnibal.advise.wait import Sharding
from omnibal.cluster import Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.step_size import limits_of_step, samples_made
from omnibal.feeds.buffer_plan import buffer_of
from omnibal.plan import Plan

Kind = Literal["annotations", "lengths", "stream"]
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
    pack_tokens: str = ""
    """What says how many tokens a pack of random samples holds."""
    random: str = ""
    """Draws samples at random, which packs replace; empty if no setting does."""
    beside_packs: tuple[str, ...] = ()
    """Settings without which the drop-in refuses the trainer."""
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


@dataclass(frozen=True)
class Proposal:
    """Limits of packs, and what the planner makes under them."""

    limits: PackLimits
    samples_per_step: float
    """Mean number of samples of all ranks in a step of an epoch."""
    oversized: float
    """Share of the samples that are larger than a pack and have one of their own."""


def propose(
    estimate: Estimate, lengths: SampleLengths, *, num_samples: int | None = None, holds_all: bool = False
) -> Proposal:
    """Limits in about the proportion of what even packs hold, under which a step has the estimate's samples."""
    packs = estimate.scenario.cluster.num_devices * estimate.recipe.micro_batches
    limits = limits_of_step(lengths, estimate.limits, estimate.samples_per_step, packs, holds_all=holds_all)
    made = samples_made(lengths, limits, packs, num_samples=num_samples)
    return Proposal(limits, made, len(limits.oversized(lengths)) / len(lengths))


def lines_to_paste(
    advice: Advice, present: Present, cluster: Cluster, proposal: Proposal | None, *, data: str, model: str, kind: Kind
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
        lines += ["paste:", *(f"    {line.format(**values)}" for line in packs)]
    elif after.recipe.target_rows:
        lines += ["paste:", *(f"    {line}" for line in TARGET_ROWS)]
    settings = _settings(advice, host, kind)
    if proposal is not None:
        # What packs take the place of is switched off: `balance` refuses it beside them.
        grouped = today.recipe.batching in ("group_by_length", "batch_rebalance")
        settings += [HOSTS[host].random] if grouped and HOSTS[host].random else []
        settings += [*HOSTS[host].beside_packs, *(present.beside_packs or ())]
    lines += [f"set: {', '.join(settings)}"] if settings else []
    lines.append(
        f"measure: {MEASURED_STEPS} steps without and with; a step has {today.samples_per_step:,.0f} samples today, "
        f"then {per_step:,.0f}"
    )
    if proposal is not None and kind in ("annotations", "lengths"):
        named = quote(data) if kind == "lengths" else f"{quote(data)} lengths --model {quote(model)}"
        lines.append(
            f"packs of all samples: omnibal lengths {named} --limits "
            f"{proposal.limits.vision_units},{proposal.limits.llm_tokens} --num-replicas {cluster.num_devices} "
            f"--micro-batches {after.recipe.micro_batches}"
        )
    return lines


def _settings(advice: Advice, host: Host, kind: Kind) -> list[str]:
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
    if after.recompute != today.recompute:
        found.append(recompute_setting(after, host))
    if after.sharding != today.sharding:
        found.append(f'"zero_optimization": {{"stage": {STAGES[after.sharding]}}} in the ds_config')
    return found


def recompute_setting(after: Recipe, host: Host) -> str:
    """What switches recomputation on or off."""
    return HOSTS[host].checkpointing_off if after.recompute == "none" else HOSTS[host].checkpointing_on


def pipeline_lines(plan: Plan, present: Present, *, data: str, model: str) -> list[str]:
    """The ds_config of a planned pipeline, and the commands that plan all data, measure, and train."""
    named: dict[str, Any] = {"path": model, "weights": "load"}
    if present.lora:
        named["lora"] = {"rank": present.lora}
    elif present.frozen:
        named["frozen"] = list(present.frozen)
    config = {
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": plan.layout.zero_stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "torch_adam": True}},
        "omnibal": {
            "cluster": str(plan.cluster),
            "model": named,
            "data": {"train": data},
            "packing": {"vision_units": plan.limits.vision_units, "llm_tokens": plan.limits.llm_tokens},
            "pipeline": {"num_stages": plan.num_stages, "schedule": plan.schedule, **_layout_keys(plan)},
            "run": {"output": "runs/pipeline"},
        },
    }
    return [
        "write pipeline.json, with the folders that you have:",
        f"    {json.dumps(config)}",
        "measure: omnibal plan pipeline.json --measure --trials 3 --write",
        "train: deepspeed launch/train.py --deepspeed_config pipeline.json",
    ]


def _layout_keys(plan: Plan) -> dict[str, Any]:
    """The keys of tensor ranks, of a spread encoder or of one with devices of its own."""
    layout, own = plan.layout, plan.layout.encoder
    if own is None:
        return {} if layout.num_tensor == 1 else {"num_tensor": layout.num_tensor}
    if layout.is_spread:
        return {"encoder": "spread"}
    return {"encoder": {"num_stages": own.num_stages, "num_replicas": own.num_replicas}}
