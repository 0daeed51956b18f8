"""Equips a transformers.Trainer with packs of streams: iterable datasets, whose lengths are known as they come."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer_utils import seed_worker

from omnibal.advise.wait import phase_costs
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.policies import Oversized
from omnibal.errors import ConfigError
from omnibal.feeds.buffer import buffer_of
from omnibal.feeds.sources import is_indexed
from omnibal.feeds.windows import FATES, FREE
from omnibal.integrations.expected import Costs
from omnibal.integrations.packing import PackCollator, arguments_of, positions_of, two_texts
from omnibal.integrations.shares import Stream, as_it_is
from omnibal.integrations.streams import StreamLoader
from omnibal.integrations.trainer_hooks import PacksCallback, check_model, load_by_names_on_disk, log_figures
from omnibal.integrations.trainer_rearranging import keep_place, read_place
from omnibal.integrations.trainer_settings import layout_of, recompute_of, replicas_of
from omnibal.profile.records import ModelProfile


def pack_stream(
    trainer: Trainer,
    limits: PackLimits | None,
    profile: ModelProfile | None,
    mixture: Mixture | None,
    oversized: Oversized = "alone",
) -> None:
    """Let a trainer train on packs of its stream, or of several by name, the same on all ranks; before training.

    Args:
        trainer: Its settings allow packs.
        limits: The most a pack may hold.
        profile: Of the model, if its layers can be counted.
        mixture: What share each of several streams gets.
        oversized: What becomes of a sample that exceeds a limit on its own.

    Raises:
        ConfigError: Its settings or its model do not allow packs of a stream, or the mixture does not name the streams.
    """
    args = trainer.args
    if limits is None:
        raise ConfigError("limits must say what a pack of a stream may hold, got None; its lengths are not known yet")
    if args.max_steps < 1:
        raise ConfigError(f"max_steps must be positive to train on a stream, got {args.max_steps}; it has no epochs")
    if trainer.get_tp_size() != 1:
        raise ConfigError(f"tensor-parallel ranks must be 1 to train on a stream, got {trainer.get_tp_size()}")
    buffer = buffer_of(args.gradient_accumulation_steps)
    model = trainer.accelerator.unwrap_model(trainer.model)
    loader = StreamLoader(
        _sources(trainer, mixture),
        PackCollator(trainer.data_collator, positions_of(model.config), arguments=arguments_of(model)),
        limits,
        mixture=mixture,
        oversized=oversized,
        buffer=buffer,
        micro_batches=args.gradient_accumulation_steps,
        seed=args.seed if args.data_seed is None else args.data_seed,
        weigh_tokens=False,
    )
    batches = _Batches(loader, trainer)
    view: Any = batches
    vars(trainer)["get_train_dataloader"] = lambda: DataLoader(
        view, batch_size=None, collate_fn=as_it_is, pin_memory=args.dataloader_pin_memory
    )
    costs = None if profile is None else phase_costs(profile, recompute=recompute_of(trainer))
    callback = StreamCallback(trainer, loader, costs)
    trainer.add_callback(callback)
    log_figures(trainer, callback.logged)
    load_by_names_on_disk(trainer)
    keep_place(trainer, batches)
    if trainer.is_world_process_zero():
        print(
            f"omnibal: {'a stream' if mixture is None else 'streams'} in packs of at most {limits.vision_units} vision "
            f"units and {limits.llm_tokens} tokens, {buffer} samples of each rank planned at a time"
        )


def _sources(trainer: Trainer, mixture: Mixture | None) -> dict[str, Any]:
    """This rank's part of each stream; what is read by index, the loader divides itself."""
    args, dataset, (rank, num_ranks) = trainer.args, trainer.train_dataset, replicas_of(trainer)
    if mixture is not None and not isinstance(dataset, Mapping):
        found = type(dataset).__name__
        raise ConfigError(f"train_dataset must be streams by name, as the mixture calls them, got {found}")
    options = {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    }
    named = dataset if isinstance(dataset, Mapping) else {"train_dataset": dataset}
    return {
        name: items if is_indexed(items) else Stream(items, None, rank, num_ranks, options)
        for name, items in named.items()
    }


class _Batches(IterableDataset[Any]):
    """A stream's packs as a trainer takes them, and where the trainer stands in them."""

    def __init__(self, loader: StreamLoader, trainer: Trainer) -> None:
        self._loader, self._trainer = loader, trainer
        self._blanks = 0

    def __iter__(self) -> Iterator[Any]:
        blanks, self._blanks = self._blanks, 0
        yield from repeat(None, blanks)
        yield from self._loader

    def place(self) -> dict[str, Any]:
        """Of this rank, behind a step."""
        return self._loader.state_dict()

    def go_on(self, folder: Path) -> None:
        """Go on from a checkpoint. Trainer throws away the micro-batches that it has trained: they come as blanks."""
        args = self._trainer.args
        self._blanks = self._trainer.state.global_step % args.max_steps * args.gradient_accumulation_steps
        self._loader.load_state_dict(read_place(folder))


class StreamCallback(PacksCallback):
    """Goes on with the same packs only, and tells how even steps were."""

    def __init__(self, trainer: Trainer, loader: StreamLoader, costs: Costs | None) -> None:
        texts = two_texts(trainer.accelerator.unwrap_model(trainer.model).config)
        sampler: Any = loader
        super().__init__(trainer, sampler, costs, layout_of(trainer), lambda: check_model(trainer, *texts))
        self._loader, self._fate = loader, FATES.get(loader.state_dict()["made_from"]["oversized"])

    @property
    def vision_unit(self) -> str:
        """A stream does not say what its vision units are."""
        return "vision units"

    def made_from(self) -> dict[str, Any]:
        """What packs depend on; a change of the rest is told where the rank's place is loaded."""
        made_from: dict[str, Any] = self._loader.state_dict()["made_from"]
        return {name: value for name, value in made_from.items() if name not in FREE}

    def logged(self) -> dict[str, float]:
        """As of ``PacksCallback``, and how many samples exceeded a limit so far."""
        return super().logged() | {"oversized": self._loader.oversized}

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """As of ``PacksCallback``."""
        super().on_train_end(args, state, control, **others)
        if self._loader.oversized and state.is_world_process_zero:
            print(f"omnibal: {self._loader.oversized:,} samples exceeded a limit on their own; each {self._fate}")

    def held(self, state: TrainerState) -> tuple[Load, int, Mapping[str, tuple[float, float]]]:
        """As of ``PacksCallback``."""
        loader = self._loader
        return loader.step_load(), int(loader.step_loads[..., -1].sum()), loader.step_shares
