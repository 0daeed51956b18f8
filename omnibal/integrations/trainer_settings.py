"""What a transformers.Trainer's settings say to packs: who shares the work, and what would break them."""

from copy import copy
from typing import Final

import transformers
from packaging.version import Version
from transformers import Trainer

from omnibal.advise.memory import RankMemory
from omnibal.advise.wait import Sharding
from omnibal.cluster import OVERHEAD_BYTES, Cluster
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.integrations.losses import keeps_sft_loss, works_on_targets
from omnibal.profile.records import Level, ModelProfile

FLOOR: Final = "5.23"
"""The oldest transformers that the tests run with: ``balance`` changes what Trainer does inside."""


def layout_of(trainer: Trainer) -> Sharding:
    """How the trainer's ranks share their work."""
    if trainer.is_deepspeed_enabled:
        layouts: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3")
        return layouts[int(trainer.accelerator.state.deepspeed_plugin.zero_stage)]
    return "fsdp" if trainer.is_fsdp_enabled or _of_mesh(trainer, "fsdp_size") > 1 else "ddp"


def _of_mesh(trainer: Trainer, name: str) -> int:
    """A size of the mesh that ``from_pretrained(distributed_config=...)`` has laid the model on."""
    config = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    return int(getattr(config, name, None) or 1)


def replicas_of(trainer: Trainer) -> tuple[int, int]:
    """This process's data-parallel rank, of how many: ranks that share each tensor get the same packs."""
    sharing = trainer.get_tp_size()  # the innermost dimension of the device mesh
    return trainer.args.process_index // sharing, trainer.args.world_size // sharing


def samples_of(trainer: Trainer, num_replicas: int) -> int:
    """Samples of an optimizer step, as the trainer's arguments ask for them: the global batch."""
    args = trainer.args
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * num_replicas)


def set_micro_batches(trainer: Trainer, micro_batches: int) -> None:
    """Let an optimizer step have as many micro-batches of each rank; the arguments that the user holds stay."""
    if micro_batches == trainer.args.gradient_accumulation_steps:
        return
    trainer.args = copy(trainer.args)
    trainer.args.gradient_accumulation_steps = micro_batches
    if trainer.is_deepspeed_enabled:  # it has a count of its own, and checks that its batch sizes agree
        config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_accumulation_steps"] = micro_batches
        config.pop("train_batch_size", None)


def recompute_of(trainer: Trainer) -> Level:
    """What layers compute again in their backward passes."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    by_model = trainer.args.gradient_checkpointing or getattr(model, "is_activation_checkpointing", False)
    by_fsdp = trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.activation_checkpointing
    return "full" if by_model or by_fsdp else "none"


def memory_of(trainer: Trainer, profile: ModelProfile | None, memory_gib: float) -> RankMemory:
    """What ranks hold, where they have so much memory each.

    Raises:
        ConfigError: Nobody has counted the model's family, or there is no memory.
    """
    if profile is None:
        raise ConfigError(
            f"memory_gib must be None for a model whose layers are not counted, got {memory_gib} for "
            f"{type(trainer.model).__name__}; say how much a pack may hold: balance(trainer, PackLimits(…))"
        )
    least = OVERHEAD_BYTES / 2**30
    if not least < memory_gib < float("inf"):
        raise ConfigError(
            f"memory_gib must be more than the {least:.1f} GiB that a device holds beside the model, got {memory_gib}"
        )
    device = Device.named(profile.device)
    cluster = Cluster(1, trainer.args.world_size, device, memory_bytes=memory_gib * 2**30)
    return RankMemory(profile, layout_of(trainer), cluster, recompute_of(trainer), works_on_targets(trainer))


def wants_all_gradients(trainer: Trainer) -> bool:
    """Whether the host cannot do without the ViT's gradients, even where no rank has an image.

    DDP waits for the gradients of all parameters, unless it looks for unused ones in every step: it does not where the
    model, by itself or by the trainer's settings, computes activations again. DeepSpeed reduces gradients bucket by
    bucket, and ZeRO 3 gathers weights in the order of the steps before.
    """
    ddp = trainer.accelerator.ddp_handler
    return bool(trainer.is_deepspeed_enabled or ddp.static_graph or not ddp.find_unused_parameters)


def refuse_settings(trainer: Trainer) -> None:
    """Refuse what packs would silently break, or be broken by.

    Raises:
        ConfigError: There is such a setting; the message names it and what it must be.
    """
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
    settings = {
        "train_sampling_strategy": (args.train_sampling_strategy, "random"),
        "remove_unused_columns": (args.remove_unused_columns, False),
        "average_tokens_across_devices": (args.average_tokens_across_devices, True),
        "label_smoothing_factor": (args.label_smoothing_factor, 0.0),
        "neftune_noise_alpha": (args.neftune_noise_alpha, None),  # its noise shrinks with the length of what is run
        "auto_find_batch_size": (args.auto_find_batch_size, False),
        "packing": (getattr(args, "packing", None) or False, False),  # SFTTrainer's
        "padding_free": (getattr(args, "padding_free", None) or False, False),
        "pipeline-parallel ranks": (_of_mesh(trainer, "pp_size"), 1),
        "n_gpu of a process": (max(args.n_gpu, 1), 1),
    }
    for name, (value, expected) in settings.items():
        if value != expected:
            raise ConfigError(f"{name} must be {expected} to train on packs, got {value}")
    for name, ranks in (("context", trainer.get_cp_size()), ("sequence", trainer.get_sp_size())):
        if ranks > 1:
            raise ConfigError(
                f"{name}-parallel ranks must be 1 to train on packs, got {ranks}; Trainer splits batches along their "
                "tokens, which pixels lack; balanced_loader(mesh=...) deals packs to groups of ranks in other loops"
            )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "config"):
        raise ConfigError(f"model must be one of transformers' to train on packs, got {type(model).__name__}")
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            "compute_loss_func must be None to train on packs, got one; their loss is exact over all tokens"
        )
