"""The lines that adopt an advice in the trainer that a run has, and what measures what they bring."""

import json
from shlex import quote
from typing import Any, Final, Literal

from omnibal.advise.batches import Batching
from omnibal.advise.changes import Advice
from omnibal.advise.present import Host, Present
from omnibal.advise.proposed import Proposal
from omnibal.advise.wait import Trainer
from omnibal.cluster import Cluster
from omnibal.feeds.buffer import buffer_of
from omnibal.plan import Plan

_PLUGINS: Final = '$(python -c "import omnibal; print(omnibal.__path__[0])")/integrations/plugins'
PACKS: Final[dict[Host, tuple[str, ...]]] = {
    "transformers": (
        "from omnibal import PackLimits",
        "from omnibal.integrations.transformers import balance",
        "balance(trainer, PackLimits({vision}, {tokens}), samples_per_step={samples})  # before trainer.train()",
    ),
    "ms-swift": (
        "OMNIBAL_LIMITS={vision},{tokens} swift sft ... --padding_free true --packing false --strict true \\",
        f"    --external_plugins {_PLUGINS}/ms_swift.py",
    ),
    "llama-factory": (
        "OMNIBAL_LIMITS={vision},{tokens} torchrun --nproc-per-node {devices} "
        "-m omnibal.integrations.plugins.llama_factory train.yaml  # with packing and neat_packing off",
    ),
    "deepspeed": (
        "from omnibal import PackLimits",
        "from omnibal.integrations.loops import balanced_loader, pack_loss",
        "loader = balanced_loader(dataset, collate, PackLimits({vision}, {tokens}), model=model, "
        "micro_batches={micro_batches})",
    ),
}
"""What makes packs, by what trains; where only a ds_config is known, a loop of one's own."""
STREAM_PACKS: Final[dict[Host, tuple[str, ...]]] = {
    "transformers": (
        *PACKS["transformers"][:-1],
        "balance(trainer, PackLimits({vision}, {tokens}))  # before trainer.train(), with max_steps in its arguments",
    ),
    "deepspeed": (
        "from omnibal import PackLimits",
        "from omnibal.integrations.loops import pack_loss",
        "from omnibal.integrations.streams import balanced_stream",
        "loader = balanced_stream(stream, collate, PackLimits({vision}, {tokens}), model=model, buffer={buffer}, "
        "micro_batches={micro_batches})",
    ),
}
"""The same of a stream; where something else trains, in a loop of one's own."""
Kind = Literal["annotations", "lengths", "stream", "others"]
"""Of data; others are read by ``omnibal advise`` alone."""
CHECKPOINTING_OFF: Final[dict[Host, str]] = {
    "transformers": "gradient_checkpointing=False",
    "ms-swift": "--gradient_checkpointing false",
    "llama-factory": "disable_gradient_checkpointing: true",
    "deepspeed": "no model.gradient_checkpointing_enable()",
}
ACCUMULATION: Final[dict[Host, str]] = {
    "transformers": "gradient_accumulation_steps={}",
    "ms-swift": "--gradient_accumulation_steps {}",
    "llama-factory": "gradient_accumulation_steps: {}",
    "deepspeed": '"gradient_accumulation_steps": {}',
}
BATCHINGS: Final[dict[tuple[Host, Batching], str]] = {
    ("transformers", "group_by_length"): 'train_sampling_strategy="group_by_length" (before transformers 5 '
    "group_by_length=True)",
    ("transformers", "batch_rebalance"): 'train_sampling_strategy="batch_rebalance"',
    ("ms-swift", "group_by_length"): "--group_by_length true",
    ("ms-swift", "flattened"): "--padding_free true",
    ("llama-factory", "group_by_length"): "group_by_length: true",
    ("llama-factory", "packed"): "neat_packing: true",
    ("deepspeed", "group_by_length"): "the sampler transformers.trainer_pt_utils.LengthGroupedSampler",
}
"""What brings samples together without packs of ours."""
BATCH: Final[dict[Host, str]] = {
    "transformers": "per_device_train_batch_size={}",
    "ms-swift": "--per_device_train_batch_size {}",
    "llama-factory": "per_device_train_batch_size: {}",
    "deepspeed": '"train_micro_batch_size_per_gpu": {}',
}
TARGET_ROWS: Final = (
    "from omnibal.integrations.target_rows import target_rows",
    "target_rows(model)  # before the trainer",
)
STAGES: Final[dict[Trainer, int]] = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
MEASURED_STEPS: Final = 30


