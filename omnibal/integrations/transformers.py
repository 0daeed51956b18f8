"""Equips a transformers.Trainer with balanced packs: ``balance(trainer, limits)`` before ``trainer.train()``."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from omnibal.advise.wait import phase_costs
from omnibal.data.checks import integer
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.policies import Oversized
from omnibal.data.source_draws import typical_lengths
from omnibal.errors import ConfigError, DataError
from omnibal.feeds.sampler import check_agreement
from omnibal.integrations.expected import Costs, Schedule, counted_profile, describe
from omnibal.integrations.lengths import (
    LENGTHS,
    kept_lengths,
    refuse_other_lengths,
    refuse_unlike_sizes,
    two_samples,
    with_sources,
)
from omnibal.integrations.loading import PackedView, PackSampler
from omnibal.integrations.loops import PackLoader
from omnibal.integrations.losses import Reduction, StepLoss
from omnibal.integrations.packing import PackCollator, arguments_of, positions_of
from omnibal.integrations.padded import PaddedCollator, PaddedSampler
from omnibal.integrations.searched import fit_step
from omnibal.integrations.trainer_hooks import (
    ExplainsStart,
    PacksCallback,
    check_model,
    load_by_names_on_disk,
    log_figures,
)
from omnibal.integrations.trainer_rearranging import rearrange_samples
from omnibal.integrations.trainer_settings import (
    layout_of,
    memory_of,
    recompute_of,
    refuse_settings,
    replicas_of,
    samples_of,
    set_micro_batches,
    wants_all_gradients,
)
from omnibal.integrations.trainer_streams import pack_stream
from omnibal.profile.records import ModelProfile
from omnibal.ranks import gather

Packing = PackCollator | PaddedCollator


@overload
def balance(
    trainer: Trainer, limits: PackLimits | None = None, *, padded: bool = False, rearrange: Literal[True]
) -> None: ...


@overload
def balance(
    trainer: Trainer,
    limits: PackLimits | None = None,
    *,
    samples_per_step: int | None = None,
    lengths: SampleLengths,
    check_lengths: bool = True,
    padded: bool = False,
    loss_reduction: Reduction = "token",
    memory_gib: float | None = None,
    mixture: Mixture | Mapping[str, Any] | None = None,
    rearrange: Literal[False] = False,
) -> PackSampler: ...


@overload
def balance(  # None where the trainer has a stream, which its type does not say
    trainer: Trainer,
    limits: PackLimits | None = None,
    *,
    samples_per_step: int | None = None,
    lengths: None = None,
    check_lengths: bool = True,
    padded: bool = False,
    loss_reduction: Reduction = "token",
    memory_gib: float | None = None,
    mixture: Mixture | Mapping[str, Any] | None = None,
    oversized: Oversized = "alone",
    rearrange: Literal[False] = False,
) -> PackSampler | None: ...


def balance(
    trainer: Trainer,
    limits: PackLimits | None = None,
    *,
    samples_per_step: int | None = None,
    lengths: SampleLengths | None = None,
    check_lengths: bool = True,
    padded: bool = False,
    loss_reduction: Reduction = "token",
    memory_gib: float | None = None,
    mixture: Mixture | Mapping[str, Any] | None = None,
    oversized: Oversized = "alone",
    rearrange: bool = False,
) -> PackSampler | None:
    """Train on balanced packs: the same samples, each once an epoch, without padding and with ranks that end together.

    Call it on all ranks before ``trainer.train()``. It wraps the trainer's collator and replaces its training loader
    and loss; evaluation keeps its own batches. A pack is a micro-batch. An optimizer step holds about as many samples
    as the trainer's arguments ask for, ``per_device_train_batch_size`` times ``gradient_accumulation_steps`` times
    data-parallel ranks: how many packs of each rank that takes, ``balance`` finds out and puts into the trainer's
    ``gradient_accumulation_steps``. The loss of a step is the mean over all of its target tokens, on all ranks and in
    all packs, whatever the model makes of it otherwise; a router's loss is added where the model asks for it
    (``StepLoss``). A run goes on from Trainer's own checkpoints, on as many ranks, with the samples that would have
    followed.

    For one process, DDP, DeepSpeed's ZeRO 1, 2 and 3 and FSDP. A pack without an image runs one of another sample along
    where other ranks run the ViT: none waits for another.

    Of a stream (an ``IterableDataset``, the same on all ranks) each rank packs samples of its own in a buffer:
    docs/streams.md says how. It wants ``limits`` and ``max_steps``. ``train_dataset`` may also be several by name, as
    ``mixture`` calls them; one that is read by index is drawn in random order, pass after pass.

    Args:
        trainer: Before training.
        limits: The most a pack may hold; by default they are searched, so that a pack holds about
            ``per_device_train_batch_size`` samples. Packs are made smaller where no number of them comes within 5 % of
            the samples of a step.
        samples_per_step: Samples of an optimizer step, of all ranks together; by default those that the trainer's
            arguments ask for. The printed line says how many there are on average.
        lengths: Of every sample of the training dataset, in ``pixel_values`` rows (tiles or patches) and
            ``input_ids``; by default each sample is read once, by the workers of one of the ranks, to count them, and
            what was found is kept in ``output_dir``.
        check_lengths: Whether a sample that is not as long as planned ends the run, as plans are no better than
            lengths; if not, it is trained with a warning, unless other ranks would wait for its image.
        padded: Whether batches stay padded, made by the trainer's collator alone: for models whose attention cannot be
            packed, and for fields that packs cannot have. Packs want a model type in
            ``omnibal.integrations.packing.FAMILIES``.
        loss_reduction: How target tokens weigh in the loss of a step: ``"token"`` all alike; each of the n of a sample
            1 / n (``"sample"``) or 1 / √n (``"square"``), as in InternVL's published scripts, over the sum of weights.
        memory_gib: What a device may hold in all, for limits that are searched: where it does not suffice by counted
            activations and weights, packs are smaller. By default memory is not asked.
        mixture: What share each source gets, as of ``BalancedBatchSampler``, by the names that ``lengths`` have for
            them; the parts of a ``ConcatDataset`` are "0", "1", …. ``max_steps`` says when to end, or an epoch holds
            about as many samples as there are.
        oversized: What becomes of a stream's sample that exceeds a limit on its own: it gets a pack of its own
            (``"alone"``), is left out (``"drop"``) or ends the run (``"error"``). The first one is named, all are
            counted.
        rearrange: Whether ranks draw ``per_device_train_batch_size`` samples at random, whose lengths nobody knows
            before, and then work on each other's, so that both phases are even: for streams, and for data that is
            augmented as it is drawn. ``limits`` are then the most that a rank may hold; beside them ``padded`` alone
            has a say.

    Returns:
        The sampler, whose ``step`` tells what each step holds; None where samples are rearranged or come as a stream.

    Raises:
        ConfigError: The trainer's settings or its model do not allow packs, or ranks hold different data.
        DataError: The dataset or its collator does not, or the lengths are not the dataset's.
        InfeasibleError: The memory does not suffice for the largest sample.
    """
    refuse_settings(trainer)
    if trainer.is_deepspeed_enabled:
        trainer.add_callback(ExplainsStart())
    loss, mixture = StepLoss(trainer, loss_reduction), None if mixture is None else Mixture.of(mixture)
    if rearrange:
        others = (lengths, samples_per_step, memory_gib, mixture)
        if any(other is not None for other in others) or loss_reduction != "token" or loss.routes:
            raise ConfigError(
                "rearrange must stand without lengths, samples_per_step, loss_reduction, memory_gib, mixture and "
                "output_router_logits, got one"
            )
        rearrange_samples(trainer, limits, padded=padded)
        return None
    if _is_stream(trainer.train_dataset):
        if lengths is not None or samples_per_step is not None or padded or memory_gib is not None:
            raise ConfigError(
                "a stream must be packed without lengths, samples_per_step, padded and memory_gib, got one; its "
                "lengths are not known yet, so a step holds gradient_accumulation_steps packs of each rank"
            )
        pack_stream(trainer, limits, _profile(trainer), mixture, oversized)
        loss.install()
        return None
    args, dataset = trainer.args, _sized_dataset(trainer, oversized)
    model = trainer.accelerator.unwrap_model(trainer.model)
    packing = partial(PackCollator, positions=None if padded else positions_of(model.config))
    kind = PaddedCollator if padded else packing
    collator_of = partial(kind, collate=trainer.data_collator, arguments=arguments_of(model))
    rank, num_replicas = replicas_of(trainer)
    by_arguments = samples_of(trainer, num_replicas)
    asked = by_arguments if samples_per_step is None else integer("samples_per_step", samples_per_step, num_replicas)
    refuse_unlike_sizes(len(dataset), None if lengths is None else len(lengths))
    if lengths is None:
        options = {"saves": args.should_save, "num_workers": args.dataloader_num_workers}
        lengths = kept_lengths(collator_of(), dataset, Path(str(args.output_dir)) / LENGTHS, **options)
    if mixture is not None:
        lengths = with_sources(lengths, dataset)
    hashes = [{"rank": rank, "lengths": found} for rank, found in enumerate(gather(lengths.content_hash))]
    check_agreement(hashes, num_replicas=args.world_size)  # before what may fail on one rank alone
    if limits is not None:
        limits.refuse_none(lengths)
    profile = _profile(trainer)
    size = fit_step(
        typical_lengths(lengths, mixture),
        asked,
        batch_size=args.per_device_train_batch_size,
        num_replicas=num_replicas,
        most=limits,
        padded=padded,
        memory=None if memory_gib is None or limits is not None else memory_of(trainer, profile, memory_gib),
    )
    limits = size.limits
    sampler = (PaddedSampler if padded else PackSampler)(
        lengths,
        limits,
        num_replicas=num_replicas,
        rank=rank,
        micro_batches=size.micro_batches,
        seed=args.seed if args.data_seed is None else args.data_seed,
        image_in_every_pack=wants_all_gradients(trainer),
        mixture=mixture,
    )
    sampler.verify(gather)
    if check_lengths:
        refuse_other_lengths(collator_of(), dataset, lengths)
    costs = None if profile is None else phase_costs(profile, recompute=recompute_of(trainer))
    set_micro_batches(trainer, size.micro_batches)
    _equip(trainer, dataset, sampler, collator_of(lengths=lengths, absorb=not check_lengths), costs)
    loss.install()
    if trainer.is_world_process_zero():
        # Batches of the samples asked for are what packs are compared with.
        batches = max(round(asked / (num_replicas * args.per_device_train_batch_size)), 1)
        schedule = Schedule(asked, args.per_device_train_batch_size, batches, args.num_train_epochs, args.max_steps)
        device = None if profile is None else profile.device
        print(describe(sampler, limits, costs, layout_of(trainer), schedule, device=device))
    return sampler


def _profile(trainer: Trainer) -> ModelProfile | None:
    device = trainer.args.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return counted_profile(trainer.accelerator.unwrap_model(trainer.model), name)


def _equip(trainer: Trainer, dataset: Any, sampler: PackSampler, collator: Packing, costs: Costs | None) -> None:
    """Change what the trainer loads, computes, logs and goes on from."""
    vars(trainer)["get_train_dataloader"] = partial(_loader, trainer, dataset, sampler, collator)
    check = partial(_check, trainer, collator, dataset, sampler.lengths)
    callback = PacksCallback(trainer, sampler, costs, layout_of(trainer), check)
    trainer.add_callback(callback)
    log_figures(trainer, callback.logged)
    load_by_names_on_disk(trainer)


def _check(trainer: Trainer, collator: Packing, dataset: Any, lengths: SampleLengths) -> None:
    """Check that the dataset is the planned one, and that packs are as good as their samples alone, by two of them."""
    is_other = trainer.train_dataset is not dataset
    if is_other:
        raise ConfigError("train_dataset must stay the one that balance has planned, got another; make a new Trainer")
    if isinstance(collator, PackCollator):
        check_model(trainer, collator, [dataset[sample] for sample in two_samples(lengths)])


def _loader(trainer: Trainer, dataset: Any, sampler: PackSampler, collator: Packing) -> PackLoader:
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


def _is_stream(dataset: Any) -> bool:
    if isinstance(dataset, Mapping):  # several by name
        return True
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__"))


def _sized_dataset(trainer: Trainer, oversized: Oversized) -> Any:
    dataset = trainer.train_dataset
    if oversized != "alone":
        raise ConfigError(
            f"oversized must be 'alone' for a dataset that is no stream, got {oversized!r}; leave samples out of it"
        )
    if dataset is None or not hasattr(dataset, "__len__"):
        found = type(dataset).__name__
        raise DataError(f"train_dataset must be read by index and have a length, or be a stream, got {found}")
    return dataset
