"""A loader for sources without an index, which may never end: packs are planned in a buffer on every rank.

No sample leaves the rank that drew it. Ranks tell each other numbers, over gloo and in a thread, while the model works.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from omnibal.cost import IntArray, Load
from omnibal.data.checks import integer, kind, ranks
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.policies import Oversized
from omnibal.errors import DataError
from omnibal.feeds.ahead import ahead
from omnibal.feeds.draws import Draws, Sample
from omnibal.feeds.windows import (
    PER_PACK,
    Windows,
    beginning,
    go_on,
    shares_of,
)
from omnibal.integrations.loading import Loads
from omnibal.integrations.loops import TOKEN_WEIGHT, ItemCollator, item_loads
from omnibal.integrations.packing import Collator, PackCollator, arguments_of, check_packed, positions_of, two_texts
from omnibal.ranks import gather, new_gloo_group, place


class StreamLoader:
    """Yields batches of balanced packs from sources that are drawn one by one; made by ``balanced_stream``."""

    step_loads: IntArray
    """What the packs of the step hold that was yielded last, (ranks, micro-batches, PER_PACK)."""
    step_shares: Mapping[str, tuple[float, float]]
    """Of each source of a mixture, in the same step: the share that was asked for, and that of its packs."""
    oversized: int = 0
    """Samples over a limit that all ranks met since the run began, up to the step that was yielded last."""

    def __init__(
        self,
        sources: Mapping[str, Any],
        collator: PackCollator | ItemCollator,
        limits: PackLimits,
        *,
        buffer: int,
        buffer_bytes: int | None = None,
        mixture: Mixture | None = None,
        micro_batches: int = 1,
        seed: int = 0,
        oversized: Oversized = "alone",
        warn_seconds: float = 60,
        wait_seconds: float = 1800,
        weigh_tokens: bool = True,
    ) -> None:
        self._collator, self._limits = collator, kind("limits", limits, PackLimits)
        self._rank, self.num_replicas = place()
        self._micro_batches = ranks(self.num_replicas, micro_batches)[1]
        self._weigh_tokens = weigh_tokens
        draws = partial(
            Draws,
            sources,
            self._read,
            limits=limits,
            oversized=oversized,
            most_samples=buffer,
            most_bytes=buffer_bytes,
            mixture=mixture,
            rank=self._rank,
            num_ranks=self.num_replicas,
            seed=integer("seed", seed, 0),
        )
        self._mixture, names = mixture, draws().names  # refuses what is wrong with the arguments, too
        self._made_from: dict[str, Any] = {"sources": names, "buffer": buffer, "seed": seed}
        self._made_from |= {"limits": [limits.vision_units, limits.llm_tokens], "oversized": oversized}
        self._made_from["mixture"] = None if mixture is None else mixture.record(names)
        self._made_from |= {"num_ranks": self.num_replicas, "micro_batches": self._micro_batches}
        self._windows = Windows(
            draws,
            limits,
            self._batch,
            partial(gather, group=new_gloo_group()),
            rank=self._rank,
            micro_batches=self._micro_batches,
            seed=seed,
            oversized=oversized,
            warn_seconds=warn_seconds,
            wait_seconds=wait_seconds,
        )
        self._position = beginning(0)

    def __iter__(self) -> Iterator[Any]:
        begun, size = self._position, self._micro_batches
        for window in ahead(partial(self._windows.following, begun), 1):
            done = begun["steps_done"] if window.position["window"] == begun["window"] else 0
            for number in range(done * size, len(window.batches)):
                step, micro_batch = divmod(number, size)
                of_step = window.loads[:, step * size : (step + 1) * size]
                self.step_loads, given = of_step[..., :PER_PACK], of_step[..., PER_PACK:].sum(axis=(0, 1))
                self.step_shares = shares_of(self._mixture, window.position["first_step"] + step, given)
                self.oversized = window.oversized
                if micro_batch == size - 1:  # who saves after the last one's backward pass has trained it
                    self._position = window.position_behind(step + 1)
                batch, window.batches[number] = window.batches[number], None
                targets = int(self.step_loads[..., 3].sum())
                weight = {TOKEN_WEIGHT: torch.tensor(self.num_replicas / max(targets, 1))} if self._weigh_tokens else {}
                yield batch | weight if weight else batch
        self._position = beginning(begun["epoch"] + 1, self.oversized)

    def step_load(self) -> Load:
        """What the packs of the step hold that was yielded last, in arrays of shape (ranks, micro-batches)."""
        return Load(*self.step_loads[..., :3].transpose(2, 0, 1))

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, between two steps: what goes on from here, on as many ranks."""
        return {"made_from": self._made_from, **self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where this rank's state was taken.

        Sources go on by their names: a new one begins at its start, what was drawn of one that is gone is left out.

        Raises:
            ConfigError: It was taken on another number of ranks, or of other packs.
        """
        position = {name: value for name, value in state.items() if name != "made_from"}
        self._position = go_on(self._made_from, state["made_from"], position, tells=self._rank == 0)
        self.oversized = self._position["oversized"]

    def _read(self, item: Any) -> Sample:
        held = self._collator.sample(item)
        return Sample(held, self._collator.loads(held))

    def _batch(self, samples: list[Sample], filler: Sample | None, wants_image: bool) -> Any:
        """A pack, with a filler where it is empty, or lacks an image that others have."""
        held = [sample.held for sample in samples]
        lacks_image = wants_image and not any(sample.loads[0] for sample in samples)
        assert filler is not None, "some sample was drawn"
        if lacks_image and not filler.loads[0]:
            raise DataError(
                "a rank must have drawn an image where others have, got texts alone; mix sources so that all ranks do"
            )
        if lacks_image or not samples:
            held.append(self._collator.without_targets(filler.held))
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
) -> StreamLoader:
    """A loader of this rank's packs from sources that are drawn one by one, and that may never end.

    Call it on all ranks, behind ``init_process_group``. A thread draws into a buffer, measures what it draws, and plans
    packs such that all ranks have equally much to do; each rank trains on what it drew. A rank whose source has ended
    runs fillers until all have. A pack without an image gets one of another sample without its targets.

    Args:
        sources: An iterable of items, or several by name. Each rank gives its own; only a source with a length that is
            read by index is the same on all ranks, and divided over them. A source that has ``state_dict`` and
            ``load_state_dict`` goes on where it stood; of any other, what was drawn is drawn again.
        collate: Of a list of items. With ``model`` it is called with single items, which are laid one after another.
        limits: The most a pack may hold.
        model: As of ``balanced_loader``; two texts are packed to check it.
        measure: Vision units, LLM tokens and target tokens of an item, for ``collate`` without ``model``.
        mixture: What share each source gets, as a ``Mixture`` takes it; sources are then iterated anew when they end.
        buffer: Samples that a rank plans at a time. With those that are being trained it holds at most twice as many.
            Where samples are so short that they do not fill a step, it grows until they do.
        buffer_bytes: The most bytes that they may take, likewise: a buffer does not grow beyond, and packs get emptier.
        micro_batches: Packs of each rank and step.
        seed: The same seed and sources give the same packs.
        oversized: What becomes of a sample that exceeds a limit on its own: it gets a pack of its own (``"alone"``), is
            left out (``"drop"``), or ends the run (``"error"``). The first one is named; ``loader.oversized`` counts.
        warn_seconds: After how long a source that is waited for is named, on all ranks.
        wait_seconds: After how long without a sample it ends the run, on all ranks.
        weigh_tokens: Whether batches hold what ``pack_loss`` needs.

    Raises:
        ConfigError: An argument or the model does not allow packs.
        DataError: While iterating, on all ranks alike: a source fails, is empty, or the same on two ranks.
    """
    collator: PackCollator | ItemCollator = ItemCollator(collate, measure)
    if model is not None:
        collator = PackCollator(collate, positions_of(model.config), arguments=arguments_of(model))
        check_packed(model, *two_texts(model.config))
    return StreamLoader(
        sources if isinstance(sources, Mapping) else {"data": sources},
        collator,
        limits,
        buffer=buffer,
        buffer_bytes=buffer_bytes,
        mixture=None if mixture is None else Mixture.of(mixture),
        micro_batches=micro_batches,
        seed=seed,
        oversized=oversized,
        warn_seconds=warn_seconds,
        wait_seconds=wait_seconds,
        weigh_tokens=weigh_tokens,
    )
