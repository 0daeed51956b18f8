"""Equips a transformers.Trainer: ``balance``, ``balance_stream`` or ``rearrange`` before ``trainer.train()``.

``compare`` measures what that brings.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from transformers import Trainer

from omnibal.advise.memory import RankMemory
from omnibal.advise.wait import phase_costs
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import Mixture, Oversized
from omnibal.data.source_draws import typical_lengths
from omnibal.data.step_size import StepSize, fit_step
from omnibal.errors import ConfigError, InfeasibleError, end_in_one_line, reporting
from omnibal.integrations.lengths import LENGTHS, prepare, samples_to_check
from omnibal.integrations.loops import PackLoader
from omnibal.integrations.trainer.calibration import CalibratesCosts, measured_before
from omnibal.integrations.trainer.clock import MeasuredWay
from omnibal.integrations.trainer.compare import WAYS, Way, compare_ways
from omnibal.integrations.trainer.drawn import pack_stream, rearrange_samples
from omnibal.integrations.trainer.hooks import (
    EndsWhenAsked,
    ExactEvaluation,
    PacksCallback,
    add_recipe,
    check_model,
    worker_options,
)
from omnibal.integrations.trainer.kernels import ChoosesKernels, refuse_compiling
from omnibal.integrations.trainer.loss import StepLoss
from omnibal.integrations.trainer.recompute import FillsMemory, LayerChoice, Recompute, may_fill
from omnibal.integrations.trainer.settings import (
    Head,
    TrainerSettings,
    asked_steps,
    model_of,
    refuse_settings,
    set_micro_batches,
)
from omnibal.integrations.trainer.steps import AskedSteps, describe, expected_gains
from omnibal.packs.apart import longest_row, refuse_long_rows
from omnibal.packs.collator import (
    FAMILIES,
    PackCollator,
    PaddedCollator,
    arguments_of,
    language_of,
    without_adapters,
)
from omnibal.packs.encoders import encode_in_every_evaluation
from omnibal.packs.loading import PackedView, PackSampler
from omnibal.packs.losses import Reduction
from omnibal.profile.records import ModelProfile
from omnibal.ranks import rank_and_size
from omnibal.ranks.failures import watch

__all__ = ["balance", "balance_stream", "compare", "rearrange"]


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
    recompute: Recompute = "fill",
    mixture: Mixture | Mapping[str, Any] | None = None,
    head: Head = "targets",
    compile: bool = False,
) -> PackSampler:
    """Train on balanced packs: the same samples, each once an epoch, without padding and with ranks that end together.

    Call it on all ranks before ``trainer.train()``. It wraps the trainer's collator and replaces its training loader
    and loss; evaluation keeps its own batches. A pack is a micro-batch. An optimizer step holds about as many samples
    as the trainer's arguments ask for, ``per_device_train_batch_size`` times ``gradient_accumulation_steps`` times
    data-parallel ranks: how many packs of each rank that takes, ``balance`` finds out and puts into the trainer's
    ``gradient_accumulation_steps``. The loss of a step is the mean over all of its target tokens, on all ranks and in
    all packs, whatever the model makes of it otherwise; a router's loss is added where the model asks for it. A run
    goes on from Trainer's own checkpoints, on as many ranks, with the samples that would have followed.

    For one process, DDP, DeepSpeed's ZeRO 1, 2 and 3 and FSDP, and datasets that are read by index. A pack without an
    image runs one of another sample along where other ranks run the ViT: none waits for another.

    Args:
        trainer: Before training.
        limits: The most a pack may hold; by default they are searched, so that a pack holds about
            ``per_device_train_batch_size`` samples; sounds beside a ViT get a limit of their own, unless ``padded``.
            Packs are made smaller where no number of them comes within 5 % of the samples of a step.
        samples_per_step: Samples of an optimizer step, of all ranks together; by default those that the trainer's
            arguments ask for. The printed line says how many there are on average.
        lengths: Of every sample of the training dataset, in ``pixel_values`` rows (tiles or patches) and
            ``input_ids``; by default each sample is read once, by the workers of one of the ranks, to count them, and
            what was found is kept in ``output_dir``.
        check_lengths: Whether a sample that is not as long as planned ends the run, as plans are no better than
            lengths; if not, it is trained with a warning, unless other ranks would wait for its image.
        padded: Whether batches stay padded, made by the trainer's collator alone: for models whose attention cannot be
            packed, and for fields that packs cannot have. Packs of model types in
            ``omnibal.packs.collator.FAMILIES`` are tested; others must prove exact before the first step.
        loss_reduction: How target tokens weigh in the loss of a step: ``"token"`` all alike; each of the n of a sample
            1 / n (``"sample"``) or 1 / √n (``"square"``), as in InternVL's published scripts, over the sum of weights.
        memory_gib: What a device may hold in all, for limits that are searched and for ``recompute``: where it does not
            suffice by counted activations and weights, packs are smaller. By default it is what the smallest GPU of all
            ranks has, less 6 % of it, or 2 GiB if that is more; where no pack fits then, a line says so and packs stay
            as they were asked for. ``float("inf")`` asks no memory.
        recompute: Under gradient checkpointing, what recomputes: only what must, for the fullest pack to fit the device
            (``"fill"``), or all that transformers recomputes (``"as_is"``); or such a word for each of ``"vision"``,
            ``"sound"`` and ``"language"``: ``"fill"``, ``"none"`` or ``"full"``. Losses and gradients stay the same.
            Of two ways to pack, the faster one is taken by counted costs: batches as they are, or smaller packs that
            recompute less. Without known memory, as on a CPU, ``"fill"`` changes nothing.
        mixture: What share each source gets, as of ``BalancedBatchSampler``, by the names that ``lengths`` have for
            them; the parts of a ``ConcatDataset`` are "0", "1", …. ``max_steps`` says when to end, or an epoch holds
            about as many samples as there are.
        head: ``"targets"`` lets the model's head work on rows with a target alone where that is exact, and makes no
            logits of others; ``"all"`` leaves it alone. Evaluation is as before.
        compile: Whether the blocks of ViT and LLM are compiled, one by one, when training begins. Blocks of the same
            class share two graphs at most, whatever packs hold; evaluation runs as before. What it brings on a GPU has
            not been measured yet. ``torch_compile`` in the trainer's arguments compiles the whole model instead.

    Returns:
        The sampler, whose ``step`` tells what each step holds.

    Raises:
        ConfigError: The trainer's settings or its model do not allow packs, or ranks hold different data.
        DataError: The dataset or its collator does not, or the lengths are not the dataset's.
        InfeasibleError: ``memory_gib`` does not suffice for the largest sample.
    """
    # Settings: what a step holds of which samples.
    settings = _begin(trainer, head)
    if compile:
        refuse_compiling(trainer.args, settings.sharding, padded=padded)
    loss, mixture = StepLoss(trainer, settings, loss_reduction), None if mixture is None else Mixture.of(mixture)
    asked = asked_steps(trainer, settings.num_replicas, samples_per_step, limits, on_targets=settings.on_targets)
    before = measured_before(trainer, settings)
    profile = before or settings.counted
    asks = limits is None or (may_fill(settings, recompute) and profile is not None)
    memory = settings.memory(memory_gib) if asks else None
    layers, notes = LayerChoice.of(trainer, settings, recompute, profile, memory)
    size_of = partial(
        _step_size, settings=settings, asked=asked, layers=layers, notes=notes, mixture=mixture, padded=padded,
        memory=memory, must_fit=memory_gib is not None,
    )  # fmt: skip
    # Lengths: given, kept, or measured now. Sampler: the same packs on all ranks, each of which takes its own.
    collate = trainer.data_collator
    padding = partial(PaddedCollator, collate, arguments=arguments_of(settings.model))
    sampler, collator = prepare(
        trainer.train_dataset,
        padding if padded else partial(PackCollator.of, settings.model, collate),
        Path(str(trainer.args.output_dir)) / LENGTHS if lengths is None else lengths,
        size_of,
        padded=padded,
        check_lengths=check_lengths,
        mixture=mixture,
        saves=trainer.args.should_save,
        num_workers=trainer.args.dataloader_num_workers,
        num_replicas=settings.num_replicas,
        rank=settings.rank,
        seed=settings.seed,
        image_in_every_pack=settings.all_gradients,
    )
    # Loader, and what is logged, checked and kept in checkpoints.
    packs = _read_packs(trainer, settings, sampler, collator, profile)
    if not padded:
        trainer.add_callback(ChoosesKernels(trainer, compiles=compile, all_rows=settings.all_rows))
    if layers is not None:
        fills = FillsMemory(trainer, layers, packs)
        trainer.add_callback(fills)
        notes.append(fills.told)
    # Loss: of all target tokens of a step.
    loss.install()
    # Line: what an epoch becomes, and what is expected; its promise is corrected by what the first steps take.
    _promise(trainer, settings, packs, asked, notes, is_measured=before is not None)
    return sampler


def balance_stream(
    trainer: Trainer,
    limits: PackLimits,
    *,
    loss_reduction: Reduction = "token",
    mixture: Mixture | Mapping[str, Any] | None = None,
    oversized: Oversized = "alone",
) -> None:
    """Train on balanced packs of a stream, whose samples have no index and whose lengths are known as they arrive.

    Call it on all ranks before ``trainer.train()``, with ``max_steps`` in the trainer's arguments. ``train_dataset`` is
    an ``IterableDataset``, the same on all ranks, of which each rank packs samples of its own in a buffer; or several
    datasets by name, as ``mixture`` calls them, of which those that are read by index are drawn in random order, pass
    after pass. A step holds ``gradient_accumulation_steps`` packs of each rank. Loss, evaluation and checkpoints are as
    under ``balance``.

    Args:
        trainer: Before training.
        limits: The most a pack may hold.
        loss_reduction: How a step's loss is averaged: the argument of ``balance``.
        mixture: What share each of several streams gets, by name.
        oversized: What becomes of a sample that exceeds a limit on its own: it gets a pack of its own (``"alone"``), is
            left out (``"drop"``) or ends the run (``"error"``). The first one is named, all are counted.

    Raises:
        ConfigError: The trainer's settings or its model do not allow packs of a stream.
    """
    settings = _begin(trainer)
    loss = StepLoss(trainer, settings, loss_reduction)
    pack_stream(trainer, settings, limits, None if mixture is None else Mixture.of(mixture), oversized)
    loss.install()


def rearrange(trainer: Trainer, limits: PackLimits | None = None, *, padded: bool = False) -> None:
    """Let ranks draw samples at random and then work on each other's, so that both phases are even.

    For streams whose ranks differ for good, and for data that is augmented as it is drawn. Call it on all ranks before
    ``trainer.train()``. Each rank draws ``per_device_train_batch_size`` samples a micro-batch; the loss of a step is
    the mean over all of its target tokens.

    Args:
        trainer: Before training, on several ranks.
        limits: The most that a rank may hold; by default what it draws is not bounded.
        padded: Whether the LLM gets a rank's samples as padded rows: for models whose attention cannot be packed.

    Raises:
        ConfigError: The trainer's ranks, settings or model do not allow to rearrange.
    """
    settings = _begin(trainer)
    if StepLoss(trainer, settings, "token").routes:
        raise ConfigError("output_router_logits must be False to rearrange samples, got True")
    rearrange_samples(trainer, settings, limits, padded=padded)


def compare(
    make_trainer: Callable[[], Trainer],
    steps: int = 20,
    *,
    ways: Mapping[str, Way] = WAYS,
    lengths: SampleLengths | None = None,
    picture: str | Path | None = "omnibal_compare.png",
) -> list[MeasuredWay]:
    """Measure a few steps of each way to train on this machine, and print a table of them.

    Call it on all ranks, in place of ``trainer.train()``; the launcher stays as it is. Each way gets a trainer of its
    own, the same steps spread evenly over an epoch, and learning rates of 0: the optimizer works, and weights stay as
    they are, also where ``make_trainer`` gives the same model again. Nothing is saved, evaluated or reported: a
    trainer's output folder is a temporary one, and of transformers' callbacks only the one that counts steps stays.
    Three steps come first and are not timed: in them all ranks train the fullest batches of the epoch, so that memory
    that does not suffice is seen on all ranks alike.

    Args:
        make_trainer: Makes the trainer, before ``balance``; called once for each way.
        steps: How many are timed.
        ways: By name; values are options of ``balance``, ``"group_by_length"``, None for the trainer as it is, or a
            function of the trainer. By default these two, packs without savings, with the usual ones, and with all.
        lengths: Of every sample, as for ``balance``; by default those that ``balance`` kept in ``output_dir``, or each
            sample is read once.
        picture: Where a picture of the table is drawn; None for none.

    Returns:
        What was measured of each way, the same on all ranks; one that runs out of memory, or that ``balance`` refuses,
        says so in ``failed``.

    Raises:
        InfeasibleError: A rank alone ran out of memory behind the first steps: the others wait for it, and all end.
    """
    return compare_ways(make_trainer, balance, steps, ways=ways, lengths=lengths, picture=picture)


def _begin(trainer: Trainer, head: Head = "targets") -> TrainerSettings:
    end_in_one_line()
    refuse_settings(trainer)
    if dist.is_initialized():
        watch()  # answers where another rank looks for those that are there
    trainer.add_callback(EndsWhenAsked(trainer))
    if trainer.args.world_size > 1:
        ExactEvaluation(trainer).install()
    settings = TrainerSettings.of(trainer, head)
    if settings.sharding in ("zero3", "fsdp") and settings.num_devices > 1:
        with suppress(ConfigError):  # of a model whose encoders nobody has described
            encode_in_every_evaluation(without_adapters(settings.model))
    return settings


def _step_size(
    lengths: SampleLengths,
    *,
    settings: TrainerSettings,
    asked: AskedSteps,
    layers: LayerChoice | None,
    notes: list[str],
    mixture: Mixture | None,
    padded: bool,
    memory: RankMemory | None,
    must_fit: bool,
) -> StepSize:
    """Limits: those given, or the ones under which a step holds what was asked; ``notes`` gets what is to be said."""
    model, limits = settings.model, asked.limits
    settings.refuse_missing_kinds(lengths)
    if limits is not None:
        limits.refuse_none(lengths)
        if not padded:
            refuse_long_rows(model, limits)
    if layers is not None and memory is not None:  # limits are searched for layers that recompute all that they may
        memory = replace(memory, recompute=layers.levels(None))
    row = None if padded else longest_row(model)
    fit = partial(
        fit_step,
        typical_lengths(lengths, mixture),
        asked.samples_per_step,
        num_replicas=settings.num_replicas,
        most=limits,
        padded=padded,
        longest_row=None if row is None else row.tokens,
    )
    if limits is not None:
        return fit(batch_size=asked.batch_size)
    try:
        size = fit(batch_size=asked.batch_size, memory=memory)
    except InfeasibleError as error:
        if must_fit:
            raise
        # Nobody named a limit, and counted peaks may be too high: what runs today must not end here.
        if rank_and_size()[0] == 0:
            told = "packs stay as large as your batches and may not fit (memory_gib= sets what may be used)"
            print(f"omnibal: {error}; {told}")
        return fit(batch_size=asked.batch_size)
    if layers is None:
        return size
    best = layers.best_size(lengths, size, asked.batch_size, lambda batch: fit(batch_size=batch, memory=memory))
    if best != size:
        notes.append("packs hold less than batches did, so that less recomputes")
    return best


def _read_packs(
    trainer: Trainer, settings: TrainerSettings, sampler: PackSampler, collator: Any, profile: ModelProfile | None
) -> PacksCallback:
    """Let a trainer read a sampler's packs, tell how even they are, and go on from its checkpoints with the same."""
    dataset = trainer.train_dataset
    set_micro_batches(trainer, sampler.micro_batches)
    vars(trainer)["get_train_dataloader"] = partial(_loader, trainer, dataset, sampler, collator)
    check = partial(_check, trainer, dataset, sampler, collator)
    costs = None if profile is None else phase_costs(profile, recompute=settings.recompute)
    packs = PacksCallback(trainer, sampler, costs, settings.sharding, check, settings.recompute)
    add_recipe(trainer, packs)
    return packs


