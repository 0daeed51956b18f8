"""Equips a transformers.Trainer for samples that are drawn: packs of streams, and samples that ranks rearrange.

Nothing is known of such samples before they come, so that a trainer cannot skip what it has trained: each checkpoint
keeps where every rank stands, and a resumed run gets blanks in place of what came before.
"""

from collections.abc import Iterator, Mapping
from functools import wraps
from itertools import repeat
from math import ceil
from pathlib import Path
from types import MethodType
from typing import Any, Final, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer_utils import has_length

from omnibal.advise.wait import MEETINGS, phase_costs
from omnibal.cost import Load
from omnibal.data.epoch import Step
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import Mixture, Oversized
from omnibal.errors import ConfigError, reporting, said
from omnibal.feeds.buffer import StreamSettings
from omnibal.feeds.buffer_plan import buffer_of
from omnibal.feeds.sources import EveryNth, is_indexed, iterated
from omnibal.feeds.stream import FREE
from omnibal.formats.collate import uncollated
from omnibal.integrations.rearranging import Drawn, Phases
from omnibal.integrations.rearranging_loader import BEGINNING, RearrangingLoader, counted_costs
from omnibal.integrations.streams import PackedStream
from omnibal.integrations.trainer.hooks import PacksCallback, RecipeCallback, add_recipe, check_model, worker_options
from omnibal.integrations.trainer.settings import TrainerSettings, batch_size_of, model_of
from omnibal.packs.apart import refuse_long_rows
from omnibal.packs.collator import PackCollator, RowCollator, without_adapters
from omnibal.packs.encoders import EncoderAdapter, encoders_of
from omnibal.packs.proof import two_texts
from omnibal.ranks import gather, rank_and_size, run_on_all_ranks
from omnibal.vlm.weights import check_data, load_data

STREAM: Final = "omnibal_stream_{rank}.pt"
"""File of a checkpoint with a rank's place in its stream."""


class Stream:
    """This rank's draws of a stream that is the same on all ranks: of n ranks each gets every n-th sample."""

    # Where a stream's shards can be dealt (``datasets.IterableDataset``), a rank reads its own ones alone. If it has
    # ``state_dict`` and ``load_state_dict`` and no workers read it, this has them too. A draw holds ``size`` samples;
    # without a size, single samples are drawn. ``options`` are those of the DataLoader that reads the stream.

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


class DatasetDraws:
    """This rank's draws of a dataset that is read by index: every sample once an epoch, in another order each."""

    def __init__(
        self, dataset: Any, size: int, rank: int, num_ranks: int, seed: int, options: Mapping[str, Any]
    ) -> None:
        self._dataset, self._size, self._rank, self._num_ranks = dataset, size, rank, num_ranks
        self._seed, self._options = seed, options
        self._epoch, self._drawn = 0, 0

    def __iter__(self) -> Iterator[list[Any]]:
        order = np.random.default_rng((self._seed, self._epoch)).permutation(len(self._dataset))
        draws = [order[start : start + self._size].tolist() for start in range(0, len(order), self._size)]
        mine = draws[self._rank :: self._num_ranks][self._drawn :]
        # A generator of its own, for the workers' seeds: this runs in a thread beside the model's.
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        loader = DataLoader(
            self._dataset, batch_sampler=mine, collate_fn=uncollated, generator=generator, **self._options
        )
        for draw in loader:
            self._drawn += 1
            yield draw

    def __len__(self) -> int:
        """Draws of the rank that has most."""
        return ceil(len(self._dataset) / (self._size * self._num_ranks))

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._drawn = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._epoch, self._drawn = state["epoch"], state["drawn"]


