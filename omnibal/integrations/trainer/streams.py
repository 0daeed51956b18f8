"""Equips a transformers.Trainer with packs of streams: iterable datasets, whose lengths are known as they come."""

from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState

from omnibal.advise.wait import CostByPhase, phase_costs
from omnibal.cost import Load
from omnibal.data.epoch import Step
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.packing_spec import Oversized
from omnibal.errors import ConfigError, said
from omnibal.feeds.buffer import StreamSettings
from omnibal.feeds.buffer_plan import buffer_of
from omnibal.feeds.sources import EveryNth, is_indexed, iterated
from omnibal.feeds.stream import FATES, FREE
from omnibal.integrations.streams import StreamLoader, stream_loader
from omnibal.integrations.trainer.hooks import PacksCallback, add_recipe, check_model, worker_options
from omnibal.integrations.trainer.settings import data_rank_of, data_seed, recompute_of, sharding_of
from omnibal.packs.proof import two_texts
from omnibal.profile.records import ModelProfile
from omnibal.ranks import gather, rank_and_size, run_on_all_ranks
from omnibal.vlm.weights import check_data, load_data

STREAM: Final = "omnibal_stream_{rank}.pt"
"""File of a checkpoint with a rank's place in its stream."""


def pack_stream(
    trainer: Trainer,
    limits: PackLimits | None,
    profile: ModelProfile | None,
    mixture: Mixture | None,
    oversized: Oversized = "alone",
) -> None:
    """Let a trainer train on packs of its stream, or of several by name, the same on all ranks; before training."""
    args = trainer.args
    if limits is None:
        raise ConfigError("limits must say what a pack of a stream may hold, got None; its lengths are not known yet")
    if args.max_steps < 1:
        raise ConfigError(f"max_steps must be positive to train on a stream, got {args.max_steps}; it has no epochs")
    if trainer.get_tp_size() != 1:
        raise ConfigError(f"tensor-parallel ranks must be 1 to train on a stream, got {trainer.get_tp_size()}")
    model = trainer.accelerator.unwrap_model(trainer.model)
    settings = StreamSettings(
        limits=limits,
        micro_batches=args.gradient_accumulation_steps,
        buffer=buffer_of(args.gradient_accumulation_steps),
        mixture=mixture,
        seed=data_seed(trainer),
        oversized=oversized,
    )
    sources = _sources(trainer, mixture)
    loader = stream_loader(sources, trainer.data_collator, settings, model=model, weigh_tokens=False)
    batches: Any = ResumableBatches(loader, trainer)
    # Trainer wants a DataLoader, and hands its batches to the model; packs are collated already.
    vars(trainer)["get_train_dataloader"] = lambda: DataLoader(
        batches, batch_size=None, collate_fn=uncollated, pin_memory=args.dataloader_pin_memory
    )
    costs = None if profile is None else phase_costs(profile, recompute=recompute_of(trainer))
    add_recipe(trainer, StreamCallback(trainer, loader, costs))
    keep_position(trainer, batches)
    if trainer.is_world_process_zero():
        print(
            f"omnibal: {'a stream' if mixture is None else 'streams'} in packs of at most {limits.in_words}, "
            f"{settings.buffer} samples of each rank planned at a time"
        )


def _sources(trainer: Trainer, mixture: Mixture | None) -> dict[str, Any]:
    """This rank's part of each stream, by name; ``SampleBuffer`` divides what is read by index."""
    args, dataset, (rank, num_ranks) = trainer.args, trainer.train_dataset, data_rank_of(trainer)
    if mixture is not None and not isinstance(dataset, Mapping):
        found = type(dataset).__name__
        raise ConfigError(f"train_dataset must be streams by name, as the mixture calls them, got {found}")
    named = dataset if isinstance(dataset, Mapping) else {"train_dataset": dataset}
    return {
        name: items if is_indexed(items) else Stream(items, None, rank, num_ranks, worker_options(args))
        for name, items in named.items()
    }


class Stream:
    """This rank's draws of a stream that is the same on all ranks: of n ranks each gets every n-th sample.

    Where a stream's shards can be dealt (``datasets.IterableDataset``), a rank reads its own ones alone. If it has
    ``state_dict`` and ``load_state_dict`` and no workers read it, this has them too. A draw holds ``size`` samples;
    without a size, single samples are drawn. ``options`` are those of the DataLoader that reads the stream.
    """

    def __init__(self, dataset: Any, size: int | None, rank: int, num_ranks: int, options: Mapping[str, Any]) -> None:
        if hasattr(dataset, "num_shards"):
            from datasets.distributed import split_dataset_by_node

            dataset, rank, num_ranks = split_dataset_by_node(dataset, rank, num_ranks), 0, 1
        self._share = _Share(dataset, rank, num_ranks)
        # A generator of its own, since this is drawn in a thread beside the model's.
        generator = torch.Generator()
        self._loader = DataLoader(self._share, batch_size=size, collate_fn=uncollated, generator=generator, **options)
        if hasattr(dataset, "state_dict") and not options.get("num_workers"):
            vars(self).update(state_dict=dataset.state_dict, load_state_dict=self._share.load_state_dict)

    def __iter__(self) -> Iterator[list[Any]]:
        return iterated(self._loader)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._share.dataset, "set_epoch"):
            self._share.dataset.set_epoch(epoch)