def _promise(
    trainer: Trainer,
    settings: TrainerSettings,
    packs: PacksCallback,
    asked: AskedSteps,
    notes: list[str],
    *,
    is_measured: bool,
) -> None:
    """Say what an epoch becomes and what is expected of it; the first steps measure that, and correct it."""
    counted, sampler = settings.counted, packs.sampler
    if trainer.is_world_process_zero():
        device = None if counted is None else counted.device
        with reporting("the line about packs"):
            told = describe(sampler, packs.costs, settings.sharding, asked, device=device, is_measured=is_measured)
            print("\n         ".join([told, *notes]))
    if counted is not None and language_of(settings.model) is not None and not trainer.args.torch_compile:
        promise = partial(expected_gains, sampler, layout=settings.sharding, asked_steps=asked)
        source = "by an earlier run" if is_measured else "computed"
        trainer.add_callback(CalibratesCosts(trainer, counted, packs, promise, source))


def _loader(trainer: Trainer, dataset: Any, sampler: PackSampler, collator: Any) -> PackLoader:
    # Not handed to accelerator.prepare, which would deal a rank's packs to the ranks once more. On resuming Trainer
    # skips batches, and reaches the sampler's set_epoch through Accelerate's SkipBatchSampler.
    args, view = trainer.args, cast(Any, PackedView(dataset))
    return PackLoader(
        view,
        batch_sampler=sampler,
        collate_fn=collator,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        **worker_options(args),
    )


def _check(trainer: Trainer, dataset: Any, sampler: PackSampler, collator: Any) -> None:
    """Check that the dataset is the planned one, and that packed samples get the logits that they get alone."""
    is_other = trainer.train_dataset is not dataset
    if is_other:
        raise ConfigError("train_dataset must stay the one that balance has planned, got another; make a new Trainer")
    if isinstance(collator, PackCollator):  # padded batches are made as they always were
        is_known = model_of(trainer).config.model_type in FAMILIES
        items = [dataset[sample] for sample in samples_to_check(sampler.lengths, is_known=is_known)]
        check_model(trainer, collator, items)
