"""Keys of a ds_config beside its "omnibal" section: those that a pipeline heeds, and what to do without the others.

DeepSpeed itself passes over keys that it does not know, and its pipeline engine over much that it does know.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

from omnibal.errors import ConfigError

HEEDED: Final = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "optimizer", "scheduler", "gradient_clipping", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "bf16", "fp16", "torch_autocast", "data_types",
    "zero_optimization", "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    "checkpoint", "datastates_ckpt",
    "tensorboard", "wandb", "comet", "csv_monitor",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "comms_logger", "dump_state", "log_level", "timers",
    "disable_python_gc",
})  # fmt: skip
"""What DeepSpeed does as it says, or `rules` refuses with a reason of its own."""
MONITORS: Final = ("tensorboard", "csv_monitor")
"""Those that write files: ``output_path`` and ``job_name`` say where."""
INSTEAD: Final[Mapping[str, str]] = {
    "pipeline": "omnibal.pipeline says how the model is cut",
    "activation_checkpointing": "omnibal.pipeline.recompute says which layers recompute",
    "data_efficiency": "omnibal.data says what is trained on, and omnibal.data.mixture when",
    "curriculum_learning": "omnibal.data says what is trained on, and omnibal.data.mixture when",
    "tensor_parallel": "a layer is on one device: omnibal.pipeline.num_stages says how many share the model",
    "sequence_parallel_size": "a pack is on one device: omnibal.packing.llm_tokens says how long it may be",
    "amp": "enable bf16",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype says it",
    "seed": "omnibal.packing.seed decides about data, omnibal.model.seed about dropout and initial weights",
    "gradient_allreduce_op": "gradients are averaged over the target tokens of a step",
    "flops_profiler": "`omnibal profile --measure` measures layers",
    "autotuning": "`omnibal plan` finds what is fastest",
}  # fmt: skip
"""What to do without keys that are not heeded."""
OBJECTS: Final = (
    "bf16", "fp16", "zero_optimization", "data_types", "torch_autocast", "optimizer", "optimizer.params", "scheduler",
    "scheduler.params", "timers", "timers.throughput", "checkpoint", "checkpoint.writer", *MONITORS,
)  # fmt: skip
"""What has inner keys that matter here."""
AUTOMATIC: Final = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "scheduler.params.total_num_steps",
    "scheduler.params.warmup_num_steps",
})  # fmt: skip
"""What may be ``"auto"``; of ``zero_optimization`` DeepSpeed then takes its defaults."""


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuse what would be passed over in silence, and ``"auto"`` where nobody fills it in.

    Args:
        config: ds_config without the "omnibal" section.

    Raises:
        ConfigError: A key asks for something that a pipeline does not do, or is unknown: the message names what does
            it, or the nearest key. Or a value is of the wrong kind.
    """
    for key, value in config.items():
        if key not in HEEDED and not _asks_for_nothing(value):
            raise ConfigError(f"{key} of a ds_config must be left out, got {value!r:.80}; {_remedy(key)}")
    for place in OBJECTS:
        value = _value(config, place)
        if not isinstance(value, dict):
            raise ConfigError(f"{place} of a ds_config must be an object, got {value!r:.80}")
    for place in _automatic(config):
        if place not in AUTOMATIC and not place.startswith("zero_optimization."):
            raise ConfigError(
                f"{place} of a ds_config must be a value, got 'auto', which transformers' Trainer would fill in; "
                f"here only {', '.join(sorted(AUTOMATIC))} may be"
            )
    for place in ("bf16", "fp16", "torch_autocast"):
        enabled = config.get(place, {}).get("enabled", False)
        if not isinstance(enabled, bool):
            raise ConfigError(f"{place}.enabled of a ds_config must be true or false, got {enabled!r:.80}")


def _value(config: Any, place: str) -> Any:
    """What stands there; an empty object where nothing does."""
    for key in place.split("."):
        config = config.get(key, {})
    return config


def _asks_for_nothing(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(map(_asks_for_nothing, value.values()))
    return not value


def _remedy(key: str) -> str:
    if key in INSTEAD:
        return INSTEAD[key]
    nearest = get_close_matches(key, HEEDED, n=1, cutoff=0.7)
    return f"did you mean {nearest[0]!r}?" if nearest else "nothing in a pipeline heeds it"


def _automatic(value: Any, place: str = "") -> Iterator[str]:
    """Where ``"auto"`` stands."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _automatic(inner, f"{place}.{key}" if place else str(key))
    elif value == "auto":
        yield place
