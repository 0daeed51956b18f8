"""Draws micro-batches ahead, and has them planned by the time that the model wants them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnibal.cost import IntArray
from omnibal.data.collate import IGNORED
from omnibal.data.streaming.ahead import ahead
from omnibal.dispatch.step_plan import COLUMNS, Costs, StepPlan, plan_step
from omnibal.errors import ConfigError, DataError, said
from omnibal.integrations.agreement import told_by_all
from omnibal.integrations.packing import PER_IMAGE, PackCollator
from omnibal.integrations.padded import RowCollator
from omnibal.integrations.rearranging import Drawn

AHEAD: Final = 2
"""Steps that are drawn and planned before they are wanted."""

MOVED: Final = ("pixel_values", "image_grid_thw")
"""What samples may have for each image: of other models' tensors nobody has said how many rows an image has."""

_Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Step:
    micro_batches: list[Drawn]
    state: Any
    """Of the source, once this step is drawn."""


class RearrangingLoader:
    """Yields what ``RearrangedModel`` takes: this rank's samples, and where all ranks' samples go.

    A thread draws the next steps, exchanges their lengths with the other ranks (numbers only, over gloo) and plans
    them while the model works. A source that never ends is fine, and so are ranks whose sources end at different
    times: a rank that has no more works on others' samples until all have ended. What goes wrong on one rank is raised
    on all.

    Args:
        source: Of this rank: yields lists of items of a dataset, a micro-batch each. Iterated once for every iteration
            of the loader. If it has ``state_dict`` and ``load_state_dict``, as torchdata's loaders do, they are used to
            resume; else as many micro-batches as were trained are drawn and thrown away.
        collator: Makes tensors of an item: a ``PackCollator``, or a ``RowCollator`` for models that cannot pack.
        image_token_id: Stands in ``input_ids`` for each of an image's features.
        costs: Of a sample in both phases.
        micro_batches: Of a step (gradient accumulation): the loss is a mean over the targets of all.
        prints: Whether rank 0 says how even the first step was and is.
    """

    _state: Any

    def __init__(
        self,
        source: Iterable[Sequence[Any]],
        collator: PackCollator,
        *,
        image_token_id: int,
        costs: Costs | None = None,
        micro_batches: int = 1,
        prints: bool = True,
    ) -> None:
        self._source, self._collator, self._image_token_id = source, collator, image_token_id
        self._costs = replace(costs or Costs(), padded=isinstance(collator, RowCollator))
        self._micro_batches = micro_batches
        self._group = dist.new_group(backend="gloo")
        self._prints = prints and dist.get_rank() == 0
        self._steps_done, self._state = 0, None

    def __iter__(self) -> Iterator[Drawn]:
        for step in ahead(self._steps, AHEAD):
            if self._prints:
                print(f"omnibal: {step.micro_batches[0].plan.describe()}")
                self._prints = False
            for number, drawn in enumerate(step.micro_batches, start=1):
                if number == self._micro_batches:  # who saves after the last one's backward pass has trained it
                    self._steps_done, self._state = self._steps_done + 1, step.state
                yield drawn
        self._steps_done, self._state = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, between two steps: what goes on from here, on as many ranks."""
        return {"steps_done": self._steps_done, "source": self._state, "num_ranks": dist.get_world_size()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where this rank's state was taken.

        Raises:
            ConfigError: There are other ranks now: each had drawn from a source of its own.
        """
        if state["num_ranks"] != dist.get_world_size():
            raise ConfigError(
                f"state must be of a run on {dist.get_world_size()} ranks, got {state['num_ranks']}; "
                "every rank goes on in its own source"
            )
        self._steps_done, self._state = state["steps_done"], state["source"]

    def _steps(self) -> Iterator[_Step]:
        """What the thread makes: draws, tells the others what was drawn, plans."""
        if self._state is not None:
            self._source.load_state_dict(self._state)  # type: ignore[attr-defined]
        batches = iter(self._source)
        if self._state is None:
            for _ in islice(batches, self._steps_done * self._micro_batches):
                pass
        while (step := self._next_step(batches)) is not None:
            yield step

    def _next_step(self, batches: Iterator[Sequence[Any]]) -> _Step | None:
        """One step of this rank, or None where all ranks' sources have ended."""
        try:
            read = [[self._collator.sample(item) for item in batch] for batch in islice(batches, self._micro_batches)]
            state = self._source.state_dict() if hasattr(self._source, "state_dict") else None
            told: Any = [self._sizes(batch) for batch in read], _image_shapes(read), self._settings()
        except Exception as error:
            told = said(error)
        of_ranks = told_by_all(told, self._group)
        shapes = _agreed(of_ranks)
        of_ranks = [sizes for sizes, *_ in of_ranks]
        if not any(of_ranks):
            return None
        nothing = np.zeros((len(COLUMNS), 0), dtype=np.int64)
        per_batch = [
            [sizes[number] if number < len(sizes) else nothing for sizes in of_ranks]
            for number in range(max(map(len, of_ranks)))
        ]
        # A step's last micro-batch is the one after which weights change: a short step is filled up with empty ones.
        per_batch += [[nothing] * len(of_ranks)] * (self._micro_batches - len(per_batch))
        total = sum(int(sizes[COLUMNS.index("target_tokens")].sum()) for ranks in per_batch for sizes in ranks)
        read += [[] for _ in range(self._micro_batches - len(read))]
        drawn = [
            self._drawn(samples, shapes, self._plan(ranks, total))
            for samples, ranks in zip(read, per_batch, strict=True)
        ]
        return _Step(drawn, state)

    def _settings(self) -> str:
        """What ranks must have alike to make the same plans."""
        positions = self._collator.num_positions
        return f"micro_batches={self._micro_batches}, {positions} rows of positions, {self._costs}"

    def _plan(self, ranks: Sequence[IntArray], total_targets: int) -> StepPlan:
        """The same on all ranks, from the same numbers."""
        source = np.repeat(np.arange(len(ranks)), [sizes.shape[1] for sizes in ranks])
        sizes = dict(zip(COLUMNS, np.concatenate(ranks, axis=1), strict=True))
        plan = plan_step(source, sizes, len(ranks), self._costs, total_targets=total_targets)
        _ = plan.features, plan.imbalance  # here, rather than when the model runs
        return plan

    def _sizes(self, samples: Sequence[Mapping[str, Tensor]]) -> IntArray:
        """Of each sample a column with all of ``COLUMNS``."""
        for name in {name for sample in samples for name in sample} & {*PER_IMAGE} - {*MOVED}:
            raise DataError(f"images must come as {' and '.join(MOVED)} to be rearranged, got {name} too")
        rows = [
            (
                len(sample.get("pixel_values", ())),
                int(sample["image_grid_thw"].prod(dim=1).square().sum()) if "image_grid_thw" in sample else 0,
                len(sample.get("image_grid_thw", ())),
                int((sample["input_ids"] == self._image_token_id).sum()),
                len(sample["input_ids"]),
                int((sample["labels"] != IGNORED).sum()),
            )
            for sample in samples
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS)).T

    def _drawn(self, samples: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, _Shape], plan: StepPlan) -> Drawn:
        """This rank's tensors; images with no rows where others have some."""
        images = {
            name: torch.cat([torch.empty((0, *shape), dtype=dtype), *(s[name] for s in samples if name in s)])
            for name, (shape, dtype) in shapes.items()
        }
        padded = self._costs.padded
        tokens = [torch.empty((0, 2 + padded + self._collator.num_positions), dtype=torch.int64)]
        for sample in samples:
            ids = sample["input_ids"]
            types = [sample.get("token_type_ids", torch.zeros_like(ids))] if padded else []
            tokens.append(torch.stack([ids, sample["labels"], *types, *self._collator.positions(sample)], dim=1))
        return Drawn(torch.cat(tokens), images, plan)


def _agreed(told: Sequence[Any]) -> dict[str, _Shape]:
    """The shapes of all ranks' images; what is not as on the other ranks is raised on all.

    Raises:
        DataError: A rank's images are unlike those of another rank.
        ConfigError: A rank has other settings.
    """
    for rank, (*_, settings) in enumerate(told):
        if settings != told[0][2]:
            raise ConfigError(f"rank {rank}: settings must be those of rank 0, {told[0][2]}, got {settings}")
    found: dict[str, _Shape] = {}
    for rank, (_, shapes, _) in enumerate(told):
        for name, shape in shapes:
            if found.setdefault(name, shape) != shape:
                raise DataError(f"rank {rank}: rows of {name} must be as on other ranks, {found[name]}, got {shape}")
    return found


def _image_shapes(batches: Sequence[Sequence[Mapping[str, Tensor]]]) -> list[tuple[str, _Shape]]:
    """What rows of each of the images' tensors are like: one entry for each name, unless images differ."""
    shapes = {
        (name, (tuple(sample[name].shape[1:]), sample[name].dtype))
        for samples in batches
        for sample in samples
        for name in PER_IMAGE
        if name in sample
    }
    return sorted(shapes, key=str)
