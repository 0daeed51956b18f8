"""Loader: a feed's steps as one rank of the pipeline trains on them; how all ranks read a step, and a run's loader."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from omnibal.cluster import Layout, PipelinePosition
from omnibal.data.epoch import Step
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import PackingOptions
from omnibal.data.source_draws import typical_lengths
from omnibal.engine.reading import LEFT_OUT, Batch, PackReader, View, VlmDataset, cores_of_process, left_out_of
from omnibal.engine.resolve import ResolvedRun
from omnibal.engine.samples import CheckedSamples, PipelineStreamFeed, SampleRules, checked_lengths
from omnibal.errors import ConfigError, DataError, OmnibalError, message_alone
from omnibal.feeds.buffer import StreamSettings
from omnibal.feeds.buffer_plan import buffer_of
from omnibal.feeds.feed import EpochFeed, Share
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.feeds.stream import StreamFeed
from omnibal.formats.collate import IGNORED
from omnibal.formats.conversations import ConversationDataset
from omnibal.plan import Plan
from omnibal.ranks import check_shared, gather, rank_zero_first, run_on_all_ranks
from omnibal.ranks.watchdog import WORK
from omnibal.workspace import Workspace

Steps = Iterator[tuple[Step, list[Batch]]]  # what a Loader iterates over

LOG: Final = logging.getLogger(__name__)
COUNTED: Final = 4  # numbers that all ranks add up before a step, beside those of columns and of ranks
MEASURES: Final = "measures the samples"  # what rank 0 does while the others wait


class Loader:
    """The packs of one rank, step after step, from a feed; ``initialize`` makes it.

    ``left_out`` are samples that could not be read so far, and why; the same on all ranks.
    """

    def __init__(self, feed: EpochFeed | StreamFeed, reader: PackReader, dataset: VlmDataset | None = None) -> None:
        self.feed, self._reader, self._dataset = feed, reader, dataset
        self.micro_batches = feed.micro_batches
        self.left_out: dict[int, str] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the next step's epoch; the same in all under ``"balanced"``. Streams have no epochs."""
        if not isinstance(self.feed, EpochFeed):
            raise ConfigError("steps_per_epoch must be asked of samples with lengths(), got a stream; it has no epochs")
        return self.feed.steps_per_epoch

    def __len__(self) -> int:
        if not isinstance(self.feed, EpochFeed):  # list() and tqdm() take a TypeError for a length that is not known
            raise TypeError("a loader of a stream has no length")
        return self.steps_per_epoch

    def steps_left(self, epochs: int) -> int:
        """Steps from here to the end of epoch ``epochs - 1``, or of the run where there are no epochs."""
        return self.feed.steps_left(epochs)

    def __iter__(self) -> Steps:
        """Steps to the end of the epoch, or of a run on streams, as ``next_step`` gives them.

        Each is taken from what the engine trains next, unless it is the engine that gets the iterator:
        ``engine.train_batch(steps)``.
        """
        for _ in range(self.feed.steps_left()):
            yield self.next_step()

    def next_step(self) -> tuple[Step, list[Batch]]:
        """The next step, and this rank's packs of it (of a stream, on the last stage, labels); all ranks together."""
        try:
            found = self.feed.step()
        except OmnibalError as error:  # before what a worker says, torch puts its traceback
            raise type(error)(message_alone(error)) from error
        assert found is not None, "feeds of the engine do not end"
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last step that ``next_step`` gave, whatever was read ahead; all ranks together."""
        return self.feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.feed.load_state_dict(state)

    def samples_of(self, step: Step, share: Share, micro_batch: int) -> list[int]:
        """The samples of a micro-batch of a step of this epoch, as a share reads them; of a stream, no indices."""
        if not isinstance(self.feed, EpochFeed) or step.epoch != self.feed.sampler.epoch:
            return []
        packs = share.packs(self.feed.sampler, step.index)
        return packs[micro_batch] if micro_batch < len(packs) else []

    def over(self, dataset: VlmDataset, sampler: BalancedBatchSampler) -> "Loader":
        """A loader of the packs that another sampler makes of other samples, read alike, for evaluation."""
        return Loader(self._reader.feed(dataset, sampler), self._reader, dataset)

    def mended(self, step: Step, batches: Sequence[Batch], unread: Mapping[int, str]) -> list[Batch]:
        """This rank's packs of the last step without all samples that some rank could not read."""
        assert isinstance(self.feed, EpochFeed), "the samples of a stream are read once"
        if not batches:
            return []
        assert self._dataset is not None, "a loader of samples with an index has them"
        mended = []
        for pack, batch in zip(self.feed.own_packs(step), batches, strict=True):
            stays = [sample for sample in pack if sample not in unread]
            # A pack is read again where another rank could not read what this one could: a file that was just written.
            is_mended = len(stays) + len(left_out_of(batch)) == len(pack)
            mended.append(batch if is_mended else self._reader.read(self._dataset, stays))
        return mended

    def note_left_out(self, step: Step, unread: Mapping[int, str]) -> Step:
        """The step without samples that some rank could not read; rank 0 names those that are new."""
        assert isinstance(self.feed, EpochFeed), "the samples of a stream are read once"
        for sample, reason in unread.items():
            if sample not in self.left_out and dist.get_rank() == 0:
                LOG.warning("A sample is left out: sample %d, %s", sample, reason)
        self.left_out |= unread
        left = self.feed.without(step, unread)
        if not left.num_samples:
            first, reason = next(iter(unread.items()))
            raise DataError(
                f"a step must have a sample that can be read, got none of {step.num_samples}: sample {first}, {reason}"
            )
        return left


