"""What a Trainer's settings say of batches: a rule for each of them, and what packs make of those that are honoured.

No transformers is imported before a Trainer of transformers 5 is checked: ``replace_loader`` serves older ones.
"""

import sys
from collections.abc import Mapping
from copy import copy
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from packaging.version import Version

from omnibal.advise.wait import Sharding
from omnibal.errors import ConfigError
from omnibal.profile.records import Level

if TYPE_CHECKING:
    from transformers import Trainer

SFT_FLOOR: Final = "1.16"  # the oldest TRL in the tests: its loss is called with the target tokens of the whole step
FLOOR: Final = "5.23"  # the oldest transformers that the tests run with: balance changes what Trainer does inside
COUNTED_BY_ACCELERATE: Final = "4.52"  # before it, Accelerate divides losses by the micro-batches of a step


class Rule(NamedTuple):
    """What becomes of a setting under packs."""

    effect: str
    """``"honoured"``, ``"harmless"``, or why a value is refused."""
    only: tuple[Any, ...] | None = None
    """Values that are taken; None for all."""
    of_loader: bool = False
    """Whether a trainer whose loader alone is replaced refuses other values, too."""


HARMLESS, HONOURED = Rule("harmless"), Rule("honoured")
SETTINGS: Final[Mapping[str, Rule]] = MappingProxyType(
    dict.fromkeys(
        (
            # Optimizer and schedule, over the steps that packs make.
            "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args",
            "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
            # How a micro-batch is computed.
            "bf16", "fp16", "tf32", "activation_checkpointing", "activation_checkpointing_kwargs",
            "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile_backend", "torch_compile_mode",
            "use_liger_kernel", "liger_kernel_config", "use_cache", "torch_empty_cache_steps", "full_determinism",
            # Evaluation is Trainer's own.
            "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only",
            "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
            "include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "label_names",
            "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
            # What is logged, saved and sent.
            "output_dir", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
            "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm",
            "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
            "save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit",
            "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
            "hub_always_push", "hub_revision", "skip_memory_metrics", "debug",
            # Which ranks there are, and how they talk.
            "use_cpu", "local_rank", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_backend", "ddp_timeout",
            # Read by scripts, not by Trainer.
            "do_train", "do_eval", "do_predict", "resume_from_checkpoint",
            # Of batches that packs take the place of: packs are drawn by their own seeded order, each sample once.
            "length_column_name", "accelerator_config.use_seedable_sampler", "accelerator_config.even_batches",
            "accelerator_config.non_blocking", "accelerator_config.use_configured_state",
        ),
        HARMLESS,
    )
    | dict.fromkeys(
        (
            "per_device_train_batch_size", "accelerator_config", "accelerator_config.split_batches",
            "gradient_accumulation_steps", "accelerator_config.gradient_accumulation_kwargs",  # Trainer reads num_steps
            "num_train_epochs", "max_steps", "seed", "data_seed", "ignore_data_skip",
            "restore_callback_states_from_checkpoint", "dataloader_num_workers", "dataloader_pin_memory",
            "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
            "torch_compile", "ddp_find_unused_parameters", "ddp_static_graph", "fsdp", "fsdp_config", "deepspeed",
            "parallelism_config",  # context and sequence parallel ranks are refused by their numbers
        ),
        HONOURED,
    )
    | {
        "train_sampling_strategy": Rule("balance draws packs", ("random",)),
        "remove_unused_columns": Rule("it drops what the collator reads", (False,)),
        "average_tokens_across_devices": Rule("the loss is that of all ranks' target tokens", (True,)),
        "label_smoothing_factor": Rule("the loss knows no smoothing", (0.0,)),
        "neftune_noise_alpha": Rule("its noise shrinks with the length of what is run", (None,)),
        "auto_find_batch_size": Rule("packs do not shrink", (False,), of_loader=True),
        "dataloader_drop_last": Rule("each sample is trained once an epoch", (False,), of_loader=True),
        "dataloader_in_order": Rule("the packs of a step belong together", (True,), of_loader=True),
        "accelerator_config.dispatch_batches": Rule("each rank reads its own packs", (None, False), of_loader=True),
        # Of TRL's SFTConfig.
        "packing": Rule("balance packs", (False, None)),
        "padding_free": Rule("balance packs", (False, None)),
    }
)  # fmt: skip
"""Every field of TrainingArguments and of its AcceleratorConfig."""


def refuse_values(args: Any, *, of_loader: bool = False) -> None:
    """Refuse settings by their rules; a field that an older or newer transformers lacks is as it is by default.

    Args:
        of_loader: Whether only what a replaced loader would break is refused.
    """
    for name, rule in SETTINGS.items():
        if rule.only is None or (of_loader and not rule.of_loader):
            continue
        *outer, field = name.split(".")
        holder = getattr(args, outer[0], None) if outer else args
        value = getattr(holder, field, rule.only[0])
        if value not in rule.only:
            raise ConfigError(f"{name} must be {rule.only[0]} to train on packs, got {value}; {rule.effect}")


