"""A loader for sources without an index, which may never end: packs are planned in a buffer on every rank.

No sample leaves the rank that drew it. Ranks tell each other numbers, over gloo and in a thread, while the model works.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from omnibal.cost import IntArray, Load
from omnibal.data.checks import integer, kind, ranks
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.streaming.ahead import ahead
from omnibal.data.streaming.buffer import Asked, agree, asked, plan_buffer
from omnibal.data.streaming.draws import Draws, Sample
from omnibal.errors import ConfigError, DataError, said
from omnibal.integrations.agreement import place, told_by_all
from omnibal.integrations.loading import Loads
from omnibal.integrations.loops import TOKEN_WEIGHT, ItemCollator, item_loads
from omnibal.integrations.packing import Collator, PackCollator, check_packed, positions_of, two_texts

FIRST_SAMPLES: Final = 16
"""By which ranks notice that they draw the same."""
PER_PACK: Final = 5
"""Numbers about a pack: vision units, LLM tokens, their squares, target tokens, samples."""


class _Waiting(NamedTuple):
    """What a rank tells whose buffer is not full yet."""

    source: str
    idle_seconds: float


class _Full(NamedTuple):
    """What a rank tells of its full buffer."""

    asked: Asked
    has_image: bool
    """Whether it has drawn one, now or before: then all packs of all ranks have one from now on."""
    first: str
    """Of the first window: its first samples in short."""


class _Window(NamedTuple):
    """Steps that were planned together."""

    position: Mapping[str, Any]
    """Where the loader stood before it."""
    batches: list[Any]
    loads: IntArray
    """Of all ranks' packs, (ranks, packs, PER_PACK), fillers aside; and what each source has given."""