def read_step(
    loader: Loader, steps: Steps | None, *, layout: Layout, rank: int, device: torch.device, where: str
) -> tuple[Step, list[Batch], int, float]:
    """Read a step whole before it starts; all ranks call this together.

    ``steps`` is ``iter(loader)``, where the step is to come from that. Returns this rank's packs, too, the target
    tokens of all ranks' packs, and the seconds for which the slowest rank waited for its packs.
    """
    # A collective between the schedule's sends and receives would deadlock, and a rank that cannot read its samples
    # must stop the others before they wait for it. So all ranks add up, in one all-reduce before the step, what
    # `_counted` tells of each. If one of them had to leave out samples, all hear which, and read their packs without
    # them: then they meet once more.
    started = perf_counter()
    failure: Exception | None = None
    batches: list[Batch] = []
    WORK.at("reading of its packs")
    try:
        step, batches = loader.next_step() if steps is None else _next_of(steps)
    except StopIteration:
        failure = ConfigError("data_iter must have a step left, got its end; take iter(loader) for another epoch")
    except Exception as error:  # any failure must reach the other ranks
        failure = error
    seconds, unread = perf_counter() - started, dict[int, str]()
    while True:
        found = {sample: why for batch in batches for sample, why in left_out_of(batch).items() if sample not in unread}
        counts = _counted(batches, layout, rank, seconds)
        counts[1], counts[2] = failure is not None, len(found)
        counts[3] = 0 if failure is not None else step.left_out
        counts = counts.to(device)
        WORK.at("meeting of all ranks before the step", waits=True)
        dist.all_reduce(counts)
        targets, failures, news, of_streams, *differences = counts[: COUNTED + layout.num_columns].tolist()
        if failures:
            gather(failure, where=where)  # raises the first one on all ranks
        if not news:
            break
        unread = reduce(or_, gather(found), unread)
        try:
            batches = loader.mended(step, batches, unread)
        except Exception as error:
            failure = error
    if any(differences):
        raise _disagreement(loader, step, batches, unread)
    step = loader.note_left_out(step, unread) if unread else replace(step, left_out=of_streams)
    waits = counts[COUNTED + layout.num_columns :]
    for batch in batches:
        batch.pop(LEFT_OUT, None)
    return step, batches, targets, int(waits.max()) / 1e6


def _counted(batches: Sequence[Batch], layout: Layout, rank: int, seconds: float) -> Tensor:
    """What a rank tells of its packs before a step, to be added up: numbers that all ranks have places for."""
    # `COUNTED` of all together: target tokens; failures, samples that are newly left out, and those that streams have
    # left out, which the caller enters. Then a number per column that tells whether its first and last stages have read
    # the same labels, and each rank's microseconds of reading: the largest is the wait that all ranks share.
    place = layout.position(rank)
    # Of tensor ranks, which read the same packs, the first one counts.
    is_first, is_last = (place.tensor == 0 and place.stage == end for end in (0, layout.num_stages - 1))
    counts = torch.zeros(COUNTED + layout.num_columns + layout.num_devices, dtype=torch.int64)
    counts[COUNTED + layout.num_columns + rank] = round(1e6 * seconds)
    if is_last:
        counts[0] = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    # The first stage adds what the last one takes away: a column whose stages read the same is left with zero.
    sign, (replicas, _) = is_first - is_last, layout.shape(place.stage)
    numbers = range(place.replica, replicas * len(batches), replicas)
    digests = [_digest(batch["labels"], number) for number, batch in zip(numbers, batches, strict=True)] if sign else []
    counts[COUNTED + place.replica % layout.num_columns] = sign * sum(digests)
    return counts