def lines_to_paste(
    advice: Advice, present: Present, cluster: Cluster, proposal: Proposal | None, *, data: str, model: str, kind: Kind
) -> list[str]:
    """What to paste into which trainer, what to set there, and how to measure what it brings.

    Args:
        advice: Whose changes are adopted, as far as they bring something; of none, nothing is pasted.
        present: Names the trainer.
        cluster: The machines.
        proposal: Limits of packs, where these are part of the advice.
        data: What the data is called.
        model: The model's name or folder.
        kind: What the data is.
    """
    host: Host = present.host or "transformers"
    today, after = advice.today, advice.after
    if after is today:
        return []
    lines, per_step = [], after.samples_per_step
    if proposal is not None:
        per_step = proposal.samples_per_step
        values = {
            "vision": proposal.limits.vision_units, "tokens": proposal.limits.llm_tokens,
            "devices": cluster.devices_per_node, "micro_batches": after.way.micro_batches,
            "buffer": buffer_of(after.way.micro_batches), "samples": round(per_step),
        }  # fmt: skip
        of_host = PACKS[host] if kind != "stream" else STREAM_PACKS.get(host, STREAM_PACKS["deepspeed"])
        lines += ["paste:", *(f"    {line.format(**values)}" for line in of_host)]
    elif after.way.target_rows:
        lines += ["paste:", *(f"    {line}" for line in TARGET_ROWS)]
    settings = _settings(advice, host, kind)
    lines += [f"set: {', '.join(settings)}"] if settings else []
    lines.append(
        f"measure: {MEASURED_STEPS} steps without and with; a step has {today.samples_per_step:,.0f} samples today, "
        f"then {per_step:,.0f}"
    )
    if proposal is not None and kind in ("annotations", "lengths"):
        first = "" if kind == "lengths" else f"omnibal lengths {quote(data)} lengths --model {quote(model)} && "
        lines.append(
            f"packs of all samples: {first}omnibal pack {data if kind == 'lengths' else 'lengths'} --limits "
            f"{proposal.limits.vision_units},{proposal.limits.llm_tokens} --num-replicas {cluster.num_devices} "
            f"--micro-batches {after.way.micro_batches}"
        )
    return lines


def _settings(advice: Advice, host: Host, kind: Kind) -> list[str]:
    """What to set in the trainer."""
    today, after = advice.today.way, advice.after.way
    found = []
    if after.batching != today.batching and not advice.takes_packs:
        found.append(BATCHINGS[host, after.batching])
    if after.batch != today.batch and not advice.takes_packs:
        found.append(BATCH[host].format(after.batch))
    # balance finds the packs of each rank that hold the samples of a step.
    by_balance = advice.takes_packs and host == "transformers" and kind != "stream"
    if not by_balance and (after.micro_batches != today.micro_batches or advice.takes_packs):
        found.append(ACCUMULATION[host].format(after.micro_batches))
    if after.recompute != today.recompute:
        found.append(CHECKPOINTING_OFF[host])
    if after.trainer != today.trainer:
        found.append(f'"zero_optimization": {{"stage": {STAGES[after.trainer]}}} in the ds_config')
    return found


def pipeline_config(plan: Plan, present: Present, *, data: str, model: str) -> dict[str, Any]:
    """The ds_config of a planned pipeline; the plan itself is made by ``omnibal plan``, of all data.

    Args:
        plan: What was found for the sample.
        present: What is frozen or adapted.
        data: The data's file.
        model: The model's name or folder.
    """
    named: dict[str, Any] = {"path": model, "weights": "load"}
    if present.lora:
        named["lora"] = {"rank": present.lora}
    elif present.frozen:
        named["frozen"] = list(present.frozen)
    return {
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
            "pipeline": {"num_stages": plan.num_stages, "schedule": plan.schedule},
            "run": {"output": "runs/pipeline"},
        },
    }


def pipeline_lines(plan: Plan, present: Present, *, data: str, model: str) -> list[str]:
    """The ds_config to write, and the commands that plan all data, measure, and train."""
    config = json.dumps(pipeline_config(plan, present, data=data, model=model))
    return [
        "write pipeline.json, with the folders that you have:",
        f"    {config}",
        "measure: omnibal plan pipeline.json --measure --trials 3 --write",
        "train: deepspeed launch/train.py --deepspeed_config pipeline.json",
    ]