def pack_stream(
    trainer: Trainer,
    settings: TrainerSettings,
    limits: PackLimits | None,
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
    of_stream = StreamSettings(
        limits=limits,
        micro_batches=args.gradient_accumulation_steps,
        buffer=buffer_of(args.gradient_accumulation_steps),
        mixture=mixture,
        seed=settings.seed,
        oversized=oversized,
    )
    sources = _sources(trainer, settings, mixture)
    loader = PackedStream(sources, trainer.data_collator, of_stream, model=settings.model, weigh_tokens=False)
    add_recipe(trainer, StreamCallback(trainer, settings, loader))
    DrawnBatches(loader, trainer).install(pin_memory=args.dataloader_pin_memory)
    if trainer.is_world_process_zero():
        print(
            f"omnibal: {'a stream' if mixture is None else 'streams'} in packs of at most {limits.in_words}, "
            f"{of_stream.buffer} samples of each rank planned at a time"
        )


def _sources(trainer: Trainer, settings: TrainerSettings, mixture: Mixture | None) -> dict[str, Any]:
    """This rank's part of each stream, by name; ``SampleBuffer`` divides what is read by index."""
    dataset, options = trainer.train_dataset, worker_options(trainer.args)
    if mixture is not None and not isinstance(dataset, Mapping):
        found = type(dataset).__name__
        raise ConfigError(f"train_dataset must be streams by name, as the mixture calls them, got {found}")
    named = dataset if isinstance(dataset, Mapping) else {"train_dataset": dataset}
    return {
        name: items if is_indexed(items) else Stream(items, None, settings.rank, settings.num_replicas, options)
        for name, items in named.items()
    }


def rearrange_samples(
    trainer: Trainer, settings: TrainerSettings, limits: PackLimits | None, *, padded: bool = False
) -> None:
    """Let a trainer, whose settings allow packs, rearrange samples over its ranks."""
    rank, num_ranks, args = settings.rank, settings.num_replicas, trainer.args
    dataset: Any = trainer.train_dataset
    expectations = {
        "trainer": (not settings.keeps_sft_loss, "a Trainer with its own loss", type(trainer).__name__),
        "train_dataset": (not isinstance(dataset, Mapping | None), "a dataset or stream", type(dataset).__name__),
        "world_size": (num_ranks > 1, "above 1", num_ranks),
        "ranks that get one draw": (num_ranks == args.world_size, "1", args.world_size // num_ranks),
        "torch_compile": (not args.torch_compile, "False", True),
        "model_init": (trainer.model_init is None, "None", "one"),  # it would make a model with a forward of its own
    }
    for name, (holds, expected, value) in expectations.items():
        if not holds:
            raise ConfigError(f"{name} must be {expected} to rearrange samples, got {value}")
    model = without_adapters(settings.model)
    if not padded:
        refuse_long_rows(model, limits)
    collator = (RowCollator if padded else PackCollator).of(model, trainer.data_collator)
    encoders = encoders_of(model)
    _rearrange_forward(model, encoders)
    costs = counted_costs(
        model,
        device=settings.device,
        limits=limits,
        recompute=settings.recompute,
        phases_meet=MEETINGS[settings.sharding] == "phase",
        num_positions=collator.num_positions,
    )
    size, options = batch_size_of(trainer, num_ranks), worker_options(args)
    source: DatasetDraws | Stream = Stream(dataset, size, rank, num_ranks, options)
    made_from: dict[str, Any] = {"samples": None}  # the order of a stream is its own
    if is_indexed(dataset):
        source = DatasetDraws(dataset, size, rank, num_ranks, settings.seed, options)
        made_from = {"samples": len(dataset), "seed": settings.seed}
    micro_batches = args.gradient_accumulation_steps
    loader = RearrangingLoader(source, collator, encoders=encoders, costs=costs, micro_batches=micro_batches)
    batches = RearrangedBatches(loader, source, trainer)
    trainer.loss_is_scaled_for_ga = True  # over all target tokens of the step
    made_from |= {"samples_a_draw": size, "num_replicas": num_ranks, "padded": padded}
    made_from["gradient_accumulation_steps"] = micro_batches
    add_recipe(trainer, RearrangingCallback(trainer, made_from, batches))
    batches.install()


def _rearrange_forward(model: Any, encoders: Mapping[str, EncoderAdapter]) -> None:
    """Let the model's own forward pass take what a loader drew: modules, names and wrappers of the model stay."""
    plain = model.forward
    phases = Phases(model, plain, encoders)
    # A copy of the model shares this function, and must not run the original.
    of_any = getattr(plain, "__func__", lambda _, *args, **inputs: plain(*args, **inputs))

    @wraps(type(model).forward)
    def forward(self: Any, *args: Any, rearranged: Drawn | None = None, **inputs: Any) -> Any:
        return of_any(self, *args, **inputs) if rearranged is None else {"loss": phases(rearranged)}

    vars(model)["forward"] = MethodType(forward, model)


class DrawnBatches(IterableDataset[Any]):
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

    def set_epoch(self, epoch: int) -> None:
        """Nothing changes: a stream goes on behind what it has brought."""

    def install(self, *, pin_memory: bool = False) -> None:
        """Let the trainer train on these batches, save each rank's place, and read it before training goes on."""
        trainer = self._trainer

        def train_dataloader() -> DataLoader[Any]:
            # Trainer wants a DataLoader, and hands its batches to the model; batches come collated.
            found = DataLoader[Any](self, batch_size=None, collate_fn=uncollated, pin_memory=pin_memory)
            vars(found)["set_epoch"] = self.set_epoch  # Trainer tells a loader the epoch
            return found

        # Trainer (transformers 5) calls the first on every rank for each checkpoint, where it saves the rank's random
        # numbers, and the second before it trains on.
        save, load = trainer._save_rng_state, trainer._load_optimizer_and_scheduler

        def saved(folder: str) -> None:
            save(folder)
            kept, path = self._loader.state_dict(), Path(folder) / STREAM.format(rank=trainer.args.process_index)

            def write() -> None:
                torch.save(kept, path)
                check_data(path)  # what a stream's own state_dict says may be anything; later it is read as data

            run_on_all_ranks(write)

        def loaded(checkpoint: str | None) -> None:
            load(checkpoint)
            if checkpoint is not None and not trainer.args.ignore_data_skip:
                self._go_on(Path(checkpoint) / STREAM.format(rank=rank_and_size()[0]))

        vars(trainer).update(
            get_train_dataloader=train_dataloader, _save_rng_state=saved, _load_optimizer_and_scheduler=loaded
        )

    def _go_on(self, path: Path) -> None:
        """Go on from a checkpoint; what one rank cannot read ends all."""
        args, batches = self._trainer.args, cast(Any, self)
        steps_per_epoch = len(batches) // args.gradient_accumulation_steps if has_length(self) else args.max_steps
        self._blanks = self._trainer.state.global_step % steps_per_epoch * args.gradient_accumulation_steps
        state, problem = dict[str, Any](), None
        try:
            state = load_data(path)
        except Exception as error:
            problem = ConfigError(
                f"{path} must be a rank's place in its stream, got {said(error)}; ignore_data_skip=True begins anew"
            )
        gather(problem)
        self._loader.load_state_dict(state)


class RearrangedBatches(DrawnBatches):
    """Micro-batches that are drawn from a source and rearranged; those of a dataset are as many in all epochs."""

    def __init__(self, loader: RearrangingLoader, source: DatasetDraws | Stream, trainer: Trainer) -> None:
        super().__init__(loader, trainer)
        self.source = source
        self.imbalances: list[Mapping[str, tuple[float, float]]] = []

    def _batches(self) -> Iterator[dict[str, Any]]:
        for drawn in self._loader:
            self.imbalances.append(drawn.plan.imbalance)
            # Trainer counts tokens by input_ids.
            yield {"input_ids": drawn.tokens[None, :, 0], "rearranged": drawn}

    def __len__(self) -> int:
        """Micro-batches of an epoch, whole steps."""
        if isinstance(self.source, Stream):
            raise TypeError("a stream has no length")  # what len() says of it
        micro_batches = self._trainer.args.gradient_accumulation_steps
        return ceil(len(self.source) / micro_batches) * micro_batches

    def set_epoch(self, epoch: int) -> None:
        # Trainer leaves the last iteration of an epoch unfinished.
        self._loader.go_to(BEGINNING)
        self.source.set_epoch(epoch)


class StreamCallback(PacksCallback):
    """Goes on with the same packs only, and tells how even steps were."""

    def __init__(self, trainer: Trainer, settings: TrainerSettings, loader: PackedStream) -> None:
        counted, texts = settings.counted, two_texts(settings.model.config)
        costs = None if counted is None else phase_costs(counted, recompute=settings.recompute)
        feed: Any = loader  # of the sampler, its numbers of ranks and of micro-batches are asked
        super().__init__(trainer, feed, costs, settings.sharding, lambda: check_model(trainer, *texts))
        self._loader = loader

    def made_from(self) -> dict[str, Any]:
        """What packs depend on; a change of the rest is told where the rank's place is loaded."""
        return {name: value for name, value in self._loader.made_from.items() if name not in FREE}

    def logged(self) -> dict[str, float]:
        """The figures of ``PacksCallback``, and how many samples exceeded a limit so far."""
        return super().logged() | {"oversized": self._loader.oversized}

    def held(self, state: TrainerState) -> tuple[Load, Step]:
        return self._loader.last_step.load, self._loader.last_step


class RearrangingCallback(RecipeCallback):
    """Refuses checkpoints of other batches, and tells how even each phase was drawn and is."""

    def __init__(self, trainer: Trainer, made_from: Mapping[str, Any], batches: RearrangedBatches) -> None:
        self._trainer, self._made_from, self._batches = trainer, made_from, batches

    def made_from(self) -> dict[str, Any]:
        return dict(self._made_from)

    def check(self) -> None:
        if not self._made_from["padded"]:
            check_model(self._trainer, *two_texts(model_of(self._trainer).config))

    def logged(self) -> dict[str, float]:
        """The largest rank over the mean since the last call, as drawn and as rearranged."""
        figures = dict[str, float]()
        with reporting("measuring of how even ranks are"):
            found, self._batches.imbalances = self._batches.imbalances, []
            for phase in found[0] if found else ():
                drawn, planned = np.mean([each[phase] for each in found], axis=0)
                figures |= {f"imbalance_{phase}_drawn": float(drawn), f"imbalance_{phase}": float(planned)}
        return figures
