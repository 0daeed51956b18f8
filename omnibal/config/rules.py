"""The rules that a ds_config must keep under a pipeline, and the plan that it names or spells out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omnibal.cluster import Layout, Precision
from omnibal.config.section import LearningRates, OmnibalSection
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, check_frozen
from omnibal.pipeline.partition import Partition, cut_parts
from omnibal.plan import Plan


def complete_deepspeed_config(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Fill in what follows from the pipeline, but ``"auto"`` steps (`fill_in_steps`); refuse what cannot be right."""
    micro_batches = micro_batches_of(config)
    _check_clipping(config, layout)
    _check_writer(config)
    _check_offload(config, layout)
    _check_precision(config)
    if config.get("wall_clock_breakdown") and not config.get("steps_per_print"):
        raise ConfigError("steps_per_print must be given with wall_clock_breakdown, got none; it says when to print")
    check_batch(config, layout.num_replicas)
    scheduler = config.get("scheduler")
    return {
        **config,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": micro_batches * layout.num_replicas,
        # Contiguous gradients are two buffers of reduce_bucket_size, of no use where gradients stay on their stage.
        "zero_optimization": {"contiguous_gradients": False} | config.get("zero_optimization", {}),
        # Both default to true, and keep the first pack's shapes.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        # A synchronized throughput timer drains the device before each forward pass.
        "timers": {
            **config.get("timers", {}),
            "throughput": {"synchronized": False} | config.get("timers", {}).get("throughput", {}),
        },
        "data_types": ({"grad_accum_dtype": "fp32"} if sums_in_float32(config) else {}) | config.get("data_types", {}),
        # A dictionary of the run's own, which fill_in_steps may change.
        **({} if scheduler is None else {"scheduler": {**scheduler, "params": {**scheduler.get("params", {})}}}),
    }


