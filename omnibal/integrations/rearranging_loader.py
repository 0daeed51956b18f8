"""Draws micro-batches ahead, and has them planned by the time that the model wants them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from omnibal.cost import IntArray
from omnibal.data.collate import IGNORED
from omnibal.data.streaming.ahead import ahead
from omnibal.dispatch.step_plan import COLUMNS, Costs, StepPlan, plan_step
from omnibal.errors import ConfigError, DataError, said
from omnibal.integrations.packing import PER_IMAGE, PackCollator
from omnibal.integrations.padded import RowCollator
from omnibal.integrations.rearranging import Drawn
from omnibal.ranks import gather, new_gloo_group

AHEAD: Final = 2
"""Steps that are drawn and planned before they are wanted."""

TOLD: Final = (*COLUMNS, *PER_IMAGE)
"""Of each sample: what a plan needs, and the rows of each tensor of its images (tiles, patches, images)."""
SIZED: Final = frozenset({"image_sizes", "pixel_attention_mask"})
"""Tensors that tell how much of an image is real: beside them smaller images may be padded to the largest."""

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
        self._group = new_gloo_group()
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
        batches = self._batches()
        while (step := self._next_step(batches)) is not None:
            yield step

    def _batches(self) -> Iterator[Sequence[Any]]:
        """This rank's draws from where it stands; what fails at the beginning is told as what fails later."""
        if self._state is not None:
            self._source.load_state_dict(self._state)  # type: ignore[attr-defined]
        trained = 0 if self._state is not None else self._steps_done * self._micro_batches
        yield from islice(self._source, trained, None)

    def _next_step(self, batches: Iterator[Sequence[Any]]) -> _Step | None:
        """One step of this rank, or None where all ranks' sources have ended."""
        try:
            read = [[self._collator.sample(item) for item in batch] for batch in islice(batches, self._micro_batches)]
            tokens = [self._tokens(batch) for batch in read]
            state = self._source.state_dict() if hasattr(self._source, "state_dict") else None
            told: Any = [self._sizes(batch) for batch in read], _image_shapes(read), self._settings()
        except Exception as error:
            told = DataError(said(error))
        of_ranks = gather(told, group=self._group)
        shapes = _agreed(of_ranks)
        of_ranks = [sizes for sizes, *_ in of_ranks]
        if not any(of_ranks):
            return None
        nothing = np.zeros((len(TOLD), 0), dtype=np.int64)
        per_batch = [
            [sizes[number] if number < len(sizes) else nothing for sizes in of_ranks]
            for number in range(max(map(len, of_ranks)))
        ]
        # A step's last micro-batch is the one after which weights change: a short step is filled up with empty ones.
        per_batch += [[nothing] * len(of_ranks)] * (self._micro_batches - len(per_batch))
        total = sum(int(sizes[COLUMNS.index("target_tokens")].sum()) for ranks in per_batch for sizes in ranks)
        missing = self._micro_batches - len(read)
        read, tokens = read + [[]] * missing, tokens + [self._tokens([])] * missing
        drawn = [
            Drawn(of_samples, _images_of(samples, shapes), self._plan(ranks, total))
            for of_samples, samples, ranks in zip(tokens, read, per_batch, strict=True)
        ]
        return _Step(drawn, state)

    def _settings(self) -> str:
        """What ranks must have alike to make the same plans."""
        positions = self._collator.num_positions
        return f"micro_batches={self._micro_batches}, {positions} rows of positions, {self._costs}"

    def _plan(self, ranks: Sequence[IntArray], total_targets: int) -> StepPlan:
        """The same on all ranks, from the same numbers."""
        source = np.repeat(np.arange(len(ranks)), [sizes.shape[1] for sizes in ranks])
        sizes = dict(zip(TOLD, np.concatenate(ranks, axis=1), strict=True))
        plan = plan_step(source, sizes, len(ranks), self._costs, total_targets=total_targets)
        _ = plan.features, plan.imbalance  # here, rather than when the model runs
        return plan

    def _sizes(self, samples: Sequence[Mapping[str, Tensor]]) -> IntArray:
        """Of each sample a column with all of ``TOLD``."""
        rows = [
            (
                len(sample.get("pixel_values", ())),
                int(sample["image_grid_thw"].prod(dim=1).square().sum()) if "image_grid_thw" in sample else 0,
                int((sample["input_ids"] == self._image_token_id).sum()),
                len(sample["input_ids"]),
                int((sample["labels"] != IGNORED).sum()),
                *(len(sample.get(name, ())) for name in PER_IMAGE),
            )
            for sample in samples
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, len(TOLD)).T

    def _tokens(self, samples: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """As of ``Drawn``."""
        padded = self._costs.padded
        tokens = [torch.empty((0, 2 + padded + self._collator.num_positions), dtype=torch.int64)]
        for sample in samples:
            ids = sample["input_ids"]
            types = [sample.get("token_type_ids", torch.zeros_like(ids))] if padded else []
            tokens.append(torch.stack([ids, sample["labels"], *types, *self._collator.positions(sample)], dim=1))
        return torch.cat(tokens)


def _images_of(samples: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, _Shape]) -> dict[str, Tensor]:
    """This rank's images, with no rows where others have some."""
    images = {}
    for name, (shape, dtype) in shapes.items():
        rows = [_padded(sample[name], shape) for sample in samples if name in sample]
        images[name] = torch.cat([torch.empty((0, *shape), dtype=dtype), *rows])
    return images


def _agreed(told: Sequence[Any]) -> dict[str, _Shape]:
    """The shapes of all ranks' images; what is not as on the other ranks is raised on all.

    Raises:
        DataError: A rank's images are unlike those of another rank.
        ConfigError: A rank has other settings.
    """
    for rank, (*_, settings) in enumerate(told):
        if settings != told[0][2]:
            raise ConfigError(f"rank {rank}: settings must be those of rank 0, {told[0][2]}, got {settings}")
    may_differ = any(name in SIZED for _, shapes, _ in told for name, _ in shapes)
    found: dict[str, _Shape] = {}
    for rank, (_, shapes, _) in enumerate(told):
        for name, (shape, dtype) in shapes:
            most, kind = found.setdefault(name, (shape, dtype))
            if (len(most), kind) != (len(shape), dtype) or (most != shape and not may_differ):
                got = f"{most} of {kind}, got {shape} of {dtype}"
                raise DataError(f"rank {rank}: rows of {name} must be as on other ranks, {got}")
            found[name] = tuple(map(max, most, shape)), kind
    return found


def _padded(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows of some shape, with zeros behind."""
    behind = [most - size for most, size in zip(shape, rows.shape[1:], strict=True)]
    return pad(rows, [amount for size in reversed(behind) for amount in (0, size)])


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
