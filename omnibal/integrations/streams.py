"""A loader for sources without an index, which may never end: packs are planned in a buffer on every rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch

from omnibal.data.epoch import Step
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import Mixture, Oversized, Ranks
from omnibal.data.packs import KIND_NAMES, Loads, fillers_for, kinds_of
from omnibal.errors import DataError, end_in_one_line, integer, kind
from omnibal.feeds.buffer import BufferedSample, StreamSettings
from omnibal.feeds.feed import micro_batches_of
from omnibal.feeds.stream import StreamFeed
from omnibal.integrations.loops import TOKEN_WEIGHT, ItemCollator, item_loads
from omnibal.packs.apart import refuse_long_rows
from omnibal.packs.collator import Collator, PackCollator
from omnibal.packs.encoders import blank_samples
from omnibal.packs.loading import token_weight
from omnibal.packs.proof import check_packed, two_texts
from omnibal.ranks import gather, new_gloo_group, rank_and_size


class PackedStream(StreamFeed):
    """Yields batches of balanced packs from sources that are drawn one by one: the loader of ``balanced_stream``.

    Every rank draws. A pack without a kind of input that others have gets a blank sample of the model's, if it has
    some; the smallest one that the rank has drawn otherwise. Arguments are those of ``balanced_stream``.
    """

    last_step: Step
    """The step of the batch that was yielded last."""

    def __init__(
        self,
        sources: Any,
        collate: Collator,
        settings: StreamSettings,
        *,
        model: torch.nn.Module | None,
        measure: Callable[[Any], Loads] = item_loads,
        weigh_tokens: bool,
    ) -> None:
        kind("limits", settings.limits, PackLimits)
        integer("seed", settings.seed, 0)
        Ranks(1, settings.micro_batches)  # refuses what is no number of micro-batches
        self._collator: PackCollator | ItemCollator = ItemCollator(collate, measure)
        blanks: Sequence[Any] = ()
        if model is not None:
            self._collator, blanks = PackCollator.of(model, collate), blank_samples(model)
            refuse_long_rows(model, settings.limits)
        self._weigh_tokens, self._group = weigh_tokens, new_gloo_group()
        self._blanks = {kinds_of(sample.loads): sample for sample in map(self._measured, blanks)}
        self.fills = not blanks
        rank, num_ranks = rank_and_size()
        named = sources if isinstance(sources, Mapping) else {"data": sources}
        super().__init__(named, settings, rank=rank, num_ranks=num_ranks)

    @property
    def step_shares(self) -> Mapping[str, tuple[float, float]]:
        """For each source of a mixture, (share asked for, share held) of the step that was yielded last."""
        return self.last_step.shares

    @property
    def oversized(self) -> int:
        """Samples over a limit that all ranks met since the run began, up to the step that was yielded last."""
        return self.position.oversized

    def __iter__(self) -> Iterator[Any]:
        for step, batch in micro_batches_of(self):
            self.last_step = step
            weight = token_weight(step, self.num_replicas)
            yield batch | {TOKEN_WEIGHT: torch.tensor(weight)} if self._weigh_tokens else batch

    def read(self, item: Any) -> BufferedSample:
        return self._measured(self._collator.sample(item))

    def _measured(self, held: Any) -> BufferedSample:
        return BufferedSample(held, tuple(self._collator.loads(held)))

    def gather(self, told: Any) -> list[Any]:
        return gather(told, group=self._group)

    def pack(self, samples: list[BufferedSample], smallest: Mapping[int, BufferedSample], wanted: int) -> Any:
        """A pack, with fillers where it is empty, or lacks a kind of input that others have."""
        has, smallest = reduce(or_, (kinds_of(sample.loads) for sample in samples), 0), self._blanks or smallest
        if missing := wanted & ~reduce(or_, smallest, has):
            kind = next(name for bit, name in KIND_NAMES.items() if missing & bit)
            raise DataError(
                f"a rank must have drawn {kind} where others have, got none; mix sources so that all ranks do"
            )
        fillers = fillers_for(smallest, lambda sample: sample.loads[:2], has, wanted, is_empty=not samples)
        held = [*(sample.held for sample in samples), *(self._collator.without_targets(each.held) for each in fillers)]
        return self._collator.pack(held)


def balanced_stream(
    sources: Any,
    collate: Collator,
    limits: PackLimits,
    *,
    model: torch.nn.Module | None = None,
    measure: Callable[[Any], Loads] = item_loads,
    mixture: Any = None,
    buffer: int = 256,
    buffer_bytes: int | None = None,
    micro_batches: int = 1,
    seed: int = 0,
    oversized: Oversized = "alone",
    warn_seconds: float = 60,
    wait_seconds: float = 1800,
    weigh_tokens: bool = True,
) -> PackedStream:
    """A loader of this rank's packs from sources that are drawn one by one, and that may never end.

    Call it on all ranks, behind ``init_process_group``. A thread draws into a buffer, measures what it draws, and plans
    packs such that all ranks have equally much to do; each rank trains on what it drew. A rank whose source has ended
    runs fillers until all have. A pack without a kind of input (images, videos, sounds) that some rank has drawn runs
    the smallest one along, without targets: made up for Qwen's models that see videos or hear, else drawn by the rank.

    Args:
        sources: An iterable of items, or several by name. Each rank gives its own; only a source with a length that is
            read by index is the same on all ranks, and divided over them. A source that has ``state_dict`` and
            ``load_state_dict`` goes on where it stood; of any other, what was drawn is drawn again.
        collate: Of a list of items. With ``model`` it is called with single items, which are laid one after another.
        limits: The most a pack may hold.
        model: The model that trains, of a family that packs: two texts are packed to check it. None where ``collate``
            flattens or pads a batch itself.
        measure: Vision units, LLM tokens and target tokens of an item; read only if ``model`` is None.
        mixture: What share each source gets, as a ``Mixture`` takes it; sources are then iterated anew when they end.
        buffer: Samples that a rank plans at a time; with those that are being trained it holds at most twice as many.
            Where samples are so short that they do not fill a step, it grows until they do.
        buffer_bytes: The most bytes that they may take, likewise: a buffer does not grow beyond, and packs get emptier.
        micro_batches: Packs of each rank and step.
        seed: Decides which samples share packs; equal seeds and equal sources give equal packs.
        oversized: A sample that exceeds a limit on its own gets a pack of its own (``"alone"``), is left out
            (``"drop"``), or ends the run (``"error"``). The first one is named; ``loader.oversized`` counts.
        warn_seconds: After how long a source that is waited for is named, on all ranks.
        wait_seconds: After how long without a sample it ends the run, on all ranks.
        weigh_tokens: Whether batches hold what ``pack_loss`` needs.

    Raises:
        ConfigError: An argument or the model does not allow packs.
        DataError: While iterating, on all ranks alike: a source fails, is empty, or the same on two ranks.
    """
    end_in_one_line()
    settings = StreamSettings(
        limits=limits,
        micro_batches=micro_batches,
        buffer=buffer,
        buffer_bytes=buffer_bytes,
        mixture=None if mixture is None else Mixture.of(mixture),
        seed=seed,
        oversized=oversized,
        warn_seconds=warn_seconds,
        wait_seconds=wait_seconds,
    )
    loader = PackedStream(sources, collate, settings, model=model, measure=measure, weigh_tokens=weigh_tokens)
    if model is not None:
        check_packed(model, *two_texts(model.config))
    return loader