def fill_in_steps(scheduler_params: dict[str, Any], total_steps: int) -> None:
    """Put the steps of the whole run, and a twentieth of them to warm up, in place of ``"auto"``."""
    automatic = {"total_num_steps": total_steps, "warmup_num_steps": max(1, total_steps // 20)}
    for key, steps in automatic.items():
        if scheduler_params.get(key) == "auto":
            scheduler_params[key] = steps


def check_batch(config: dict[str, Any], num_replicas: int) -> None:
    """Refuse batch sizes that do not follow from the number of micro-batches: a micro-batch is one pack."""
    micro_batches = micro_batches_of(config)
    product = f"{micro_batches} micro-batches of one pack, {num_replicas} replicas"
    for key, value, reason in (
        ("train_micro_batch_size_per_gpu", 1, "a micro-batch is one pack"),
        ("train_batch_size", micro_batches * num_replicas, product),
    ):
        given = config.get(key, "auto")
        if given not in ("auto", value):
            raise ConfigError(f"{key} must be {value} ({reason}), got {given!r}; leave it out or say 'auto'")


def check_apart_from_layout(config: dict[str, Any]) -> None:
    """Refuse what cannot be right under a pipeline, however many processes it has."""
    alone = {key: value for key, value in config.items() if key != "train_batch_size"}
    complete_deepspeed_config(alone, layout_of(config, 1, 1))


def resolve_plan(
    config: dict[str, Any],
    section: OmnibalSection,
    named: Plan | None,
    records: Sequence[LayerRecord],
    layout: Layout,
    lengths: SampleLengths | None,
    partition: Partition | None = None,
) -> Plan:
    """The plan that training follows: the one that the ds_config names, or what its keys spell out.

    Limits are chosen from ``lengths``, None for streams; ``partition`` is `partition_of` the run, where it is known.
    """
    pipeline, packing, frozen = section.pipeline, section.packing, section.model.frozen
    micro_batches, parts = micro_batches_of(config, named), check_frozen(records, frozen)
    partition = partition or partition_of(section, named, records, layout)
    # A named plan takes the place of partition, recompute and limits; what was predicted of it must be of this run.
    if named is not None:
        if "frozen" in named.made_from:  # times and memory are other ones where other layers are trained
            _check("frozen parts of the plan", sorted(named.made_from["frozen"]), list(parts))
            adapters = sum(record.sizes.get("adapters", 0) for record in records)
            _check("adapters' parameters in the plan", named.made_from.get("adapters", 0), adapters)
        if named.cluster is not None:  # predicted for this layout; else it is a default that nobody chose
            _check_layout(named.layout, layout)
        schedule = named.schedule if pipeline.schedule == "auto" else pipeline.schedule
        plan = named if named.cluster is not None else replace(named, layout=layout)
        # a prediction holds for its schedule only
        return plan if schedule == plan.schedule else replace(plan, schedule=schedule, predicted=None)
    levels = pipeline.recompute
    recompute = tuple(levels) if isinstance(levels, list) else (levels,) * len(records)
    schedule = "1f1b" if pipeline.schedule == "auto" else pipeline.schedule
    units, tokens = packing.vision_units, packing.llm_tokens
    if lengths is not None:
        limits = choose_limits(lengths, units, tokens)
    elif units is None or tokens is None:
        raise ConfigError(
            "omnibal.packing must give vision_units and llm_tokens for a stream, whose lengths nobody knows, got "
            f"{units} and {tokens}"
        )
    else:
        limits = PackLimits(units, tokens)
    return Plan(limits, micro_batches, partition, recompute, schedule=schedule, layout=layout)


def partition_of(
    section: OmnibalSection, named: Plan | None, records: Sequence[LayerRecord], layout: Layout
) -> Partition:
    """Which layers each stage of a run holds: as the named plan says, or else the section's keys."""
    asked = section.pipeline.partition
    if named is not None:
        partition = named.partition
    elif isinstance(asked, list):
        partition = Partition(asked)
    elif asked == "parameters":
        trained = [record.trainable_parameters(section.model.frozen) for record in records]
        partition = cut_parts(records, trained, layout)
    else:
        partition = cut_parts(
            records, [1] * len(records), layout, lambda each, stages: Partition.uniform(len(each), stages).boundaries
        )
    _check("layers of the partition", partition.num_layers, len(records))
    _check("stages of the partition", partition.num_stages, layout.num_stages)
    return partition


def _check_layout(planned: Layout, run: Layout) -> None:
    """Refuse a plan whose predictions, of memory above all, are of another layout."""
    names = ("num_replicas", "num_tensor", "encoder", "zero_stage", "precision", "sums_float32")
    differing = [name for name in names if getattr(planned, name) != getattr(run, name)]
    if differing:
        ours, theirs = (", ".join(f"{name} {getattr(layout, name)}" for name in differing) for layout in (run, planned))
        raise ConfigError(f"layout of the plan must be that of the run, {ours}, got {theirs}; plan again for this run")


def _check(name: str, got: object, expected: object) -> None:
    if got != expected:
        raise ConfigError(f"{name} must be {expected} as the model and the ds_config say, got {got}")


def layout_of(config: dict[str, Any], num_stages: int, num_replicas: int) -> Layout:
    zero_stage = config.get("zero_optimization", {}).get("stage", 0)
    if zero_stage not in (0, 1):
        raise ConfigError(
            f"zero_optimization.stage must be 0 or 1 with a pipeline, got {zero_stage!r}; "
            "DeepSpeed's pipeline engine keeps gradients and parameters whole on each stage"
        )
    return Layout(
        num_stages,
        num_replicas,
        zero_stage=zero_stage,
        precision=dtype_of(config),
        accumulate_float32=sums_in_float32(config),
    )


_FLOAT32_NAMES = ("fp32", "float32", "float", "torch.float32")
# DeepSpeed's names.
_BFLOAT16_NAMES = ("bf16", "bfloat16", "torch.bfloat16")


def sums_in_float32(config: dict[str, Any]) -> bool:
    """Whether gradients of a bfloat16 run are summed in float32: by default under ZeRO 1 (under 0 DeepSpeed cannot)."""
    # That takes 4 bytes more a trained parameter. In bfloat16 each sum is rounded to 8 bits: after 32 micro-batches it
    # is off by 0.6 %, after 128 by 1.1 %.
    if dtype_of(config) != "bfloat16":
        return False
    given = config.get("data_types", {}).get("grad_accum_dtype")
    if given is None:
        return bool(config.get("zero_optimization", {}).get("stage", 0) == 1)
    return given in _FLOAT32_NAMES


def dtype_of(config: dict[str, Any]) -> Precision:
    """What the layers compute in, by its name in torch: bfloat16 where the ds_config enables it, else float32."""
    if config.get("fp16", {}).get("enabled", False):
        raise ConfigError(
            f"fp16.enabled must be false, got {config['fp16']['enabled']!r}; enable bf16, or neither for float32"
        )
    return "bfloat16" if config.get("bf16", {}).get("enabled", False) else "float32"


def micro_batches_of(config: dict[str, Any], plan: Plan | None = None) -> int:
    """Micro-batches per step: the plan's, else ``gradient_accumulation_steps``, and 1 where that is left out."""
    micro_batches = config.get("gradient_accumulation_steps", "auto") if plan is None else plan.micro_batches
    if micro_batches == "auto":
        return 1
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(
            "gradient_accumulation_steps must be a positive integer (the micro-batches of a step), "
            f"got {micro_batches!r}"
        )
    return micro_batches


def check_learning_rates(config: dict[str, Any], rates: LearningRates) -> None:
    """Refuse a scheduler of DeepSpeed's that would give all modules one learning rate."""
    given = [name for name, rate in rates if rate is not None]
    scheduler = config.get("scheduler", {})
    has_rate = scheduler.get("params", {}).get("warmup_max_lr") is not None
    if given and (has_rate or scheduler.get("type") in ("OneCycle", "LRRangeTest")):
        raise ConfigError(
            f"scheduler must scale the optimizer's learning rates with omnibal.optimizer.learning_rates.{given[0]}, "
            f"got {scheduler.get('type')} with {'warmup_max_lr' if has_rate else 'rates of its own'}; "
            "leave warmup_max_lr out, or take WarmupCosineLR"
        )


def _check_clipping(config: dict[str, Any], layout: Layout) -> None:
    clipping, is_float32 = config.get("gradient_clipping", 1.0), layout.precision == "float32"
    if isinstance(clipping, bool) or not isinstance(clipping, int | float) or clipping < 0:
        raise ConfigError(f"gradient_clipping must be a number of at least 0, got {clipping!r}")
    if layout.num_stages > 1 and is_float32 and layout.zero_stage == 0 and clipping != 0:
        given = repr(clipping) if "gradient_clipping" in config else "none (DeepSpeed then clips at 1.0)"
        raise ConfigError(
            f"gradient_clipping must be 0 with fp32, ZeRO stage 0 and {layout.num_stages} pipeline stages, "
            f"got {given}; the norm would count the first stage only: set zero_optimization.stage to 1, or clipping "
            "to 0"
        )


def _check_writer(config: dict[str, Any]) -> None:
    """Refuse checkpoints of other kinds: written behind a run's back, nobody would know when one is whole."""
    checkpoint, instead = config.get("checkpoint", {}), "omnibal.run.async_save writes while training goes on"
    given = {
        "checkpoint.writer.decoupled": (checkpoint.get("writer", {}).get("decoupled", False), instead),
        "datastates_ckpt": (config.get("datastates_ckpt", False), instead),
        "checkpoint.use_node_local_storage": (checkpoint.get("use_node_local_storage", False), "all hosts share it"),
        "checkpoint.load_universal": (checkpoint.get("load_universal", False), "export a model to go on otherwise"),
    }
    for key, (value, reason) in given.items():
        if value is not False:
            raise ConfigError(f"{key} must be left out, got {value!r}; {reason}")


def _check_offload(config: dict[str, Any], layout: Layout) -> None:
    """Refuse to keep on the host, or on its disks, what DeepSpeed would leave on the device."""
    zero = config.get("zero_optimization", {})
    for key, kept in (("offload_optimizer", ("none", "cpu")), ("offload_param", ("none",))):
        device = (zero.get(key) or {}).get("device", "none")
        if device not in (*kept, "auto"):
            raise ConfigError(
                f"zero_optimization.{key}.device must be {' or '.join(kept)} with a pipeline, got {device!r}"
            )
        if device == "cpu" and layout.zero_stage != 1:
            raise ConfigError(f"zero_optimization.stage must be 1 with {key}, got {layout.zero_stage}")


def _check_precision(config: dict[str, Any]) -> None:
    """Refuse numbers that gradients are not summed in, or the optimizer does not compute in."""
    kinds = _FLOAT32_NAMES + (_BFLOAT16_NAMES if dtype_of(config) == "bfloat16" else ())
    given = config.get("data_types", {}).get("grad_accum_dtype")
    if given is not None and given not in kinds:
        raise ConfigError(f"data_types.grad_accum_dtype must be one of {', '.join(kinds)}, got {given!r}")
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if config.get("bf16", {}).get(key, False):
            raise ConfigError(f"bf16.{key} must be false, got true; under a pipeline the optimizer computes in float32")


def check_deferral(config: dict[str, Any]) -> None:
    """Refuse what takes gradients from autograd's hooks, which deferred ones do not pass, or casts within a layer."""
    for section, key in (
        ("zero_optimization", "overlap_comm"),
        ("bf16", "immediate_grad_update"),
        ("torch_autocast", "enabled"),
    ):
        if config.get(section, {}).get(key, False):
            raise ConfigError(
                f"{section}.{key} must be false under zero-bubble, got true; set it to false, or "
                "omnibal.pipeline.schedule to '1f1b'"
            )
