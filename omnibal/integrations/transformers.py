"""Equips a transformers.Trainer with balanced packs: ``balance(trainer, limits)`` before ``trainer.train()``."""

from functools import partial
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio
from omnibal.data.packs import random_padded_steps
from omnibal.errors import ConfigError, DataError
from omnibal.integrations.loading import PackedView, PackSampler
from omnibal.integrations.loops import PackLoader, gathered, measured, refuse_unlike_sizes, two_samples
from omnibal.integrations.packing import PackCollator, check_packed, loss_per_target, positions_of

COMPARED_STEPS = 64
"""Steps of random batches that the printed line compares with."""


def balance(
    trainer: Trainer, limits: PackLimits, *, lengths: SampleLengths | None = None, check_lengths: bool = True
) -> PackSampler:
    """Train on balanced packs: the same samples, each once an epoch, without padding and with ranks that end together.

    Call it on all ranks before ``trainer.train()``. It wraps the trainer's collator and replaces its training loader
    and loss; evaluation keeps its own batches. A pack is a micro-batch, so ``per_device_train_batch_size`` no longer
    counts: a step holds ``gradient_accumulation_steps`` packs of every rank. The loss of a step is the mean over all of
    its target tokens, on all ranks and in all packs, whatever the model makes of it otherwise. A run goes on from
    Trainer's own checkpoints, on as many ranks, with the samples that would have followed. Where Trainer warns then of
    missing weights (transformers 5.23 does for InternVL), load the model from the checkpoint's folder before.

    For one process or DDP, and the model types in ``omnibal.integrations.packing.FAMILIES``.

    Args:
        trainer: Before training.
        limits: The most a pack may hold.
        lengths: Of every sample of the training dataset, in ``pixel_values`` rows (tiles or patches) and
            ``input_ids``; by default each sample is read once, on one of the ranks, to count them.
        check_lengths: Whether a sample that is not as long as planned ends the run: plans are no better than lengths.

    Returns:
        The sampler, whose ``step`` tells what each step holds.

    Raises:
        ConfigError: The trainer's settings or its model do not allow packs, or ranks hold different data.
        DataError: The dataset or its collator does not, or the lengths are not the dataset's.
    """
    _refuse_settings(trainer)
    args, dataset = trainer.args, _sized_dataset(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    measuring = PackCollator(trainer.data_collator, positions_of(model.config))
    refuse_unlike_sizes(len(dataset), None if lengths is None else len(lengths))
    if lengths is None:
        lengths = measured(measuring, dataset)
    sampler = PackSampler(
        lengths,
        limits,
        num_replicas=args.world_size,
        rank=args.process_index,
        micro_batches=args.gradient_accumulation_steps,
        seed=args.seed if args.data_seed is None else args.data_seed,
        image_in_every_pack=_wants_all_gradients(trainer),
    )
    sampler.verify(gathered)
    check_packed(model, measuring, [dataset[sample] for sample in two_samples(lengths)])
    collator = PackCollator(trainer.data_collator, positions_of(model.config), lengths if check_lengths else None)
    trainer.compute_loss_func = loss_per_target
    vars(trainer)["get_train_dataloader"] = partial(_loader, trainer, dataset, sampler, collator)
    if trainer.is_world_process_zero():
        print(describe(sampler, batch_size=args.per_device_train_batch_size))
    return sampler


def _loader(trainer: Trainer, dataset: Any, sampler: PackSampler, collator: PackCollator) -> PackLoader:
    """Not handed to ``accelerator.prepare``, which would deal a rank's packs to the ranks once more.

    On resuming Trainer skips batches and reaches the sampler's ``set_epoch`` through Accelerate's ``SkipBatchSampler``.
    """
    args = trainer.args
    view: Any = PackedView(dataset)
    collate: Any = collator  # what the view draws is no list
    return PackLoader(
        view,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    )


def describe(sampler: PackSampler, *, batch_size: int) -> str:
    """One line: what an epoch becomes, and how long ranks wait by load beside random batches of as many samples."""
    lengths, epoch = sampler.lengths, list(sampler.steps())
    loads = Load.stack([step.load(lengths) for step in epoch])
    num_packs = loads.llm_tokens.size
    per_step, before = len(lengths) / len(epoch), batch_size * sampler.num_replicas * sampler.micro_batches
    text = (
        f"omnibal: {len(lengths)} samples in {num_packs} packs, {len(lengths) / num_packs:.1f} a pack; "
        f"{len(epoch)} steps an epoch with {per_step:.1f} samples a step ({before} were set); {_waiting(loads)}"
    )
    if before > len(lengths):
        return text
    random = random_padded_steps(
        lengths,
        batch_size=batch_size,
        num_replicas=sampler.num_replicas,
        micro_batches=sampler.micro_batches,
        steps=COMPARED_STEPS,
    )
    padding = 1 - lengths.llm_tokens.mean() * batch_size / random.llm_tokens.mean()
    return f"{text}; random batches of {batch_size}: {_waiting(random)}, {max(padding, 0):.0%} of tokens are padding"


def _waiting(loads: Load) -> str:
    """Dist Ratios of whole steps: ranks of DDP wait once, at its end. Loads are (steps, ranks, micro-batches)."""
    vision, tokens = (dist_ratio(load.sum(axis=2)) for load in (loads.vision_units, loads.llm_tokens))
    return f"Dist Ratio {vision:.1%} in vision units, {tokens:.1%} in tokens"


def _refuse_settings(trainer: Trainer) -> None:
    """Refuse what packs would silently break, or be broken by."""
    args, kind = trainer.args, type(trainer)
    for method in ("get_train_dataloader", "_get_train_sampler", "compute_loss", "training_step"):
        if getattr(kind, method) is not getattr(Trainer, method):
            raise ConfigError(f"trainer must have Trainer's own {method}, got that of {kind.__name__}")
    settings = {
        "train_sampling_strategy": (args.train_sampling_strategy, "random"),
        "remove_unused_columns": (args.remove_unused_columns, False),
        "average_tokens_across_devices": (args.average_tokens_across_devices, True),
        "label_smoothing_factor": (args.label_smoothing_factor, 0.0),
        "deepspeed": (trainer.is_deepspeed_enabled, False),
        "fsdp": (trainer.is_fsdp_enabled, False),
        "n_gpu of a process": (max(args.n_gpu, 1), 1),
    }
    for name, (value, expected) in settings.items():
        if value != expected:
            raise ConfigError(f"{name} must be {expected} to train on packs, got {value}")
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            "compute_loss_func must be None to train on packs, got one; their loss is exact over all tokens"
        )


def _sized_dataset(trainer: Trainer) -> Any:
    dataset = trainer.train_dataset
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        found = type(dataset).__name__
        raise DataError(f"train_dataset must have a length and be read by index, got {found}; packs are planned ahead")
    return dataset


def _wants_all_gradients(trainer: Trainer) -> bool:
    """Whether DDP waits for the gradients of all parameters, as it does under gradient checkpointing unless told."""
    finds_unused = trainer.args.ddp_find_unused_parameters
    return bool(trainer.args.gradient_checkpointing if finds_unused is None else not finds_unused)
