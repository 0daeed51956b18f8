"""Draws micro-batches ahead, and has them planned by the time that the model wants them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from omnibal.cost import IntArray
from omnibal.dispatch.step_plan import COLUMNS, Costs, StepPlan, plan_step
from omnibal.errors import ConfigError, DataError, said
from omnibal.feeds.feed import ahead
from omnibal.formats.collate import IGNORED
from omnibal.integrations.packing import PER_IMAGE, PackCollator
from omnibal.integrations.padded import RowCollator
from omnibal.integrations.rearranging import Drawn
from omnibal.integrations.rearranging_lengths import TOLD, LengthsExchange, Shapes, rows_of_images
from omnibal.integrations.step_check import StepCheck
from omnibal.ranks import Meeting, new_gloo_group

AHEAD: Final = 2
"""Steps that are drawn and planned before they are wanted."""

_iterations = count()
"""Of all loaders of this process: ranks iterate them alike."""


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
    on all. A rank that leaves the loop, skips a step or holds another plan ends all, with a message that names the
    rank. Where CUDA is there, tensors lie in pinned memory.

    Args:
        source: Of this rank: yields lists of items of a dataset, a micro-batch each. Iterated once for every iteration
            of the loader. If it has ``state_dict`` and ``load_state_dict``, as torchdata's loaders do, they are used to
            resume; else as many micro-batches as were trained are drawn and thrown away.
        collator: Makes tensors of an item: a ``PackCollator``, or a ``RowCollator`` for models that cannot pack.
        image_token_id: Stands in ``input_ids`` for each of an image's features.
        costs: Of a sample in both phases.
        micro_batches: Of a step (gradient accumulation): the loss is a mean over the targets of all.
        group: The ranks that share samples, the same as of the ``RearrangedModel``; by default all. The loss is the
            mean over the target tokens of this group.
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
        group: dist.ProcessGroup | None = None,
        prints: bool = True,
    ) -> None:
        self._source, self._collator, self._image_token_id = source, collator, image_token_id
        self._costs = replace(costs or Costs(), padded=isinstance(collator, RowCollator))
        self._micro_batches = micro_batches
        positions = collator.num_positions
        settings = f"micro_batches={micro_batches}, {positions} rows of positions, {self._costs}"
        self._lengths, self._meeting = LengthsExchange(new_gloo_group(group), settings), Meeting(group)
        self._num_ranks = dist.get_world_size(group)
        self._prints = prints and dist.get_rank() == 0
        self._steps_done, self._state = 0, None

    def __iter__(self) -> Iterator[Drawn]:
        iteration = next(_iterations)
        beginning = received = (iteration, -1, -1)
        try:
            for step in ahead(partial(self._steps, iteration), AHEAD):
                if self._prints:
                    print(f"omnibal: {step.micro_batches[0].plan.describe()}")
                    self._prints = False
                for number, drawn in enumerate(step.micro_batches, start=1):
                    if number == self._micro_batches:  # who saves after the last one's backward pass has trained it
                        self._steps_done, self._state = self._steps_done + 1, step.state
                    received = drawn.check.place
                    yield drawn
        except GeneratorExit:
            self._meeting.leave(beginning, received)
            raise
        self._steps_done, self._state = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, between two steps: what goes on from here, on as many ranks."""
        return {"steps_done": self._steps_done, "source": self._state, "num_ranks": self._num_ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where this rank's state was taken.

        Raises:
            ConfigError: There are other ranks now: each had drawn from a source of its own.
        """
        if state["num_ranks"] != self._num_ranks:
            raise ConfigError(
                f"state must be of a run on {self._num_ranks} ranks, got {state['num_ranks']}; "
                "every rank goes on in its own source"
            )
        self._steps_done, self._state = state["steps_done"], state["source"]

    def _steps(self, iteration: int) -> Iterator[_Step]:
        """What the thread makes: draws, tells the others what was drawn, plans."""
        batches, first = self._batches(), self._steps_done
        for number in count(first):
            step = self._next_step(batches, iteration, number)
            if step is None:
                return
            yield step

    def _batches(self) -> Iterator[Sequence[Any]]:
        """This rank's draws from where it stands; what fails at the beginning is told as what fails later."""
        if self._state is not None:
            self._source.load_state_dict(self._state)  # type: ignore[attr-defined]
        trained = 0 if self._state is not None else self._steps_done * self._micro_batches
        yield from islice(self._source, trained, None)

    def _next_step(self, batches: Iterator[Sequence[Any]], iteration: int, number: int) -> _Step | None:
        """One step of this rank, or None where all ranks' sources have ended."""
        told: tuple[list[IntArray], Shapes] | DataError
        try:
            read = [[self._collator.sample(item) for item in batch] for batch in islice(batches, self._micro_batches)]
            tokens = [self._tokens(batch) for batch in read]
            state = self._source.state_dict() if hasattr(self._source, "state_dict") else None
            told = [self._sizes(batch) for batch in read], rows_of_images(chain(*read))
        except Exception as error:
            told = DataError(said(error))
        of_ranks, shapes = self._lengths.gather(told, iteration, number)
        if not any(of_ranks):
            return None
        nothing = np.zeros((len(TOLD), 0), dtype=np.int64)
        per_batch = [
            [sizes[batch] if batch < len(sizes) else nothing for sizes in of_ranks]
            for batch in range(max(map(len, of_ranks)))
        ]
        # A step's last micro-batch is the one after which weights change: a short step is filled up with empty ones.
        per_batch += [[nothing] * len(of_ranks)] * (self._micro_batches - len(per_batch))
        total = sum(int(sizes[COLUMNS.index("target_tokens")].sum()) for ranks in per_batch for sizes in ranks)
        missing = self._micro_batches - len(read)
        read, tokens = read + [[]] * missing, tokens + [self._tokens([])] * missing
        drawn = []
        for batch, (of_samples, samples, ranks) in enumerate(zip(tokens, read, per_batch, strict=True)):
            images, plan = _images_of(samples, shapes), self._plan(ranks, total)
            check = StepCheck(self._meeting, (iteration, number, batch), plan.digest)
            drawn.append(
                Drawn(_pinned(of_samples), {name: _pinned(rows) for name, rows in images.items()}, plan, check)
            )
        return _Step(drawn, state)

    def _plan(self, ranks: Sequence[IntArray], total_targets: int) -> StepPlan:
        """The same on all ranks, from the same numbers."""
        source = np.repeat(np.arange(len(ranks)), [sizes.shape[1] for sizes in ranks])
        sizes = dict(zip(TOLD, np.concatenate(ranks, axis=1), strict=True))
        plan = plan_step(source, sizes, len(ranks), self._costs, total_targets=total_targets)
        _ = plan.features, plan.imbalance, plan.digest  # here, rather than when the model runs
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


def _images_of(samples: Sequence[Mapping[str, Tensor]], shapes: Shapes) -> dict[str, Tensor]:
    """This rank's images, with no rows where others have some."""
    images = {}
    for name, (shape, dtype) in shapes.items():
        rows = [_padded(sample[name], shape) for sample in samples if name in sample]
        images[name] = torch.cat([torch.empty((0, *shape), dtype=dtype), *rows])
    return images


def _pinned(tensor: Tensor) -> Tensor:
    """The tensor where a GPU copies it from while the processor goes on."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _padded(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows of some shape, with zeros behind."""
    behind = [most - size for most, size in zip(shape, rows.shape[1:], strict=True)]
    return pad(rows, [amount for size in reversed(behind) for amount in (0, size)])