def _next_of(steps: Steps) -> tuple[Step, list[Batch]]:
    found: Any = next(steps)
    # DeepSpeed's own engine takes any iterator over batches.
    if not isinstance(found, tuple) or not isinstance(found[0], Step):
        raise ConfigError(f"data_iter must be iter(loader) of the loader, got an iterator over {type(found).__name__}")
    return found


def _disagreement(loader: Loader, step: Step, batches: list[Batch], unread: Collection[int]) -> DataError:
    """Name the sample that two stages read differently, all ranks together."""
    assert isinstance(loader.feed, EpochFeed), "the samples of a stream are read once"
    own: dict[int, int] = {}
    for pack, batch in zip(loader.feed.own_packs(step)[: len(batches)], batches, strict=True):
        samples, bounds = (sample for sample in pack if sample not in unread), batch["cu_seq_lens"].tolist()
        for sample, (start, stop) in zip(samples, pairwise(bounds), strict=False):
            own[sample] = _digest(batch["labels"][0, start:stop])
    seen: dict[int, int] = {}
    read = [entry for found in gather(own) for entry in found.items()]
    sample = next(sample for sample, number in read if seen.setdefault(sample, number) != number)
    return DataError(
        f"text({sample}) of the dataset must have the labels of [{sample}], got others; "
        "the last stage would train on another sample than the first one reads"
    )


def _digest(labels: Tensor, before: int = 0) -> int:
    """A number that tells labels, which are what the last stage trains on, from others."""
    return crc32(labels.numpy().data, before)


def open_together(workspace: Workspace, part: Literal["train", "held_out"]) -> ConversationDataset:
    """The section's ``data.train`` or ``data.held_out``, its samples measured; all ranks together."""
    # Rank 0 alone indexes the annotations and measures the samples, or finds that those of an earlier run are as they
    # were. The others read what it has kept in `run.output`, which all hosts must share.

    def open_and_measure() -> ConversationDataset:
        dataset = workspace.dataset(part, measured=dist.get_rank() != 0)
        # rank 0 measures and keeps them; the others read what is kept
        checked_lengths(dataset, f"omnibal.data.{part} ({getattr(workspace.section.data, part)})")
        return dataset

    check_shared(Path(workspace.section.run.output), name="run.output")
    return rank_zero_first(open_and_measure, doing=MEASURES)


def open_samples(workspace: Workspace, dataset: Any) -> Any:
    """What a run trains on: a caller's dataset or stream, else the ds_config's; all ranks together."""
    data = workspace.section.data
    if dataset is None and data.streaming:
        # A process to read each of this process's cores but one, which trains.
        workers = cores_of_process() - 1 if data.workers is None else data.workers
        return run_on_all_ranks(lambda: workspace.streams(workers))
    return open_together(workspace, "train") if dataset is None else dataset


def training_loader(resolved: ResolvedRun, samples: Any) -> tuple[Plan, Loader]:
    """The plan of a run and this rank's loader of samples, or of a stream of them; all ranks together."""
    if dist.get_rank() == 0:
        warn_of_added_end(samples)
    layout, data, position = resolved.layout, resolved.section.data, resolved.layout.position(dist.get_rank())
    # The first stage reads images and text, the last one text, for its labels.
    view: View = "text" if position.stage == layout.num_stages - 1 else "nothing"
    reader = PackReader(
        share=Share(position.replica, layout.shape(position.stage)[0]) if layout.has_units else None,
        view="images" if position.stage == 0 else view,
        pixel_shape=resolved.vlm.pixel_shape,
        pixel_dtype=resolved.dtype,
        image_integers=resolved.vlm.image_integers,
        positions=resolved.vlm.positions,
        workers=data.workers,
        ray=data.ray,
        pin_memory=get_accelerator().device_name() == "cuda",
    )
    # Samples with lengths are arranged by epochs; of a stream packs are planned as samples come.
    if hasattr(samples, "lengths"):
        return sample_loader(resolved, samples, position, reader)
    return run_on_all_ranks(lambda: stream_loader(resolved, samples, position, reader))