class _Share(EveryNth, IterableDataset[Any]):
    """The part of a stream as a dataset, for a DataLoader."""


def uncollated(items: Any) -> Any:
    """Collate nothing: batches come collated, draws are collated later."""
    return items


class ResumableBatches(IterableDataset[Any]):
    """A loader's micro-batches as a trainer takes them; each checkpoint keeps where every rank stands in them."""

    def __init__(self, loader: Any, trainer: Trainer) -> None:
        self._loader, self._trainer, self._blanks = loader, trainer, 0

    def __iter__(self) -> Iterator[Any]:
        # A trainer that goes on throws away as many micro-batches as it has trained: these come as blanks.
        blanks, self._blanks = self._blanks, 0
        yield from repeat(None, blanks)
        yield from self._batches()

    def _batches(self) -> Iterator[Any]:
        return iter(self._loader)

    def position(self) -> dict[str, Any] | None:
        """This rank's place behind a step; None where the number of the step says it."""
        position: dict[str, Any] = self._loader.state_dict()
        return position

    def go_on(self, folder: Path) -> None:
        """Go on from a checkpoint; what one rank cannot read ends all."""
        args, path = self._trainer.args, folder / STREAM.format(rank=rank_and_size()[0])
        self._blanks = self._trainer.state.global_step % args.max_steps * args.gradient_accumulation_steps
        state, problem = dict[str, Any](), None
        try:
            state = load_data(path)
        except Exception as error:
            problem = ConfigError(
                f"{path} must be a rank's place in its stream, got {said(error)}; ignore_data_skip=True begins anew"
            )
        gather(problem)
        self._loader.load_state_dict(state)


def keep_position(trainer: Trainer, batches: ResumableBatches) -> None:
    """Save each rank's place where Trainer saves each rank's random numbers, and read it before training goes on."""
    # Trainer (transformers 5) calls the first on every rank for each checkpoint, the second before it trains on.
    save, load = trainer._save_rng_state, trainer._load_optimizer_and_scheduler

    def saved(folder: str) -> None:
        save(folder)
        kept, path = batches.position(), Path(folder) / STREAM.format(rank=trainer.args.process_index)

        def write() -> None:
            torch.save(kept, path)
            check_data(path)  # what a stream's own state_dict says may be anything; later it is read as data

        if kept is not None:
            run_on_all_ranks(write)

    def loaded(checkpoint: str | None) -> None:
        load(checkpoint)
        if checkpoint is not None and not trainer.args.ignore_data_skip:
            batches.go_on(Path(checkpoint))

    vars(trainer).update(_save_rng_state=saved, _load_optimizer_and_scheduler=loaded)


class StreamCallback(PacksCallback):
    """Goes on with the same packs only, and tells how even steps were."""

    def __init__(self, trainer: Trainer, loader: StreamLoader, costs: CostByPhase | None) -> None:
        texts = two_texts(trainer.accelerator.unwrap_model(trainer.model).config)
        feed: Any = loader.feed  # of the sampler, its numbers of ranks and of micro-batches are asked
        super().__init__(trainer, feed, costs, sharding_of(trainer), lambda: check_model(trainer, *texts))
        self._loader, self._fate = loader, FATES.get(loader.feed.made_from["oversized"])

    @property
    def vision_unit(self) -> str:
        return "vision units"

    def go_on_from(self, made_from: Mapping[str, Any]) -> None:
        """Do nothing: packs of a stream follow no measured cost."""

    def made_from(self) -> dict[str, Any]:
        """What packs depend on; a change of the rest is told where the rank's place is loaded."""
        return {name: value for name, value in self._loader.feed.made_from.items() if name not in FREE}

    def logged(self) -> dict[str, float]:
        """The figures of ``PacksCallback``, and how many samples exceeded a limit so far."""
        return super().logged() | {"oversized": self._loader.oversized}

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        super().on_train_end(args, state, control, **others)
        if self._loader.oversized and state.is_world_process_zero:
            print(f"omnibal: {self._loader.oversized:,} samples exceeded a limit on their own; each {self._fate}")

    def held(self, state: TrainerState) -> tuple[Load, Step]:
        return self._loader.step.load, self._loader.step
