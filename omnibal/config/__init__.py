"""The ds_config: how it is read, its rules under a pipeline, and the plan that it names or spells out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from omnibal.cluster import Layout, Precision
from omnibal.config.section import LearningRates, OmnibalSection
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.errors import ConfigError, integer
from omnibal.families import load as load_family
from omnibal.families.base import LayerRecord, check_frozen
from omnibal.pipeline.partition import Partition, cut_parts
from omnibal.plan import Plan
from omnibal.records import explain, parse_relaxed, read_json

# DeepSpeed passes over keys that it does not know, and its pipeline engine over much that it does know.
# What DeepSpeed does as it says, or a rule below refuses with a reason of its own.
HEEDED: Final = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "optimizer", "scheduler", "gradient_clipping", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "bf16", "fp16", "data_types", "zero_optimization", "communication_data_type",
    "tensorboard", "wandb", "comet", "csv_monitor",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "comms_logger", "dump_state", "log_level", "timers",
    "disable_python_gc",
})  # fmt: skip
# Those that write files: `output_path` and `job_name` say where.
MONITORS: Final = ("tensorboard", "csv_monitor")
# What to do without keys that are not heeded.
INSTEAD: Final[Mapping[str, str]] = {
    "pipeline": "omnibal.pipeline says how the model is cut",
    "activation_checkpointing": "omnibal.pipeline.recompute says which layers recompute",
    **dict.fromkeys(
        ("data_efficiency", "curriculum_learning"),
        "omnibal.data says what is trained on, and omnibal.data.mixture when",
    ),
    "tensor_parallel": "omnibal.pipeline.num_tensor says how many ranks share each layer",
    "sequence_parallel_size": "a pack is on one device: omnibal.packing.llm_tokens says how long it may be",
    **dict.fromkeys(("amp", "torch_autocast"), "enable bf16"),
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype says it",
    "seed": "omnibal.packing.seed decides about data, omnibal.model.seed about dropout and initial weights",
    **dict.fromkeys(
        ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor"),
        "gradients are averaged over the target tokens of a step",
    ),
    **dict.fromkeys(("checkpoint", "datastates_ckpt"), "omnibal.run says when and how checkpoints are written"),
    "flops_profiler": "`omnibal profile --measure` measures layers",
    "autotuning": "`omnibal plan` finds what is fastest",
}
# What has inner keys that matter here.
OBJECTS: Final = (
    "bf16", "fp16", "zero_optimization", "data_types", "optimizer", "optimizer.params", "scheduler",
    "scheduler.params", "timers", "timers.throughput", *MONITORS,
)  # fmt: skip
# What may be `"auto"`; of `zero_optimization` DeepSpeed then takes its defaults.
AUTOMATIC: Final = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps",
})  # fmt: skip


def read_config(config: str | Path | dict[str, Any]) -> tuple[dict[str, Any], OmnibalSection]:
    """Split a ds_config, a JSON file with comments or its content, into what DeepSpeed reads and the "omnibal" section.

    The run's folder, its plan and the folders of DeepSpeed's monitors are filled in where they are left out or
    ``"auto"``. A ConfigError names the key that is wrong and the nearest known one.
    """
    if not isinstance(config, str | Path | dict):
        raise ConfigError(f"config must be the path or the content of a ds_config, got {config!r:.80}")
    content = config if isinstance(config, dict) else read_json(Path(config), "ds_config", parse_relaxed)
    if not isinstance(content, dict):
        raise ConfigError(f"ds_config must be a JSON object, got {config} with a {type(content).__name__}")
    deepspeed_config = {key: value for key, value in content.items() if key != "omnibal"}
    check_keys(deepspeed_config)
    try:
        section = OmnibalSection.model_validate(content.get("omnibal", {}))
    except ValidationError as error:
        raise ConfigError(explain(OmnibalSection, error, "omnibal")) from None
    if section.model.family is not None:
        load_family(section.model.family)
    check_learning_rates(deepspeed_config, section.optimizer.learning_rates)
    # A copy of a ds_config under another name shares neither folder nor plan with the original.
    run, pipeline = section.run, section.pipeline
    if not isinstance(config, dict) and "output" not in run.model_fields_set:
        run = run.model_copy(update={"output": f"runs/{Path(config).stem}"})
    if pipeline.plan == "auto":
        pipeline = pipeline.model_copy(update={"plan": str(run.files.plan)})
    section = section.model_copy(update={"run": run, "pipeline": pipeline})
    defaults = {"output_path": str(section.run.files.monitor), "job_name": section.run.files.folder.name}
    on = {key: value for key in MONITORS if (value := deepspeed_config.get(key, {})).get("enabled", False)}
    return deepspeed_config | {key: defaults | monitor for key, monitor in on.items()}, section


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuse what would be passed over in silence, and ``"auto"`` where nobody fills it in."""
    for key, value in config.items():
        if key not in HEEDED and not _asks_for_nothing(value):
            nearest = get_close_matches(key, HEEDED, n=1, cutoff=0.7)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else "nothing in a pipeline heeds it"
            raise ConfigError(f"{key} of a ds_config must be left out, got {value!r:.80}; {INSTEAD.get(key, remedy)}")
    for path in OBJECTS:
        found: Any = config
        for key in path.split("."):
            found = found.get(key, {})
        if not isinstance(found, dict):
            raise ConfigError(f"{path} of a ds_config must be an object, got {found!r:.80}")
    for key, value in leaves(config):
        if value == "auto" and key not in AUTOMATIC and not key.startswith("zero_optimization."):
            raise ConfigError(
                f"{key} of a ds_config must be a value, got 'auto', which transformers' Trainer would fill in; "
                f"here only {', '.join(sorted(AUTOMATIC))} may be"
            )
    for key in ("bf16", "fp16"):
        enabled = config.get(key, {}).get("enabled", False)
        if not isinstance(enabled, bool):
            raise ConfigError(f"{key}.enabled of a ds_config must be true or false, got {enabled!r:.80}")


def _asks_for_nothing(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(map(_asks_for_nothing, value.values()))
    return not value


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested objects, with its keys joined by dots."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings_of(config: Mapping[str, Any], section: OmnibalSection) -> dict[str, Any]:
    """All settings of a run by their keys, but what must not stand in a checkpoint, which goes to more people."""
    whole = {**config, "omnibal": section.model_dump(mode="json")}
    return {key: value for key, value in leaves(whole) if key != "comet.api_key"}


def complete_deepspeed_config(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Fill in what follows from the pipeline, but ``"auto"`` steps (`fill_in_steps`); refuse what cannot be right."""
    micro_batches = micro_batches_of(config)
    _check_clipping(config, layout)
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
    return 1 if micro_batches == "auto" else integer("gradient_accumulation_steps", micro_batches, 1)


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
    """Refuse what takes gradients from autograd's hooks, which deferred ones do not pass."""
    for section, key in (("zero_optimization", "overlap_comm"), ("bf16", "immediate_grad_update")):
        if config.get(section, {}).get(key, False):
            raise ConfigError(
                f"{section}.{key} must be false under zero-bubble, got true; set it to false, or "
                "omnibal.pipeline.schedule to '1f1b'"
            )
