"""Which settings a run may change when it goes on from a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from omnibal.config.section import OmnibalSection

Rule = Literal["taken", "refused", "by effect"]

_TAKEN: Final = (
    # a step: sampler.load_state_dict deals the epoch's remaining packs to other micro-batches
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "torch_autocast", "bf16", "fp16",
    "optimizer.params.lr", "optimizer.params.weight_decay", "optimizer.params.betas", "optimizer.params.eps",
    "optimizer.params.momentum", "optimizer.params.dampening", "optimizer.params.nesterov",
    "scheduler.params",
    # how gradients travel
    "communication_data_type", "prescale_gradients", "gradient_predivide_factor",
    *(f"zero_optimization.{name}" for name in (
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "load_from_fp32_weights",
        "ignore_unused_parameters", "log_trace_cache_warnings", "enable_sanity_checks",
    )),
    # what is written and logged
    "checkpoint", "datastates_ckpt", "tensorboard", "wandb", "comet", "csv_monitor", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "comms_logger", "dump_state", "log_level", "timers",
    "disable_python_gc",
    "omnibal.model.path", "omnibal.model.family", "omnibal.model.weights", "omnibal.model.seed",
    "omnibal.model.lora.dropout",
    "omnibal.data.held_out", "omnibal.data.images", "omnibal.data.broken", "omnibal.data.workers",
    "omnibal.data.max_image_pixels",
    "omnibal.packing.samples_per_step",
    "omnibal.pipeline.recompute", "omnibal.pipeline.schedule",
    "omnibal.optimizer.learning_rates.vision", "omnibal.optimizer.learning_rates.projector",
    "omnibal.optimizer.learning_rates.language",
    "omnibal.run.output", "omnibal.run.epochs", "omnibal.run.max_steps", "omnibal.run.save_every", "omnibal.run.keep",
    "omnibal.run.evaluate_every", "omnibal.cluster",
)  # fmt: skip
_REFUSED: Final = (
    # round_robin_gradients and parameter_alignment say which rank has the state of which parameter
    "zero_optimization",
    "omnibal.optimizer.weight_decay",
    "omnibal.model.lora.rank", "omnibal.model.lora.alpha", "omnibal.model.lora.targets",
    "omnibal.model.lora.modules_to_save",
)  # fmt: skip
_BY_EFFECT: Final = (
    # the checkpoint's layout: classes and groups of the optimizer, precision, partition, what is trained
    "optimizer", "optimizer.params", "scheduler", "zero_optimization.stage", "bf16.enabled", "data_types",
    "omnibal.model.frozen", "omnibal.pipeline.num_stages", "omnibal.pipeline.partition", "omnibal.pipeline.plan",
    # the place in the data: lengths, limits and how they are packed
    "omnibal.data.train", "omnibal.data.max_tiles", "omnibal.data.streaming", "omnibal.data.mixture",
    "omnibal.packing.vision_units", "omnibal.packing.llm_tokens", "omnibal.packing.method",
    "omnibal.packing.oversized", "omnibal.packing.exchange_steps", "omnibal.packing.seed",
)  # fmt: skip
RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_TAKEN, "taken"),
    **dict.fromkeys(_REFUSED, "refused"),
    **dict.fromkeys(_BY_EFFECT, "by effect"),
}
"""The rule for a key whose value is not that of the checkpoint; keys within it follow, but for those named here.

``taken``: the new value holds, and a line says so. ``refused``: the run does not go on. ``by effect``: the run does not
go on where the layout of the checkpoint or the place in the data, which follow from several keys, are other ones; else
the new value is taken.
"""
_NOT_KEPT: Final = ("comet.api_key",)
"""A checkpoint goes to more people than a ds_config."""


class Change(NamedTuple):
    """A setting that is not that of the checkpoint."""

    key: str
    saved: Any
    value: Any

    def __str__(self) -> str:
        """For a line of several."""
        return f"{self.key} {_shown(self.value)} (was {_shown(self.saved)})"


def rule_of(key: str) -> Rule:
    """The rule for a key, or for the nearest one around it.

    >>> rule_of("optimizer.params.lr"), rule_of("zero_optimization.round_robin_gradients")
    ('taken', 'refused')
    """
    while key not in RULES:
        key, _, _ = key.rpartition(".")
        if not key:  # what `check_keys` lets pass because it asks for nothing
            return "taken"
    return RULES[key]


def settings_of(config: Mapping[str, Any], section: OmnibalSection) -> dict[str, Any]:
    """All settings of a run by their keys, as a checkpoint keeps them.

    Args:
        config: ds_config without the section, complete.
        section: Its "omnibal" section.
    """
    whole = {**config, "omnibal": section.model_dump(mode="json")}
    return {key: value for key, value in _leaves(whole) if key not in _NOT_KEPT}


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Settings that differ; what is left out is None."""
    keys = dict.fromkeys((*saved, *now))
    return [Change(key, saved.get(key), now.get(key)) for key in keys if saved.get(key) != now.get(key)]


def is_refused(change: Change) -> bool:
    """Whether a run does not go on with it; to leave out what is off changes nothing."""
    return rule_of(change.key) == "refused" and (change.saved or None) != (change.value or None)


def _leaves(value: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{place}{key}.")
        else:
            yield f"{place}{key}", inner


def _shown(value: Any) -> str:
    return "left out" if value is None else f"{value!r:.60}"
