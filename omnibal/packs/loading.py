"""Batch samplers and a view of a dataset, with which a host's own DataLoader reads balanced packs or padded batches.

No torch and no host is imported here. A host that counts batches (Trainer, Accelerate, Lightning) counts packs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any
from warnings import warn

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import Load
from omnibal.data.epoch import Step
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs, fillers_for, in_full, smallest_of_kinds
from omnibal.data.step_size import planned_with
from omnibal.errors import ConfigError, DataError
from omnibal.families.base import WINDOWS
from omnibal.feeds.sampler import BalancedBatchSampler


class Pack(list[int]):
    """Samples of a pack, and fillers: samples that are run along without their targets."""

    # Alone in its part of the sequence and without targets, a filler adds zeros to the gradients. It is there for the
    # ViT, which some ranks would else not run, or not on images or videos; or for a pack that holds nothing.

    weight = 0.0
    """``token_weight`` of the step."""

    def __init__(self, samples: Sequence[int] = (), fillers: Sequence[int] = ()) -> None:
        super().__init__(samples)
        self.fillers = tuple(fillers)


def token_weight(step: Step, num_replicas: int) -> float:
    """The factor of summed losses of target tokens that makes them the mean over a step, for hosts that average."""
    return num_replicas / max(step.target_tokens or 0, 1)


class PackSampler(BalancedBatchSampler):
    """A ``BalancedBatchSampler`` whose packs say which fillers they need.

    Images are a kind of input, videos another and sounds a third: a model runs an encoder once for each. A pack without
    a kind gets the smallest sample with it as a filler where another pack of the step has that kind, with
    ``image_in_every_pack`` in all steps; an empty pack gets the smallest sample. Limits do not count fillers. Every
    rank has its own packs, so the host must not deal them to its ranks again.

    >>> sampler = PackSampler(SampleLengths([2, 1, 0], [50, 30, 20]), PackLimits(2, 60), num_replicas=3, rank=0)
    >>> sorted((pack, pack.fillers) for pack in sampler.packs_of_all_ranks(step=0))
    [([0], ()), ([1], ()), ([2], (1,))]
    """

    def __init__(
        self, lengths: SampleLengths, limits: PackLimits, *, image_in_every_pack: bool = False, **options: Any
    ) -> None:
        super().__init__(lengths, limits, **options)
        self._kinds = lengths.kinds
        self._smallest = smallest_of_kinds(lengths)
        self._in_every_pack = reduce(or_, self._smallest, 0) if image_in_every_pack else 0

    def __iter__(self) -> Iterator[list[int]]:
        for number, _ in enumerate(super().__iter__()):
            step, micro_batch = divmod(number, self.micro_batches)
            if micro_batch == 0:
                packs = self.packs_of_all_ranks(self.steps_done + step)
                weight = token_weight(self.step(self.steps_done + step), self.num_replicas)
            pack = packs[self.rank * self.micro_batches + micro_batch]
            pack.weight = weight
            yield pack

    def packs_of_all_ranks(self, step: int) -> list[Pack]:
        """The packs of a step of the current epoch, rank after rank, micro-batch after micro-batch."""
        packs = self.packs_of_step(step)
        kinds = [int(np.bitwise_or.reduce(self._kinds[pack])) for pack in packs]
        # All ranks run the ViT on a kind in a micro-batch, or none: hosts gather its weights or reduce its gradients
        # together.
        wanted = reduce(or_, kinds, self._in_every_pack)
        return [
            Pack(pack.tolist(), fillers_for(self._smallest, self._size, has, wanted, is_empty=len(pack) == 0))
            for pack, has in zip(packs, kinds, strict=True)
        ]

    def _size(self, sample: int) -> tuple[int, int]:
        return int(self.lengths.vision_units[sample]), int(self.lengths.llm_tokens[sample])

    def packs_of_step(self, step: int) -> Packs:
        """The packs of a step without fillers, in the order of ``packs_of_all_ranks``."""
        return self.step_packs(step)

    def load(self, step: int) -> Load:
        """What the packs of a step hold, fillers aside, in arrays of shape (ranks, micro-batches)."""
        # All tokens count as targets: what a host gains by its head, it gains without balance as well.
        load = self.step(step).load
        sizes = load.vision_units, load.llm_tokens, load.llm_tokens_squared, load.vision_squared
        return Load(*sizes, sound_units=load.sound_units)


class PaddedSampler(PackSampler):
    """A ``PackSampler`` of batches to be padded, for models that cannot pack: its limits count padding."""

    # A padded batch costs as many sequences as it has samples, each as long as the longest. Packs that are even in
    # tokens mix long samples with short ones: padded, they waste more than random batches do. So the samples of each
    # step stay those that were planned, and are dealt to its batches anew, sorted by length. The planner chose them at
    # random, so nothing but the place of a sample within its step depends on its length. A step that cannot be dealt
    # within the limits is dealt as evenly as it can be.

    def __init__(self, lengths: SampleLengths, limits: PackLimits, **options: Any) -> None:
        if limits.sound_units is not None:
            raise ConfigError(
                f"limits of padded batches must have no sound_units, got {limits.sound_units}; LLM tokens bound them"
            )
        super().__init__(lengths, planned_with(limits), **options)
        self.limits = limits
        self._dealt: tuple[Packs, Packs] | None = None  # a step as planned and as dealt, which is asked for repeatedly

    def packs_of_step(self, step: int) -> Packs:
        """The batches of a step, in the order of ``packs_of_all_ranks``."""
        planned = self.step_packs(step)
        if self._dealt is None or self._dealt[0] is not planned:
            self._dealt = planned, self._deal(planned.samples)
        return self._dealt[1]

    def _deal(self, samples: IntArray) -> Packs:
        dealt = deal_padded(samples, self.lengths, self.limits, self.num_replicas * self.micro_batches)
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
    for index in range(len(tokens)):
        # The first sample of a run is its longest: all are padded to it.
        padded = tokens[first] * (index - first + 1)
        if index > first and (padded > most or units + vision[index] > most_vision):
            runs, first, units = runs + 1, index, 0
            bounds[runs] = index
        units += vision[index]
    bounds[runs + 1] = len(tokens)
    return runs + 1


@dataclass(frozen=True)
class PackItems:
    """The items of a pack, as its collator gets them; fillers are the last ones."""

    samples: tuple[int, ...]
    items: tuple[Any, ...]
    num_fillers: int = 0
    weight: float = 0.0  # of the pack


class PackedView:
    """A dataset that is read pack by pack: a DataLoader asks it for a whole ``Pack``, and hands on what was drawn."""

    def __init__(self, dataset: Sequence[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: int) -> Any:
        return self.dataset[sample]

    def __getitems__(self, pack: Pack) -> PackItems:
        """The items of a pack; a DataLoader calls this in place of one ``[sample]`` after the other."""
        samples = (*pack, *pack.fillers)
        return PackItems(samples, tuple(self.dataset[sample] for sample in samples), len(pack.fillers), pack.weight)


class PlannedLoads:
    """Refuses samples that are not as long as planned: plans are no better than lengths."""

    # With ``absorb``, the first such sample is warned of, and only what would let ranks wait for each other is refused.

    def __init__(self, lengths: SampleLengths, *, absorb: bool = False) -> None:
        self._lengths, self._absorb, self._warned = lengths, absorb, False

    def check(
        self,
        samples: Sequence[int],
        found: Sequence[tuple[int | None, ...]],
        vision_units: tuple[int, int, int] | None = None,
    ) -> None:
        """Compare the loads of a pack's samples with the plan, or ``vision_units`` of all of them together."""
        # Those are all vision units, the ones of videos, and sound units. A sample's own vision units may be None, as
        # where a padded batch has the images of all of its samples.
        lengths = self._lengths
        known = [each for each in (lengths.vision_units, lengths.llm_tokens, lengths.target_tokens) if each is not None]
        for sample, loads in zip(samples, found, strict=True):
            expected = tuple(int(column[sample]) for column in known)
            if any(own not in (None, other) for own, other in zip(loads, expected, strict=False)):
                self._note(f"sample {sample}", f"vision units, LLM tokens and target tokens, {expected}, got {loads}")
        columns = lengths.vision_units, lengths.video_units, lengths.sound_units
        planned_units, planned_videos, planned_sounds = (
            0 if column is None else int(column[list(samples)].sum()) for column in columns
        )
        units, of_videos, of_sounds = vision_units or (
            sum(in_full(loads)[column] or 0 for loads in found) for column in (0, 3, 4)
        )
        numbers = f"samples {', '.join(map(str, samples))}"
        first = "a sound" if lengths.vision_unit == WINDOWS else "an image"
        kinds = (
            (first, planned_units - planned_videos, units - of_videos),
            ("a video", planned_videos, of_videos),
            ("a sound", planned_sounds, of_sounds),
        )
        for kind, expected_units, own in kinds:
            if expected_units and not own:
                raise DataError(
                    f"{numbers} must have {kind} among them, as planned, got none; the other ranks would wait for this "
                    f"one's {'encoder' if kind == 'a sound' else 'ViT'}"
                )
        if vision_units is not None and units != planned_units:
            self._note(numbers, f"vision units together, {planned_units}, got {units}")

    def _note(self, name: str, difference: str) -> None:
        message = (
            f"{name} must have the planned {difference}; the dataset may augment at random or put another sample in "
            "the place of one"
        )
        if not self._absorb:
            raise DataError(
                f"{message}: then check_lengths=False in balance (absorb_other_lengths=True in balanced_loader) trains "
                "samples as they are; or the lengths are older than the data: then delete the folder that keeps them; "
                "or ranks hold different data"
            )
        if not self._warned:
            warn(f"{message}; trained as it is, and so will be all further ones", stacklevel=2)
            self._warned = True
