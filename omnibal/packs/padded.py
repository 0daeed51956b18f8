"""Balanced micro-batches for models whose attention cannot be packed: padded by the host's own collator.

A padded micro-batch costs as many sequences as it has samples, each as long as the longest. Packs that are even in
tokens mix long samples with short ones: padded, they waste more than random batches do. So the samples of each step
stay those that were planned, and are dealt to its micro-batches anew, sorted by length.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, ones_like

from omnibal.compiled import compiled
from omnibal.cost import Load
from omnibal.data.kinds import Loads, loads_of
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.data.step_size import planned_with
from omnibal.errors import ConfigError
from omnibal.families.base import WINDOWS
from omnibal.formats.collate import IGNORED
from omnibal.packs.collator import (
    Collator,
    PackCollator,
    hears_alone,
    refuse_missing,
    sounds_of,
    unpadded_images,
)
from omnibal.packs.loading import PackItems, PackSampler, PlannedLoads


class PaddedSampler(PackSampler):
    """A ``PackSampler`` whose packs are batches to be padded: its limits count padding.

    Steps hold the samples that the planner chose at random, so nothing but the place of a sample within its step
    depends on its length. A step that cannot be dealt within the limits is dealt as evenly as it can be.
    """

    def __init__(self, lengths: SampleLengths, limits: PackLimits, **options: Any) -> None:
        if limits.sound_units is not None:
            raise ConfigError(
                f"limits of padded batches must have no sound_units, got {limits.sound_units}; LLM tokens bound them"
            )
        super().__init__(lengths, planned_with(limits), **options)
        self._most = limits
        self._dealt: tuple[Packs, Packs] | None = None  # a step as planned and as dealt, which is asked for repeatedly

    def packs_of_step(self, step: int) -> Packs:
        """The batches of a step, in the order of ``packs_of_all_ranks``."""
        planned = self.step_packs(step)
        if self._dealt is None or self._dealt[0] is not planned:
            self._dealt = planned, self._deal(planned.samples)
        return self._dealt[1]

    def _deal(self, samples: IntArray) -> Packs:
        dealt = deal_padded(samples, self.lengths, self._most, self.num_replicas * self.micro_batches)
        # Rows of the grid are micro-batches, which ranks run at the same time: each row gets batches with about as many
        # images. Every second row is turned round, so that over the step no rank gets more images than others.
        by_vision = np.argsort(-dealt.vision_units(self.lengths), kind="stable")
        grid = by_vision.reshape(self.micro_batches, self.num_replicas)
        grid[1::2] = grid[1::2, ::-1]
        return dealt.take(grid.T.ravel())

    def load(self, step: int) -> Load:
        """What the micro-batches of a step hold, padding included, in arrays of shape (ranks, micro-batches)."""
        packs, shape = self.packs_of_step(step), (self.num_replicas, self.micro_batches)
        longest = np.array([self.lengths.llm_tokens[pack].max(initial=0) for pack in packs], dtype=np.float64)
        load = packs.load(self.lengths)
        columns = (
            load.vision_units,
            packs.sizes * longest,
            packs.sizes * longest**2,
            load.vision_squared,
            load.sound_units,
        )
        vision, tokens, squares, squared, sounds = (column.reshape(shape) for column in columns)
        return Load(vision, tokens, squares, squared, sound_units=sounds)


def deal_padded(samples: IntArray, lengths: SampleLengths, limits: PackLimits, count: int) -> Packs:
    """Deal samples into batches such that the largest one, padding included, is as small as sorting allows.

    Batches are runs of the samples in order of their length, so each is padded little. A batch with more vision units
    than the limit is made only where there is no other way. Batches are empty only where there are fewer samples.

    >>> lengths = SampleLengths([0, 0, 0, 0], [100, 10, 90, 20])
    >>> [batch.tolist() for batch in deal_padded(np.arange(4), lengths, PackLimits(1, 200), 2)]
    [[0, 2], [3, 1]]
    """
    order = samples[np.lexsort((-lengths.vision_units[samples], -lengths.llm_tokens[samples]))]
    if len(order) <= count:
        return Packs(order, np.minimum(np.arange(count + 1), len(order)))
    tokens, vision = lengths.llm_tokens[order].astype(np.int64), lengths.vision_units[order].astype(np.int64)
    everything = int(tokens[0]) * len(tokens)
    fits = _num_runs(tokens, vision, everything, limits.vision_units) <= count
    most_vision = limits.vision_units if fits else int(vision.sum())
    least, most = int(tokens[0]), everything  # the largest padded size is searched by halving
    while least < most:
        middle = (least + most) // 2
        if _num_runs(tokens, vision, middle, most_vision) <= count:
            most = middle
        else:
            least = middle + 1
    starts = np.zeros(count + 1, dtype=np.int64)
    runs = _cut(tokens, vision, most, most_vision, starts)
    starts = starts[: runs + 1]
    while len(starts) - 1 < count:  # as many samples as batches at least: none stays empty
        sizes = np.diff(starts)
        largest = np.argsort(-np.where(sizes > 1, sizes * tokens[starts[:-1]], 0), kind="stable")
        halved = largest[: min(count - len(sizes), int((sizes > 1).sum()))]
        starts = np.sort(np.concatenate([starts, starts[halved] + sizes[halved] // 2]))
    return Packs(order, starts)


def _num_runs(tokens: IntArray, vision: IntArray, most: int, most_vision: int) -> int:
    return int(_cut(tokens, vision, most, most_vision, np.zeros(len(tokens) + 1, dtype=np.int64)))


@compiled
def _cut(tokens: IntArray, vision: IntArray, most: int, most_vision: int, bounds: IntArray) -> int:
    """Cut sorted samples into runs as long as the limits allow, and write where they begin and the last one ends."""
    runs, first, units = 0, 0, 0
    for place in range(len(tokens)):
        # The first sample of a run is its longest: all are padded to it.
        padded = tokens[first] * (place - first + 1)
        if place > first and (padded > most or units + vision[place] > most_vision):
            runs, first, units = runs + 1, place, 0
            bounds[runs] = place
        units += vision[place]
    bounds[runs + 1] = len(tokens)
    return runs + 1


class PaddedCollator:
    """The host's own batches of the samples that a sampler draws, whatever fields they have.

    Arguments are those of ``PackCollator``. ``collate`` gives ``input_ids`` and ``labels`` (samples, tokens), an
    ``attention_mask`` where samples are padded, and images as rows of ``pixel_values``.
    """

    def __init__(
        self,
        collate: Collator,
        lengths: SampleLengths | None = None,
        *,
        absorb: bool = False,
        arguments: frozenset[str] | None = None,
    ) -> None:
        self._collate, self._arguments = collate, arguments
        self._planned = None if lengths is None else PlannedLoads(lengths, absorb=absorb)

    def __call__(self, drawn: PackItems) -> dict[str, Any]:
        """The arguments of the model's forward pass; DataError for samples that are not as planned."""
        batch = self._collated(drawn.items)
        if self._planned is not None:  # a row tells its tokens, pixel_values only the images of all rows
            rows = [(None, *row) for row in _rows(batch)]
            self._planned.check(drawn.samples, rows, self._units(batch))
        batch["labels"][len(drawn.samples) - drawn.num_fillers :] = IGNORED
        return batch

    def measure(self, dataset: Any, numbers: Sequence[int]) -> list[Loads]:
        """Loads of some samples, each of which is read once."""
        batches = (self._collated([dataset[number]]) for number in numbers)
        return [
            loads_of(units - videos, videos, *_rows(batch)[0], sounds)
            for batch in batches
            for units, videos, sounds in [self._units(batch)]
        ]

    @property
    def unit_name(self) -> str | None:
        """What the first encoder counts, where it is not a ViT."""
        return WINDOWS if hears_alone(self._arguments) else None

    def _units(self, batch: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """Vision units (or windows of sound), those of videos, and sound units."""
        pixels, videos = batch.get("pixel_values"), len(batch.get("pixel_values_videos", ()))
        images = 0 if pixels is None else len(unpadded_images(batch).get("pixel_values", pixels))
        windows, positions = sounds_of(batch, self._arguments)
        return images + videos + windows, videos, positions

    def _collated(self, items: Sequence[Any]) -> dict[str, Any]:
        batch = {name: value for name, value in self._collate(list(items)).items() if value is not None}
        refuse_missing(batch, self._arguments)
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, :1] = IGNORED  # nothing predicts a first token, but some hosts count it as a target
        return batch


class RowCollator(PackCollator):
    """Samples one by one, to become rows of a batch that is padded behind: for models that cannot pack.

    ``positions`` is what ``positions_of(config)`` gives.
    """

    @property
    def num_positions(self) -> int:
        """Rows of a token's positions; none where the model counts them by itself."""
        return 0 if self._positions is None else 3

    def positions(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Positions in time, height and width, without the text's row, which would tell samples apart."""
        ids = sample["input_ids"]
        return ids.new_empty((0, len(ids))) if self._positions is None else self._positions(ids, sample)[1:]


def _rows(batch: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Tokens and target tokens of each row of a padded batch."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    tokens = (ones_like(ids) if mask is None else mask != 0).sum(dim=1).tolist()
    return list(zip(tokens, (batch["labels"] != IGNORED).sum(dim=1).tolist(), strict=True))
