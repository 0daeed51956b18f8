"""What a transformers.Trainer's settings say to packs: who shares the work, and what would break them."""

from transformers import Trainer

from omnibal.advise.wait import Trainer as Layout
from omnibal.errors import ConfigError


def layout_of(trainer: Trainer) -> Layout:
    """How the trainer's ranks share their work."""
    if trainer.is_deepspeed_enabled:
        layouts: tuple[Layout, ...] = ("ddp", "zero1", "zero2", "zero3")
        return layouts[int(trainer.accelerator.state.deepspeed_plugin.zero_stage)]
    return "fsdp" if trainer.is_fsdp_enabled else "ddp"


def replicas_of(trainer: Trainer) -> tuple[int, int]:
    """This process's data-parallel rank, of how many: ranks that share each tensor get the same packs."""
    sharing = trainer.get_tp_size()  # the innermost dimension of the device mesh
    return trainer.args.process_index // sharing, trainer.args.world_size // sharing


def wants_all_gradients(trainer: Trainer) -> bool:
    """Whether the host cannot do without the ViT's gradients, even where no rank has an image.

    DDP waits for the gradients of all parameters under gradient checkpointing, unless told not to. DeepSpeed reduces
    gradients bucket by bucket, and ZeRO 3 gathers weights in the order of the steps before.
    """
    if trainer.is_deepspeed_enabled:
        return True
    finds_unused = trainer.args.ddp_find_unused_parameters
    return bool(trainer.args.gradient_checkpointing if finds_unused is None else not finds_unused)


def refuse_settings(trainer: Trainer) -> None:
    """Refuse what packs would silently break, or be broken by.

    Raises:
        ConfigError: There is such a setting; the message names it and what it must be.
    """
    args, kind = trainer.args, type(trainer)
    if "get_train_dataloader" in vars(trainer):
        raise ConfigError("balance must be called once for a trainer, got one that trains on packs")
    for method in ("get_train_dataloader", "_get_train_sampler", "compute_loss", "training_step"):
        if getattr(kind, method) is not getattr(Trainer, method):
            raise ConfigError(f"trainer must have Trainer's own {method}, got that of {kind.__name__}")
    settings = {
        "train_sampling_strategy": (args.train_sampling_strategy, "random"),
        "remove_unused_columns": (args.remove_unused_columns, False),
        "average_tokens_across_devices": (args.average_tokens_across_devices, True),
        "label_smoothing_factor": (args.label_smoothing_factor, 0.0),
        "auto_find_batch_size": (args.auto_find_batch_size, False),
        "context-parallel ranks": (trainer.get_cp_size(), 1),
        "sequence-parallel ranks": (trainer.get_sp_size(), 1),
        "n_gpu of a process": (max(args.n_gpu, 1), 1),
    }
    for name, (value, expected) in settings.items():
        if value != expected:
            raise ConfigError(f"{name} must be {expected} to train on packs, got {value}")
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            "compute_loss_func must be None to train on packs, got one; their loss is exact over all tokens"
        )