def refuse_settings(trainer: "Trainer") -> None:
    """Refuse what packs would silently break, or be broken by; the message says what each must be."""
    import transformers
    from transformers import Trainer

    if Version(transformers.__version__) < Version(FLOOR):
        raise ConfigError(
            f"transformers must be {FLOOR} or newer, got {transformers.__version__}; "
            "omnibal.integrations.loops.replace_loader serves older ones"
        )
    args, kind = trainer.args, type(trainer)
    if "get_train_dataloader" in vars(trainer):
        raise ConfigError("balance must be called once for a trainer, got one that trains on packs")
    of_loss = () if keeps_sft_loss(trainer) else ("compute_loss", "training_step")
    for method in ("get_train_dataloader", "_get_train_sampler", *of_loss):
        if getattr(kind, method) is not getattr(Trainer, method):
            raise ConfigError(
                f"trainer must have Trainer's own {method}, got that of {kind.__name__}; "
                "omnibal.integrations.loops.replace_loader(trainer, limits, model=model) changes its loader alone"
            )
    refuse_values(args)
    _refuse_shared_ranks(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "config"):
        raise ConfigError(f"model must be one of transformers' to train on packs, got {type(model).__name__}")
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            "compute_loss_func must be None to train on packs, got one; their loss is exact over all tokens"
        )


def _refuse_shared_ranks(trainer: "Trainer") -> None:
    """Refuse ranks that share a batch in a way that packs cannot be shared, or that Trainer does not tell."""
    for name, ranks in (("pipeline-parallel ranks", _of_mesh(trainer, "pp_size")), ("n_gpu", trainer.args.n_gpu)):
        if ranks > 1:
            raise ConfigError(f"{name} must be 1 to train on packs, got {ranks}; a pack is on one device")
    deepspeed_config = (
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config if trainer.is_deepspeed_enabled else {}
    )
    shared = (deepspeed_config.get("tensor_parallel") or {}).get("autotp_size", 0)
    if shared not in (0, 1):
        raise ConfigError(
            f"tensor_parallel.autotp_size must be 1 to train on packs, got {shared}; ranks that share layers need one "
            "pack, and Trainer does not say which they are: DistributedConfig(tp_size=...) does"
        )
    for name, ranks in (("context", trainer.get_cp_size()), ("sequence", trainer.get_sp_size())):
        if ranks > 1:
            raise ConfigError(
                f"{name}-parallel ranks must be 1 to train on packs, got {ranks}; Trainer splits batches along their "
                "tokens, which pixels lack; balanced_loader(mesh=...) deals packs to groups of ranks in other loops"
            )


def keeps_sft_loss(trainer: Any) -> bool:
    """Whether a trainer is TRL's SFTTrainer with its own loss, which divides by the target tokens of the step."""
    module = sys.modules.get("trl.trainer.sft_trainer")  # not imported for trainers of other kinds
    if module is None or not isinstance(trainer, module.SFTTrainer):
        return False
    methods = ("compute_loss", "training_step", "log")
    is_own = all(getattr(type(trainer), name) is getattr(module.SFTTrainer, name) for name in methods)
    # Older versions hand the loss to the model.
    return is_own and Version(version("trl")) >= Version(SFT_FLOOR)


def layout_of(trainer: Any) -> Sharding:
    """How the trainer's ranks share their work."""
    if trainer.is_deepspeed_enabled:
        layouts: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3")
        return layouts[int(trainer.accelerator.state.deepspeed_plugin.zero_stage)]
    return "fsdp" if trainer.is_fsdp_enabled or _of_mesh(trainer, "fsdp_size") > 1 else "ddp"


def _of_mesh(trainer: Any, name: str) -> int:
    """A size of the mesh that ``from_pretrained(distributed_config=...)`` has laid the model on."""
    config = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    return int(getattr(config, name, None) or 1)


def replicas_of(trainer: Any) -> tuple[int, int]:
    """This process's data-parallel rank, and how many there are: ranks that share each tensor get the same packs."""
    sharing = trainer.get_tp_size()  # the innermost dimension of the device mesh
    return trainer.args.process_index // sharing, trainer.args.world_size // sharing


def data_seed(trainer: Any) -> int:
    args = trainer.args
    return int(args.seed if args.data_seed is None else args.data_seed)


def batch_size_of(trainer: Any, num_replicas: int) -> int:
    """Samples of a micro-batch of one rank, as the settings ask for."""
    size: int = trainer.args.per_device_train_batch_size
    if not trainer.accelerator.split_batches:
        return size
    if size % num_replicas:
        raise ConfigError(
            f"per_device_train_batch_size must be a multiple of the {num_replicas} data-parallel ranks with "
            f"split_batches=True, got {size}"
        )
    return size // num_replicas


def set_micro_batches(trainer: Any, micro_batches: int) -> None:
    """Let an optimizer step have as many micro-batches of each rank; the arguments that the user holds stay."""
    found = trainer.args.gradient_accumulation_steps
    if micro_batches == found:
        return
    own = Version(getattr(sys.modules.get("transformers"), "__version__", COUNTED_BY_ACCELERATE))
    if own < Version(COUNTED_BY_ACCELERATE) and trainer.accelerator.gradient_accumulation_steps == found:
        trainer.accelerator.gradient_accumulation_steps = micro_batches
    trainer.args = copy(trainer.args)
    trainer.args.gradient_accumulation_steps = micro_batches
    if trainer.is_deepspeed_enabled:  # DeepSpeed has a count of its own, and checks that its batch sizes agree
        config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_accumulation_steps"] = micro_batches
        config.pop("train_batch_size", None)


def recompute_of(trainer: Any) -> Level:
    """What layers compute again in their backward passes."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    by_model = trainer.args.gradient_checkpointing or getattr(model, "is_activation_checkpointing", False)
    by_fsdp = trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.activation_checkpointing
    return "full" if by_model or by_fsdp else "none"