class StreamLoader:
    """Yields batches of balanced packs from sources that are drawn one by one; made by ``balanced_stream``."""

    step_loads: IntArray
    """What the packs of the step hold that was yielded last, (ranks, micro-batches, PER_PACK)."""
    step_shares: Mapping[str, tuple[float, float]]
    """Of each source of a mixture, in the same step: the share that was asked for, and that of its packs."""

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
        warn_seconds: float = 60,
        wait_seconds: float = 1800,
        weigh_tokens: bool = True,
    ) -> None:
        self._collator, self._limits = collator, kind("limits", limits, PackLimits)
        self._rank, self._num_ranks = place()
        self._micro_batches, self._seed = ranks(self._num_ranks, micro_batches)[1], integer("seed", seed, 0)
        if not 0 < warn_seconds <= wait_seconds:
            raise ConfigError(f"warn_seconds must lie between 0 and {wait_seconds}, got {warn_seconds}")
        self._warn_seconds, self._wait_seconds = warn_seconds, wait_seconds
        self._weigh_tokens = weigh_tokens
        self._draws = partial(
            Draws,
            sources,
            self._read,
            most_samples=buffer,
            most_bytes=buffer_bytes,
            mixture=mixture,
            rank=self._rank,
            num_ranks=self._num_ranks,
            seed=seed,
        )
        self._mixture, names = mixture, self._draws().names  # refuses what is wrong with the arguments, too
        self._recipe: dict[str, Any] = {"sources": names, "buffer": buffer, "seed": seed}
        self._recipe |= {"limits": [limits.vision_units, limits.llm_tokens]}
        self._recipe["mixture"] = None if mixture is None else mixture.record(names)
        self._recipe |= {"num_ranks": self._num_ranks, "micro_batches": self._micro_batches}
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._position = _beginning(0)

    def __iter__(self) -> Iterator[Any]:
        begun, size = self._position, self._micro_batches
        for window in ahead(partial(self._windows, begun), 1):
            done = begun["steps_done"] if window.position["window"] == begun["window"] else 0
            for number in range(done * size, len(window.batches)):
                step, micro_batch = divmod(number, size)
                of_step = window.loads[:, step * size : (step + 1) * size]
                self.step_loads, given = of_step[..., :PER_PACK], of_step[..., PER_PACK:].sum(axis=(0, 1))
                self.step_shares = self._shares_of(window.position["first_step"] + step, given)
                if micro_batch == size - 1:  # who saves after the last one's backward pass has trained it
                    self._position = {**window.position, "steps_done": step + 1}
                batch, window.batches[number] = window.batches[number], None
                targets = int(self.step_loads[..., 3].sum())
                weight = {TOKEN_WEIGHT: torch.tensor(self._num_ranks / max(targets, 1))} if self._weigh_tokens else {}
                yield batch | weight if weight else batch
        self._position = _beginning(begun["epoch"] + 1)

    def step_load(self) -> Load:
        """What the packs of the step hold that was yielded last, in arrays of shape (ranks, micro-batches)."""
        return Load(*self.step_loads[..., :3].transpose(2, 0, 1))

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, between two steps: what goes on from here, on as many ranks."""
        return {"recipe": self._recipe, **self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where this rank's state was taken.

        Raises:
            ConfigError: It was taken on another number of ranks, or of other packs.
        """
        for name, value in self._recipe.items():
            if state["recipe"][name] != value:
                raise ConfigError(
                    f"{name} must be that of the state, {state['recipe'][name]}, got {value}; "
                    "every rank goes on in its own sources and buffer"
                )
        self._position = {name: value for name, value in state.items() if name != "recipe"}
        stood = [] if state["draws"] is None else state["draws"]["from"]["sources"]
        names = self._recipe["sources"]
        again = {name: at["drawn"] for name, at in zip(names, stood, strict=False) if at["own"] is None and at["drawn"]}
        if again and self._rank == 0:
            told = ", ".join(f"{count:,} of {name!r}" for name, count in again.items())
            warnings.warn(
                f"sources without state_dict are read again from the start of their pass: {told}", stacklevel=2
            )

    def _shares_of(self, step: int, given: IntArray) -> Mapping[str, tuple[float, float]]:
        if self._mixture is None:
            return {}
        asked, held = self._mixture.shares_at(step + 0.5).tolist(), (given / max(given.sum(), 1)).tolist()
        return dict(zip(self._mixture.sources, zip(asked, held, strict=True), strict=True))

    def _read(self, item: Any) -> Sample:
        held = self._collator.sample(item)
        return Sample(held, self._collator.loads(held))

    def _windows(self, begun: Mapping[str, Any]) -> Iterator[_Window]:
        """What the thread makes."""
        draws, filler = self._draws(first_pass=begun["epoch"]), begun["filler"]
        if begun["draws"] is not None:
            draws.load_state_dict(begun["draws"])
        number, step = begun["window"], begun["first_step"]
        while True:
            state = draws.state_dict()
            kept = None if any(sample.loads[0] for sample in draws.samples.values()) else filler
            position = {**begun, "window": number, "first_step": step, "draws": state, "filler": kept, "steps_done": 0}
            of_ranks = self._filled(draws, step, filler, is_first=number == 0)
            if all(rank.asked.ended and not rank.asked.packs for rank in of_ranks):
                return
            filler = _filler(draws.samples, filler)
            aim = agree([rank.asked for rank in of_ranks], self._micro_batches)
            told: Any
            try:
                seed = [self._seed, begun["epoch"], number, self._rank]
                packs = plan_buffer(draws.lengths(), aim, self._limits, waited=len(state["held"]), seed=seed)
                keys = np.array([*draws.samples], dtype=np.int64)
                has_image = any(rank.has_image for rank in of_ranks)
                taken = [draws.take(keys[pack].tolist()) for pack in packs]
                made = [self._batch(samples, filler, has_image) for samples in taken]
                numbers = [(*loads, *draws.given(samples)) for (_, loads), samples in zip(made, taken, strict=True)]
                told = np.array(numbers, dtype=np.int64)
            except Exception as error:  # the other ranks wait for an answer
                told = said(error)
            loads = np.stack(told_by_all(told, self._group))
            yield _Window(position, [batch for batch, _ in made], loads)
            number, step = number + 1, step + aim.num_packs // self._micro_batches

    def _batch(self, samples: list[Sample], filler: Sample, wants_image: bool) -> tuple[Any, tuple[int, ...]]:
        """A pack, with a filler where it is empty, or lacks an image that others have; and the numbers about it."""
        loads = np.array([sample.loads for sample in samples], dtype=np.int64).reshape(-1, 3)
        held = [sample.held for sample in samples]
        lacks_image = wants_image and not loads[:, 0].any()
        if lacks_image and not filler.loads[0]:
            raise DataError(
                "a rank must have drawn an image where others have, got texts alone; mix sources so that all ranks do"
            )
        if lacks_image or not samples:
            held.append(self._collator.without_targets(filler.held))
        vision, tokens, targets = loads.sum(axis=0)
        return self._collator.pack(held), (vision, tokens, (loads[:, 1] ** 2).sum(), targets, len(samples))

    def _filled(self, draws: Draws, step: int, filler: Sample | None, *, is_first: bool) -> list[_Full]:
        """Fill all ranks' buffers; whoever is waited for is named on all of them, and not waited for without end."""
        failures: list[str] = []

        def fill() -> None:
            try:
                draws.fill(step)
            except Exception as error:
                failures.append(said(error))

        thread = threading.Thread(target=fill, daemon=True, name="omnibal-draws")
        thread.start()
        heard, since = draws.heard, time.monotonic()
        while True:
            thread.join(self._warn_seconds)
            told: Any
            if thread.is_alive():
                if draws.heard != heard:
                    heard, since = draws.heard, time.monotonic()
                told = _Waiting(draws.drawing_from, time.monotonic() - since)
            else:
                told = failures[0] if failures else self._full(draws, filler, is_first)
            of_ranks = told_by_all(told, self._group)
            waiting = {rank: what for rank, what in enumerate(of_ranks) if isinstance(what, _Waiting)}
            if not waiting:
                _refuse_same(of_ranks)
                return of_ranks
            self._name(waiting)

    def _full(self, draws: Draws, filler: Sample | None, is_first: bool) -> _Full | str:
        try:
            samples = draws.samples.values()
            has_image = any(sample.loads[0] for sample in (*samples, filler) if sample is not None)
            first = [
                (sample.loads, _ids(sample.held)) for sample, _ in zip(samples, range(FIRST_SAMPLES), strict=False)
            ]
            counted = asked(draws.lengths(), self._limits, ended=draws.ended)
            return _Full(counted, has_image, repr(first) if is_first else "")
        except Exception as error:  # such as lengths that are none
            return said(error)

    def _name(self, waiting: Mapping[int, _Waiting]) -> None:
        for rank, (source, idle) in waiting.items():
            if idle >= self._wait_seconds:
                raise DataError(f"source {source!r} must bring samples, got none for {idle:.0f} s on rank {rank}")
        told = [f"source {source!r} of rank {rank}, idle for {idle:.0f} s" for rank, (source, idle) in waiting.items()]
        warnings.warn(f"all ranks wait for {'; '.join(told)}", stacklevel=2)


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
        buffer_bytes: The most bytes that they may take, likewise.
        micro_batches: Packs of each rank and step.
        seed: The same seed and sources give the same packs.
        warn_seconds: After how long a source that is waited for is named, on all ranks.
        wait_seconds: After how long without a sample it ends the run, on all ranks.
        weigh_tokens: Whether batches hold what ``pack_loss`` needs.

    Raises:
        ConfigError: An argument or the model does not allow packs.
        DataError: While iterating, on all ranks alike: a source fails, is empty, or the same on two ranks.
    """
    collator: PackCollator | ItemCollator = ItemCollator(collate, measure)
    if model is not None:
        collator = PackCollator(collate, positions_of(model.config))
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
        warn_seconds=warn_seconds,
        wait_seconds=wait_seconds,
        weigh_tokens=weigh_tokens,
    )


def _beginning(epoch: int) -> dict[str, Any]:
    return {"epoch": epoch, "window": 0, "first_step": 0, "steps_done": 0, "draws": None, "filler": None}


def _filler(samples: Mapping[int, Sample], before: Any) -> Any:
    """The smallest sample with an image that is at hand; else the filler before, or the smallest text."""
    with_image = [sample for sample in samples.values() if sample.loads[0]]
    if with_image or before is None:
        return min(with_image or samples.values(), key=lambda sample: sample.loads, default=None)
    return before


def _refuse_same(of_ranks: list[_Full]) -> None:
    """Refuse ranks that draw the same samples: each would be trained several times."""
    seen: dict[str, int] = {}
    for rank, (_, _, first) in enumerate(of_ranks):
        if len(first) > len("[]") and first in seen:
            raise DataError(
                f"ranks must draw samples of their own, got the same first ones on ranks {seen[first]} and {rank}; "
                "divide the source over the ranks"
            )
        seen[first] = rank


def _ids(held: Any) -> list[int]:
    return np.asarray(held["input_ids"]).ravel().tolist() if isinstance(held, Mapping) and "input_ids" in held else []
