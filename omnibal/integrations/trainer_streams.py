"""Equips a transformers.Trainer with packs of a stream: an IterableDataset, whose lengths are known as they come."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer_utils import seed_worker

from omnibal.advise.costs import phase_costs
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.integrations.expected import Costs
from omnibal.integrations.packing import PackCollator, positions_of, two_texts
from omnibal.integrations.shares import Stream, as_it_is
from omnibal.integrations.streams import StreamLoader
from omnibal.integrations.trainer_hooks import PacksCallback, check_model, load_by_names_on_disk, log_figures
from omnibal.integrations.trainer_rearranging import keep_place, read_place
from omnibal.integrations.trainer_settings import layout_of, recompute_of, replicas_of
from omnibal.profile.records import ModelProfile

BUFFER: Final = 256
"""Samples that a rank plans at a time: more have hardly made ranks more even (docs/streams.md)."""
SAMPLES_A_PACK: Final = 32
"""As many for each accumulation step, where that is more: a buffer must hold a step."""


def pack_stream(trainer: Trainer, limits: PackLimits | None, profile: ModelProfile | None) -> None:
    """Let a trainer train on packs of its stream, the same on all ranks; on all ranks, before training.

    Args:
        trainer: Its settings allow packs.
        limits: The most a pack may hold.
        profile: Of the model, if its layers can be counted.

    Raises:
        ConfigError: Its settings or its model do not allow packs of a stream.
    """
    args, (rank, num_ranks) = trainer.args, replicas_of(trainer)
    if limits is None:
        raise ConfigError("limits must say what a pack of a stream may hold, got None; its lengths are not known yet")
    if args.max_steps < 1:
        raise ConfigError(f"max_steps must be positive to train on a stream, got {args.max_steps}; it has no epochs")
    if num_ranks != args.world_size:
        raise ConfigError(f"tensor-parallel ranks must be 1 to train on a stream, got {trainer.get_tp_size()}")
    options = {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    }
    source = Stream(trainer.train_dataset, None, rank, num_ranks, options)
    buffer = max(BUFFER, SAMPLES_A_PACK * args.gradient_accumulation_steps)
    config = trainer.accelerator.unwrap_model(trainer.model).config
    loader = StreamLoader(
        {"train_dataset": source},
        PackCollator(trainer.data_collator, positions_of(config)),
        limits,
        buffer=buffer,
        micro_batches=args.gradient_accumulation_steps,
        seed=args.seed if args.data_seed is None else args.data_seed,
        weigh_tokens=False,
    )
    batches = _Batches(loader, source, trainer)
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
            f"omnibal: a stream in packs of at most {limits.vision_units} vision units and {limits.llm_tokens} tokens, "
            f"{buffer} samples of each rank planned at a time"
        )


class _Batches(IterableDataset[Any]):
    """A stream's packs as a trainer takes them, and where the trainer stands in them."""

    def __init__(self, loader: StreamLoader, source: Stream, trainer: Trainer) -> None:
        self._loader, self.source, self._trainer = loader, source, trainer
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
        self._loader = loader

    def recipe(self) -> dict[str, Any]:
        """What packs depend on."""
        recipe: dict[str, Any] = self._loader.state_dict()["recipe"]
        return recipe

    def held(self, state: TrainerState) -> tuple[Load, int, Mapping[str, tuple[float, float]]]:
        """As of ``PacksCallback``."""
        return self._loader.step_load(), int(self._loader.step_loads[..., -1].sum()), {}
