"""The packs of sources that are drawn one by one, as each stage of a pipeline needs them.

The first stage of a replica draws, and hands the labels of its packs to the last one: so a source is read once, and
need not be the same when it is read again. All ranks hear what all packs hold, and what fails.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnibal.cluster import Layout, PipelinePosition
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.mixture import Mixture
from omnibal.data.policies import Oversized
from omnibal.engine.distributed import set_device
from omnibal.engine.loader import Batch, PackLoader, Step, VlmDataset, step_in_words
from omnibal.errors import ConfigError
from omnibal.feeds.ahead import ahead
from omnibal.feeds.buffer import buffer_of
from omnibal.feeds.draws import Draws, Sample
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.feeds.sources import part_of
from omnibal.feeds.windows import (
    PER_PACK,
    Window,
    Windows,
    beginning,
    go_on,
    shares_of,
)
from omnibal.ranks import gather, new_gloo_group

Collate = Callable[[list[dict[str, Tensor]]], Batch]
MakeLoader = Callable[[VlmDataset, BalancedBatchSampler], PackLoader]


class StreamLoader:
    """The packs of one rank, step after step, to the run's last step: behind the end of a source it is read again.

    Args:
        sources: By name; each is the same on all ranks, and divided over the replicas.
        mixture: What share each one gets; none for a single source.
        limits: The most a pack may hold.
        layout: How the run lies on its ranks.
        place: Where this rank stands in the layout.
        micro_batches: Packs of each replica and step.
        num_steps: Of the whole run: nothing is drawn beyond.
        seed: What chance decides by.
        oversized: What becomes of a sample that exceeds a limit on its own.
        read: Checks an item; gives what the buffer holds.
        collate: Makes a pack of samples.
        make_loader: A loader of held-out samples for this rank.
        pin_memory: Whether packs are copied to a GPU.

    Raises:
        ConfigError: The mixture does not name the sources, or one cannot be divided.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        mixture: Mixture | None,
        limits: PackLimits,
        *,
        layout: Layout,
        place: PipelinePosition,
        micro_batches: int,
        num_steps: int,
        seed: int,
        oversized: Oversized,
        read: Callable[[Any], Sample],
        collate: Collate,
        make_loader: MakeLoader,
        pin_memory: bool,
    ) -> None:
        self.micro_batches, self._limits, self._mixture = micro_batches, limits, mixture
        self._layout, self._place = layout, place
        self._num_steps, self._collate, self._pins, self._make_loader = num_steps, collate, pin_memory, make_loader
        replica, num_replicas = place.replica, layout.num_replicas
        draws = partial(
            Draws,
            {name: part_of(name, items, replica, num_replicas) for name, items in sources.items()},
            read,
            limits=limits,
            oversized=oversized,
            most_samples=buffer_of(micro_batches),
            mixture=mixture,
            rank=replica,
            num_ranks=num_replicas,
            seed=seed,
        )
        names = draws().names  # refuses what is wrong with the arguments
        self._made_from: dict[str, Any] = {
            "sources": names,
            "mixture": None if mixture is None else mixture.record(names),
            "limits": [limits.vision_units, limits.llm_tokens],
            "num_replicas": num_replicas,
            "micro_batches": micro_batches,
            "seed": seed,
            "oversized": oversized,
        }
        self._windows = Windows(
            draws if place.stage == 0 else None,
            limits,
            self._pack,
            lambda told: gather(told, group=self._group),
            rank=replica,
            micro_batches=micro_batches,
            seed=seed,
            oversized=oversized,
            fills=False,
        )
        self._group: dist.ProcessGroup | None = None
        self._position, self._steps_done = beginning(0), 0
        self._iterator: Iterator[tuple[Step, list[Batch], dict[str, Any]]] | None = None

    def next_step(self) -> tuple[Step, list[Batch]]:
        """The next step, and this rank's packs of it: on the last stage labels alone, on those between nothing.

        Raises:
            DataError: On all ranks alike: a source fails, is empty, or stalls for too long.
            ConfigError: The run has ended.
        """
        if self._steps_done == self._num_steps:
            raise ConfigError(f"omnibal.run.max_steps must be all steps of a run on streams, got {self._num_steps}")
        if self._iterator is None:
            if self._group is None:  # of its own: it is used in a thread
                self._group = new_gloo_group()
            self._iterator = self._following()
        step, batches, self._position = next(self._iterator)
        self._steps_done += 1
        return step, batches

    def __iter__(self) -> Iterator[tuple[Step, list[Batch]]]:
        """Steps to the end of the run."""
        while self._steps_done < self._num_steps:
            yield self.next_step()

    def steps_left(self, _epochs: int) -> int:
        """Steps to the end of the run."""
        return self._num_steps - self._steps_done

    def summary(self) -> dict[str, str]:
        """What is trained on, in words."""
        names = ", ".join(self._made_from["sources"])
        return {
            "samples": f"drawn from {names}; {buffer_of(self.micro_batches)} of each replica planned at a time",
            "a step": step_in_words(self._layout.num_replicas, self.micro_batches),
        }

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step that ``next_step`` gave, on all replicas; all ranks together."""
        replicas = gather(self._position)[: self._layout.num_replicas]
        return {"made_from": self._made_from, "steps_done": self._steps_done, "replicas": replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; sources go on by their names, and a new one begins at its start.

        Raises:
            ConfigError: It is one in samples with an index, or of other packs.
        """
        if "made_from" not in state:
            raise ConfigError("data of the checkpoint must be streams as they are here, got samples with an index")
        position, is_first = state["replicas"][self._place.replica], dist.get_rank() == 0
        self._position = go_on(self._made_from, state["made_from"], position, tells=is_first)
        self._steps_done, self._iterator = state["steps_done"], None

    def over(self, dataset: VlmDataset, lengths: SampleLengths) -> PackLoader:
        """As of ``PackLoader``."""
        sampler = BalancedBatchSampler(
            lengths,
            self._limits,
            num_replicas=self._layout.num_replicas,
            rank=self._place.replica,
            micro_batches=self.micro_batches,
        )
        return self._make_loader(dataset, sampler)

    def _following(self) -> Iterator[tuple[Step, list[Batch], dict[str, Any]]]:
        """Steps from here on, and the position behind each."""
        begun, size = self._position, self.micro_batches
        first = self._steps_done - begun["steps_done"]
        for window in ahead(partial(self._all_windows, begun, first), 1):
            is_first = (window.position["epoch"], window.position["window"]) == (begun["epoch"], begun["window"])
            for index in range(begun["steps_done"] if is_first else 0, window.loads.shape[1] // size):
                part = slice(index * size, (index + 1) * size)
                batches, window.batches[part] = window.batches[part], [None] * len(window.batches[part])
                yield self._step(window, index), batches, window.position_behind(index + 1)

    def _step(self, window: Window, index: int) -> Step:
        number = window.position["first_step"] + index
        loads = window.loads[:, index * self.micro_batches : (index + 1) * self.micro_batches]
        return Step(
            window.position["epoch"],
            number,
            int(loads[..., PER_PACK - 1].sum()),
            Load(loads[..., 0], loads[..., 1]),
            shares_of(self._mixture, number, loads[..., PER_PACK:].sum(axis=(0, 1))),
            {self._made_from["oversized"]: window.oversized},
        )

    def _all_windows(self, begun: Mapping[str, Any], steps: int) -> Iterator[Window]:
        """What the thread makes: one pass over the sources after another, to the window of the run's last step."""
        set_device()  # where memory is pinned; each thread has its own
        while True:
            for window in self._windows.following(begun):
                yield window._replace(batches=self._handed_over(window))
                steps += window.loads.shape[1] // self.micro_batches
                if steps >= self._num_steps:
                    return
            begun = beginning(begun["epoch"] + 1, window.oversized)

    def _pack(self, samples: list[Sample], _filler: Any, _wants_image: bool) -> Batch:
        return self._pinned(self._collate([sample.held for sample in samples]))

    def _pinned(self, batch: Batch) -> Batch:
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self._pins else batch

    def _handed_over(self, window: Window) -> list[Batch]:
        """This rank's packs of a window; the last stage gets their labels from the first one."""
        stage, last, replica = self._place.stage, self._layout.num_stages - 1, self._place.replica
        if last == 0 or 0 < stage < last:
            return window.batches
        if stage == 0:
            labels = torch.cat([batch["labels"][0] for batch in window.batches])
            dist.send(labels, self._layout.rank(last, replica), self._group)
            return window.batches
        tokens = window.loads[replica, :, 1].clip(min=1).tolist()  # an empty pack has one
        labels = torch.empty(sum(tokens), dtype=torch.int64)
        dist.recv(labels, self._layout.rank(0, replica), self._group)
        return [self._pinned({"labels": part[None]}) for part in labels.split(tokens)]