def sample_loader(
    resolved: ResolvedRun, samples: VlmDataset, position: PipelinePosition, reader: PackReader
) -> tuple[Plan, Loader]:
    """The plan of a run on samples with lengths, and this rank's loader; all ranks together."""
    # Rank 0 asks for the lengths first: a dataset may measure them when asked, and keep them for the others. Then each
    # rank arranges the same epoch by itself, and all compare what they arranged it from: no pack is sent.
    lengths = rank_zero_first(lambda: checked_lengths(samples), doing=MEASURES)
    num_replicas, packing, data = resolved.layout.num_replicas, resolved.section.packing, resolved.section.data

    def arrange() -> tuple[Plan, BalancedBatchSampler, Loader]:
        mixture = data.mixture
        if mixture == "repeat_time":
            if not isinstance(samples, ConversationDataset):
                raise ConfigError(
                    f"omnibal.data.mixture must be shares by source for a dataset of your own, got {mixture!r}"
                )
            mixture = samples.repeat_time()
        typical = typical_lengths(lengths, mixture)
        plan = resolved.plan_of(typical)
        if dist.get_rank() == 0:
            warn_of_other_data(plan, typical)
            if packing.oversized != "drop":
                warn_of_long_samples(resolved.vlm.config, lengths, plan.limits)
        options: PackingOptions = {**packing.options, "mixture": mixture}
        sampler = BalancedBatchSampler(
            lengths,
            plan.limits,
            num_replicas=num_replicas,
            micro_batches=plan.micro_batches,
            **options,
            rank=position.replica % num_replicas,  # an encoder with more replicas reads by its share alone
        )
        checked = CheckedSamples(samples, lengths, SampleRules.of(resolved.vlm), data.broken)
        return plan, sampler, Loader(reader.feed(checked, sampler), reader, checked)

    plan, sampler, loader = run_on_all_ranks(arrange)
    sampler.verify(gather)
    return plan, loader


def warn_of_other_data(plan: Plan, lengths: SampleLengths) -> None:
    if plan.made_from.get("lengths", lengths.content_hash) != lengths.content_hash:
        LOG.warning(
            "omnibal.pipeline.plan should be made for this run's data, got one made for other data; its packs and "
            "times may not suit these: `omnibal plan --write` makes another"
        )


def warn_of_long_samples(config: Any, lengths: SampleLengths, limits: PackLimits) -> None:
    positions, longest = getattr(config.text_config, "max_position_embeddings", None), lengths.summary.max_llm_tokens
    if positions is not None and longest > positions:
        LOG.warning(
            "samples should have at most the model's %d positions, got one of %d tokens, which is trained whole; a "
            "smaller omnibal.data.max_tiles makes samples shorter, omnibal.packing.oversized 'drop' leaves out those "
            "beyond omnibal.packing.llm_tokens (%d)",
            positions,
            longest,
            limits.llm_tokens,
        )


def warn_of_added_end(samples: Any) -> None:
    """Say that answers are trained with an end which the model's chat template does not write, if they are."""
    sources = samples.values() if isinstance(samples, Mapping) else (samples,)
    for end in {getattr(source, "added_end", "") for source in sources} - {""}:
        LOG.warning(
            "the model's chat template should end answers, got one that writes nothing behind them (as Vicuna's): each "
            "answer is trained with %r behind it, the tokenizer's eos_token, or the model would not learn to stop; a "
            "template that ends answers itself decides otherwise",
            end,
        )


def stream_loader(
    resolved: ResolvedRun, sources: Any, position: PipelinePosition, reader: PackReader
) -> tuple[Plan, Loader]:
    data, packing, num_steps = resolved.section.data, resolved.section.packing, resolved.section.run.max_steps
    if num_steps is None:
        raise ConfigError(
            "omnibal.run.max_steps must say how long to train on a stream, got none; without lengths() it has no epochs"
        )
    if data.mixture == "repeat_time":
        raise ConfigError("omnibal.data.mixture must be shares by source for streams, got 'repeat_time'")
    if data.ray is not None:
        raise ConfigError(f"omnibal.data.ray must be left out for a stream, which is read here, got {data.ray!r}")
    if packing.method != "balanced":
        raise ConfigError(f"omnibal.packing.method must be 'balanced' for a stream, got {packing.method!r}")
    plan = resolved.plan_of(None)
    # Where the encoder has replicas of its own, these share the packs of a step.
    micro_batches = plan.micro_batches * resolved.layout.num_replicas // resolved.layout.shape(0)[0]
    settings = StreamSettings(
        limits=plan.limits,
        micro_batches=micro_batches,
        buffer=buffer_of(micro_batches),
        num_steps=num_steps,
        mixture=data.mixture,
        seed=packing.seed,
        oversized=packing.oversized,
    )
    feed = PipelineStreamFeed(
        sources if isinstance(sources, Mapping) else {"data": sources},
        settings,
        layout=resolved.layout,
        place=position,
        reader=reader,
        rules=SampleRules.of(resolved.vlm),
    )
    return plan, Loader(feed, reader)
