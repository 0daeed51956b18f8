"""Streams in the pipeline: from a ds_config and sources to a rank's loader, and what each stage gets of a pack.

The first stage of a replica draws, and hands the labels of its packs to the last one: so a source is read once, and
need not be the same when it is read again. Of tensor ranks the first one draws, and hands its packs to the others. All
ranks hear what all packs hold, and what fails.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from omnibal.cluster import Layout, PipelinePosition
from omnibal.config import OmnibalSection
from omnibal.data.epoch import Step
from omnibal.data.mixture import Mixture
from omnibal.engine.loader import Batch, Loader, PackReader
from omnibal.engine.resolve import ResolvedRun
from omnibal.engine.samples import SampleRules
from omnibal.errors import ConfigError, DataError
from omnibal.feeds.buffer import BufferedSample, StreamSettings
from omnibal.feeds.buffer_plan import buffer_of
from omnibal.feeds.sources import part_of
from omnibal.feeds.stream import VERSION, PlannedWindow, Position, StreamFeed, of_other_ranks, refuse_other_version
from omnibal.formats.collate import IGNORED, MropeRule
from omnibal.plan import Plan
from omnibal.ranks import gather, new_gloo_group
from omnibal.workspace import Workspace

DEALT: Final = ("num_ranks", "micro_batches", "buffer")
"""Settings by which samples are dealt out, and that a resumed run may have otherwise."""


class PipelineStreamFeed(StreamFeed):
    """The steps of one rank of a pipeline: the first rank of a replica draws, those of the last stage get labels.

    Sources are the same on all ranks, and divided over the replicas of the first stage here.
    """

    fills = False

    def __init__(
        self,
        sources: Mapping[str, Any],
        settings: StreamSettings,
        *,
        layout: Layout,
        place: PipelinePosition,
        reader: PackReader,
        rules: SampleRules,
    ) -> None:
        self._layout, self._place, self._reader, self._rules = layout, place, reader, rules
        self._group: dist.ProcessGroup | None = None
        self._counts, self._told_left_out = [*filter(None, (getattr(s, "left_out", None) for s in sources.values()))], 0
        self._device = get_accelerator().current_device()
        num_ranks, draws = layout.shape(0)[0], place.stage == 0 and place.tensor == 0
        super().__init__(sources, settings, rank=place.replica % num_ranks, num_ranks=num_ranks, draws=draws)

    def read(self, item: Any) -> BufferedSample:
        return checked_sample(item, self._rules, self._reader.pixel_dtype)

    def pack(self, samples: list[BufferedSample], *_: Any) -> Batch:
        return self._pinned(self._reader.collate([sample.held for sample in samples]))

    def gather(self, told: Any) -> list[Any]:
        return self._drawing_first(gather(told, group=self._group))

    def part(self, name: str, items: Any, rank: int, num_ranks: int) -> Any:
        return part_of(name, items, rank, num_ranks)

    def step(self) -> tuple[Step, list[Any]] | None:
        if not self.steps_left():
            raise ConfigError(f"omnibal.run.max_steps must be all steps of a run on streams, got {self.steps_done}")
        if self._group is None:  # of its own: it is used in a thread; made by all ranks at their first step
            self._group = new_gloo_group()
        found = super().step()
        if found is None or not self._counts:
            return found
        told, self._told_left_out = self._told_left_out, sum(each.count for each in self._counts)
        return replace(found[0], left_out=self._told_left_out - told), found[1]

    def state_dict(self) -> dict[str, Any]:
        """The positions of all replicas, the same on all ranks; all ranks together."""
        replicas = self._drawing_first(gather(vars(self.position)))[: self.num_replicas]
        return {
            "version": VERSION, "made_from": self.made_from, "steps_done": self.steps_done, "replicas": replicas,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; sources go on by their names, and a new one begins at its start."""
        refuse_other_version(state)
        before, positions = state["made_from"], [Position(**position) for position in state["replicas"]]
        if any(before.get(name) != self.made_from[name] for name in DEALT):
            position = of_other_ranks(positions, before, self.rank, self.num_replicas)
            before = before | {name: self.made_from[name] for name in DEALT}
        else:
            position = positions[self.rank]
        self.go_on(before, position, tells=dist.get_rank() == 0)
        self.steps_done = state["steps_done"]

    def _windows_of_run(self, begun: Position) -> Iterator[PlannedWindow]:
        # Memory is pinned for the current device, which each thread has its own of: a new one begins with the first.
        get_accelerator().set_device(self._device)
        return super()._windows_of_run(begun)

    def _pinned(self, batch: Batch) -> Batch:
        pins = self._reader.pin_memory
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if pins else batch

    def _drawing_first(self, told: list[Any]) -> list[Any]:
        """What all ranks told, by rank, in the order that `StreamFeed` knows ranks in: those that draw come first."""
        return [told[rank] for rank in sorted(range(len(told)), key=lambda rank: self._layout.position(rank).tensor)]

    def received(self, window: PlannedWindow) -> list[Batch]:
        """The packs of this rank in a window, which the rank that draws sends; to the last stage their labels alone."""
        layout, (stage, replica, tensor) = self._layout, self._place
        last, drawing, training = layout.num_stages - 1, layout.shape(0)[0], layout.num_replicas
        if 0 < stage < last:
            return window.batches
        # All are in the thread that plans, and come to the same windows in the same order.
        others = range(1, layout.num_tensor)
        if stage == 0 and tensor > 0:
            packs: list[Any] = [None]
            dist.recv_object_list(packs, layout.rank(0, replica), self._group)
            return [self._pinned(batch) for batch in packs[0]]
        # Of all packs of a window pack n is drawn by replica n mod drawing, as its pack n // drawing, and trained by
        # replica n mod training. One message for each window and pair of ranks: all packs, or the labels of the packs
        # of both, one behind the other.
        own = range(replica, window.loads.shape[1] * drawing, layout.shape(stage)[0])
        peers: dict[int, list[int]] = {}
        for number in own:
            peers.setdefault(number % (training if stage == 0 else drawing), []).append(number)
        if stage == 0:
            for other in others:
                dist.send_object_list([window.batches], layout.rank(0, replica, other), self._group)
            for peer, numbers in peers.items() if last else ():
                labels = torch.cat([window.batches[number // drawing]["labels"][0] for number in numbers])
                for other in (0, *others):
                    dist.send(labels, layout.rank(last, peer, other), self._group)
            return window.batches
        found: dict[int, Tensor] = {}
        for peer, numbers in peers.items():
            # The loads that all ranks heard say how long each pack's labels are; an empty pack has one token.
            tokens = [max(int(window.loads[peer, number // drawing, 1]), 1) for number in numbers]
            labels = torch.empty(sum(tokens), dtype=torch.int64)
            dist.recv(labels, layout.rank(0, peer), self._group)
            found |= zip(numbers, labels.split(tokens), strict=True)
        return [self._pinned({"labels": found[number][None]}) for number in own]


def stream_loader(
    workspace: Workspace, resolved: ResolvedRun, sources: Any, place: PipelinePosition, reader: PackReader
) -> tuple[Plan, Loader]:
    """The plan of a run on streams, and this rank's loader."""
    section = workspace.section
    num_steps, mixture = _checked(section)
    plan = workspace.resolve_plan(resolved.vlm.records, resolved.layout, None, resolved.partition)
    # Where the encoder has replicas of its own, these share the packs of a step.
    micro_batches = plan.micro_batches * resolved.layout.num_replicas // resolved.layout.shape(0)[0]
    settings = StreamSettings(
        limits=plan.limits,
        micro_batches=micro_batches,
        buffer=buffer_of(micro_batches),
        num_steps=num_steps,
        mixture=mixture,
        seed=section.packing.seed,
        oversized=section.packing.oversized,
    )
    feed = PipelineStreamFeed(
        sources if isinstance(sources, Mapping) else {"data": sources},
        settings,
        layout=resolved.layout,
        place=place,
        reader=reader,
        rules=SampleRules.of(resolved.vlm),
    )
    return plan, Loader(feed, reader)


def _checked(section: OmnibalSection) -> tuple[int, Mixture | None]:
    """The run's steps and its mixture, where the section can be that of a run on streams."""
    mixture, packing, steps = section.data.mixture, section.packing, section.run.max_steps
    if steps is None:
        raise ConfigError(
            "omnibal.run.max_steps must say how long to train on a stream, got none; without lengths() it has no epochs"
        )
    if mixture == "repeat_time":
        raise ConfigError("omnibal.data.mixture must be shares by source for streams, got 'repeat_time'")
    if section.data.ray is not None:
        raise ConfigError(
            f"omnibal.data.ray must be left out for a stream, which is read here, got {section.data.ray!r}"
        )
    if packing.method != "balanced":
        raise ConfigError(f"omnibal.packing.method must be 'balanced' for a stream, got {packing.method!r}")
    return steps, mixture


def checked_sample(item: Any, rules: SampleRules, dtype: torch.dtype) -> BufferedSample:
    """A sample that keeps the model's rules, as the buffer holds it: pixels in the dtype that the model computes in."""
    fields = item if isinstance(item, Mapping) else {}
    tiles = sum(_entries(fields.get(name)) for name in ("pixel_values", "pixel_values_videos"))
    tokens = _entries(fields.get("input_ids"))
    problem = rules.problem(item, tiles=tiles, tokens=tokens, decoded=True)
    if problem is not None:
        raise DataError(f"a sample must {problem}")
    item = rules.positions.joined(item) if isinstance(rules.positions, MropeRule) else item
    names = ("input_ids", "labels", "positions", *rules.image_integers)
    held = {name: item[name] for name in names if item.get(name) is not None}
    held["pixel_values"] = item["pixel_values"].to(dtype) if tiles else None
    return BufferedSample(held, (tiles, tokens, int((item["labels"][1:] != IGNORED).sum())))


def _entries(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else 0
