"""Equips a transformers.Trainer to rearrange samples over ranks: for data that is drawn first and measured later."""

from collections.abc import Iterator, Mapping
from functools import wraps
from math import ceil
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState

from omnibal.advise.wait import MEETINGS
from omnibal.data.limits import PackLimits
from omnibal.dispatch.step_plan import phase_name
from omnibal.errors import ConfigError, reporting
from omnibal.integrations.rearranging import Drawn, Phases
from omnibal.integrations.rearranging_loader import RearrangingLoader, counted_costs
from omnibal.integrations.trainer.hooks import RecipeCallback, add_recipe, check_model, worker_options
from omnibal.integrations.trainer.settings import (
    batch_size_of,
    data_rank_of,
    data_seed,
    keeps_sft_loss,
    recompute_of,
    sharding_of,
)
from omnibal.integrations.trainer.streams import ResumableBatches, Stream, keep_position, uncollated
from omnibal.packs.collator import PackCollator, arguments_of, positions_of, without_adapters
from omnibal.packs.encoders import EncoderAdapter, encoders_of
from omnibal.packs.padded import RowCollator
from omnibal.packs.proof import two_texts
from omnibal.packs.row_lengths import refuse_long_rows


class DatasetDraws:
    """This rank's draws of a dataset that is read by index: every sample once an epoch, in another order each."""

    def __init__(
        self, dataset: Any, size: int, rank: int, num_ranks: int, seed: int, options: Mapping[str, Any]
    ) -> None:
        self.num_samples = len(dataset)
        self._dataset, self._size, self._rank, self._num_ranks = dataset, size, rank, num_ranks
        self._seed, self._options = seed, options
        self._epoch, self._start = 0, 0

    def __iter__(self) -> Iterator[list[Any]]:
        order = np.random.default_rng((self._seed, self._epoch)).permutation(len(self._dataset))
        draws = [order[start : start + self._size].tolist() for start in range(0, len(order), self._size)]
        mine = draws[self._rank :: self._num_ranks][self._start :]
        # A generator of its own, for the workers' seeds: this runs in a thread beside the model's.
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        self._epoch, self._start = self._epoch + 1, 0
        loader = DataLoader(
            self._dataset, batch_sampler=mine, collate_fn=uncollated, generator=generator, **self._options
        )
        return iter(loader)

    def __len__(self) -> int:
        """Draws of the rank that has most."""
        return ceil(len(self._dataset) / (self._size * self._num_ranks))

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Let the next iteration be of this epoch, from this draw on."""
        self._epoch, self._start = epoch, start


def rearrange_samples(trainer: Trainer, limits: PackLimits | None, *, padded: bool = False) -> None:
    """Let a trainer, whose settings allow packs, rearrange samples over its ranks."""
    rank, num_ranks = data_rank_of(trainer)
    dataset = trainer.train_dataset
    settings = {
        "trainer": (not keeps_sft_loss(trainer), "a Trainer with its own loss", type(trainer).__name__),
        "train_dataset": (not isinstance(dataset, Mapping | None), "a dataset or stream", type(dataset).__name__),
        "world_size": (num_ranks > 1, "above 1", num_ranks),
        "ranks that get one draw": (num_ranks == trainer.args.world_size, "1", trainer.args.world_size // num_ranks),
        "torch_compile": (not trainer.args.torch_compile, "False", True),
        "model_init": (trainer.model_init is None, "None", "one"),  # it would make a model with a forward of its own
    }
    for name, (holds, expected, value) in settings.items():
        if not holds:
            raise ConfigError(f"{name} must be {expected} to rearrange samples, got {value}")
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    if not padded:
        refuse_long_rows(model, limits)
    positions = positions_of(model.config)
    kind = RowCollator if padded else PackCollator
    collator = kind(trainer.data_collator, positions, arguments=arguments_of(model))
    encoders = encoders_of(model)
    _rearrange_forward(model, encoders)
    costs = counted_costs(
        model,
        device=trainer.args.device,
        limits=limits,
        recompute=recompute_of(trainer),
        phases_meet=MEETINGS[sharding_of(trainer)] == "phase",
        num_positions=collator.num_positions,
    )
    source, micro_batches = _source(trainer, rank, num_ranks), trainer.args.gradient_accumulation_steps
    loader = RearrangingLoader(source, collator, encoders=encoders, costs=costs, micro_batches=micro_batches)
    batches = RearrangedBatches(loader, source, trainer)

    def batches_of_epochs() -> DataLoader[Any]:
        found = DataLoader[Any](batches, batch_size=None, collate_fn=uncollated)
        vars(found)["set_epoch"] = source.set_epoch  # Trainer tells a loader the epoch
        return found

    vars(trainer)["get_train_dataloader"] = batches_of_epochs
    trainer.loss_is_scaled_for_ga = True  # over all target tokens of the step
    made_from = {
        "samples_a_draw": batch_size_of(trainer, num_ranks),
        "num_replicas": num_ranks,
        "gradient_accumulation_steps": micro_batches,
        "padded": padded,
    }
    if isinstance(source, DatasetDraws):  # a stream keeps its own place
        made_from |= {"samples": source.num_samples, "seed": data_seed(trainer)}
    add_recipe(trainer, RearrangingCallback(trainer, made_from, batches))
    keep_position(trainer, batches)


def _source(trainer: Trainer, rank: int, num_ranks: int) -> Stream | DatasetDraws:
    args, dataset, size = trainer.args, trainer.train_dataset, batch_size_of(trainer, num_ranks)
    options = worker_options(args)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return Stream(dataset, size, rank, num_ranks, options)
    return DatasetDraws(dataset, size, rank, num_ranks, data_seed(trainer), options)


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


class RearrangedBatches(ResumableBatches):
    """Micro-batches that are drawn from a source and rearranged, as a trainer takes them."""

    def __init__(self, loader: RearrangingLoader, source: DatasetDraws | Stream, trainer: Trainer) -> None:
        super().__init__(loader, trainer)
        self.source = source
        self._beginning = self._next = loader.state_dict()
        self.imbalances: list[Mapping[str, tuple[float, float]]] = []

    def _batches(self) -> Iterator[dict[str, Any]]:
        # From the beginning, where nothing was resumed: Trainer leaves an epoch's last iteration unfinished.
        self._loader.load_state_dict(self._next)
        self._next = self._beginning
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

    def position(self) -> dict[str, Any] | None:
        return super().position() if isinstance(self.source, Stream) else None

    def go_on(self, folder: Path) -> None:
        if isinstance(self.source, Stream):
            super().go_on(folder)
            self._next = self._loader.state_dict()
            return
        micro_batches = self._trainer.args.gradient_accumulation_steps
        epoch, step = divmod(self._trainer.state.global_step, len(self) // micro_batches)
        self._blanks = step * micro_batches
        self.source.set_epoch(epoch, self._blanks)


class RearrangingCallback(RecipeCallback):
    """Refuses checkpoints of other batches, and tells how even each phase was drawn and is."""

    def __init__(self, trainer: Trainer, made_from: Mapping[str, Any], batches: RearrangedBatches) -> None:
        self._trainer, self._made_from, self._batches = trainer, made_from, batches
        self._sums, self._count = dict[str, Any](), 0

    def made_from(self) -> dict[str, Any]:
        return dict(self._made_from)

    def check(self) -> None:
        """See whether the model as it is trained keeps samples of a pack apart."""
        if not self._made_from["padded"]:
            check_model(self._trainer, *two_texts(self._trainer.accelerator.unwrap_model(self._trainer.model).config))

    def logged(self) -> dict[str, float]:
        """The largest rank over the mean since the last call, as drawn and as rearranged."""
        figures = dict[str, float]()
        with reporting("measuring of how even ranks are"):
            found, self._batches.imbalances = self._batches.imbalances, []
            for phase in found[0] if found else ():
                drawn, planned = total = np.sum([each[phase] for each in found], axis=0)
                figures |= {f"imbalance_{phase}_drawn": drawn / len(found), f"imbalance_{phase}": planned / len(found)}
                self._sums[phase] = self._sums.get(phase, 0) + total
            self._count += len(found)
        return {name: float(figure) for name, figure in figures.items()}

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Say in one line how even ranks were."""
        self.logged()
        if not (self._count and state.is_world_process_zero):
            return
        with reporting("the line about how even ranks were"):
            means = {phase_name(phase): values / self._count for phase, values in self._sums.items()}
            told = "; ".join(f"{name} {drawn:.2f} -> {planned:.2f}" for name, (drawn, planned) in means.items())
            print(f"omnibal: largest rank over mean, of all steps: {told}")
