"""omnibal.initialize: from a ds_config, a model and a dataset to an engine that trains, in DeepSpeed's shape."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn

from omnibal.config import (
    OmnibalSection,
    complete_deepspeed_config,
)
from omnibal.data.lengths import SampleLengths
from omnibal.data.source_draws import typical_lengths
from omnibal.engine.contract import CheckedSamples, SampleRules, checked_lengths
from omnibal.engine.distributed import meet
from omnibal.engine.doubts import warn_of_added_end, warn_of_float32, warn_of_long_samples, warn_of_other_data
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.loader import Loader, PackReader, VlmDataset, view_of
from omnibal.engine.module import VlmPipelineModule
from omnibal.engine.resolve import (
    MakeOptimizer,
    MakeScheduler,
    OnGradient,
    ResolvedRun,
    UserOptimizer,
    Weights,
    named,
    read,
    resolve_plan,
)
from omnibal.engine.streams import is_stream, open_annotations, stream_feed
from omnibal.errors import ConfigError, said
from omnibal.families.base import trained_in_words
from omnibal.feeds.feed import Feed
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.formats.conversations import ConversationDataset, open_dataset
from omnibal.pipeline.schedule import ScheduleName
from omnibal.plan import Plan
from omnibal.ranks import check_shared, gather, rank_zero_first, run_on_all_ranks
from omnibal.ranks.extensions import ExplainedWait
from omnibal.vlm.weights import spare_weights

LOG: Final = logging.getLogger(__name__)
E = TypeVar("E", bound=OmnibalEngine)

MEASURES: Final = "measures the samples"
"""What rank 0 does while the others wait."""


OTHERWISE = {
    "args": "pass the ds_config as config",
    "model_parameters": "all are trained but what omnibal.model.frozen names, in the groups that "
    "omnibal.optimizer asks for",
    "training_data": "pass it as dataset",
    "collate_fn": "samples of dataset are packed",
}
"""How to have what ``deepspeed.initialize`` takes and ``initialize`` does not."""


def initialize(
    config: str | Path | dict[str, Any],
    model: Any = None,
    dataset: VlmDataset | Iterable[Any] | Mapping[str, Any] | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    lr_scheduler: MakeScheduler | None = None,
    on_gradient: OnGradient | None = None,
    **others: None,
) -> tuple[OmnibalEngine, Any, Loader, Any]:
    """Build the engine of this process; every process of the run calls it with the same arguments.

    Args:
        config: ds_config, as a path or its content, with an "omnibal" section.
        model: Hugging Face folder, a transformers model whose weights are copied (every process holds all of it until
            its caller lets it go), or a transformers configuration (then ``model.weights`` must be ``"random"``); by
            default the section's ``model.path``.
        dataset: Samples as VlmDataset describes them; by default the section's ``data.train``. Or a stream: an iterable
            of such samples without ``lengths``, or several sources by name, of which the section's ``data.mixture``
            says what share each gets. All processes give the same: replicas get their own shards of a stream of
            ``datasets``, their own part of what is read by index, and every n-th sample of any other.
        optimizer: Makes this stage's optimizer from its parameter groups, in place of the ds_config's "optimizer":
            ``partial(torch.optim.AdamW, lr=1e-4)``. A group has ``params``, ``names`` (theirs on disk), and the ``lr``
            and ``weight_decay`` that ``omnibal.optimizer`` gives it.
        lr_scheduler: Makes the learning-rate schedule from the optimizer, in place of the ds_config's "scheduler";
            gets the steps of the run, too, if it has a parameter ``total_steps`` without a value.
        on_gradient: Called in every step, before the optimizer steps, with the name on disk and the gradient of each
            weight that this process's stage trains: averaged over the step's target tokens, not yet clipped, the same
            on all replicas. A weight that two stages tie comes on both.
        **others: Must be None: what else ``deepspeed.initialize`` takes.

    Returns:
        ``engine, optimizer, loader, lr_scheduler``; then ``engine.train_batch()`` trains one step.

    Raises:
        ConfigError: The configuration cannot work: unknown keys, stages that do not divide the processes or exceed
            the layers, a partition that does not fit the model, what a pipeline forbids, weights to load for a
            model without a folder; an optimizer or scheduler that is made already, or named twice.
        DataError: The dataset has broken samples (the message names files and lines), or other lengths than samples.
    """
    _refuse(others)
    meet(get_accelerator().communication_backend_name())
    rank, num_processes = dist.get_rank(), dist.get_world_size()
    own = UserOptimizer(optimizer, lr_scheduler, on_gradient)
    resolved = run_on_all_ranks(lambda: _read(config, model, num_processes, own))
    samples: Any = _training_data(resolved.section) if dataset is None else dataset
    place = resolved.layout.place(rank)
    if rank == 0:
        LOG.info("parameters trained: %s", trained_in_words(resolved.trained))
        warn_of_float32(get_accelerator().device_name(), resolved.layout.precision)
        warn_of_added_end(samples)
    reader = PackReader(
        view=view_of(place.stage, resolved.layout.num_stages),
        pixel_shape=resolved.vlm.pixel_shape,
        pixel_dtype=resolved.dtype,
        image_integers=resolved.vlm.image_integers,
        positions=resolved.vlm.positions,
        workers=resolved.section.data.workers,
        pin_memory=get_accelerator().device_name() == "cuda",
    )
    feed: Feed
    if is_stream(samples):
        plan, feed = run_on_all_ranks(lambda: stream_feed(resolved, samples, place, reader))
    else:
        lengths = rank_zero_first(lambda: checked_lengths(samples), doing=MEASURES)
        plan, sampler = run_on_all_ranks(lambda: _arrange(resolved, samples, lengths, place.replica))
        sampler.verify(gather)
        checked = CheckedSamples(samples, lengths, SampleRules.of(resolved.vlm))
        step_seconds = None if plan.predicted is None else plan.predicted.step_seconds
        feed = reader.feed(checked, sampler, step_seconds=step_seconds)
    loader = Loader(feed, reader)
    total_steps = resolved.section.run.max_steps or loader.steps_left(resolved.section.run.epochs)
    weights = model.state_dict() if isinstance(model, nn.Module) else None
    engine: OmnibalEngine = build_engine(resolved, plan, loader, total_steps, own, weights=weights)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _read(config: Any, model: Any, num_processes: int, own: UserOptimizer) -> ResolvedRun:
    """What the arguments say, refused before samples are measured and weights are read."""
    resolved = read(config, model, num_processes)
    own.check(resolved.config)
    _deepspeed_config(resolved, total_steps=1)
    return resolved


def _deepspeed_config(resolved: ResolvedRun, *, total_steps: int, schedule: ScheduleName = "1f1b") -> DeepSpeedConfig:
    """The ds_config as DeepSpeed reads it.

    Raises:
        ConfigError: It cannot be right under a pipeline, or DeepSpeed refuses it.
    """
    config = complete_deepspeed_config(resolved.config, resolved.layout, total_steps=total_steps, schedule=schedule)
    replicas = SimpleNamespace(get_data_parallel_world_size=lambda: resolved.layout.num_replicas)
    try:
        return DeepSpeedConfig(config, replicas)
    except Exception as error:  # pydantic's, assertions, and DeepSpeed's own
        raise ConfigError(f"ds_config must be one that DeepSpeed takes, got: {said(error)}") from error


def _refuse(others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                "arguments of initialize must be config, model, dataset, optimizer, lr_scheduler and on_gradient, "
                f"got {name}; {OTHERWISE.get(name, 'leave it out')}"
            )


def _training_data(section: OmnibalSection) -> Any:
    if section.data.streaming:
        return run_on_all_ranks(lambda: open_annotations(section))
    return open_together(section, "train")


def _arrange(
    resolved: ResolvedRun, samples: VlmDataset, lengths: SampleLengths, replica: int
) -> tuple[Plan, BalancedBatchSampler]:
    packing, mixture = resolved.section.packing, resolved.section.data.mixture
    if mixture == "repeat_time":
        if not isinstance(samples, ConversationDataset):
            raise ConfigError(
                f"omnibal.data.mixture must be shares by source for a dataset of your own, got {mixture!r}"
            )
        mixture = samples.repeat_time()
    typical = typical_lengths(lengths, mixture)
    plan = resolve_plan(resolved, typical)
    if dist.get_rank() == 0:
        warn_of_other_data(plan, typical)
        if packing.oversized != "drop":
            warn_of_long_samples(resolved.vlm.config, lengths, plan.limits)
    sampler = BalancedBatchSampler(
        lengths,
        plan.limits,
        num_replicas=resolved.layout.num_replicas,
        rank=replica,
        micro_batches=plan.micro_batches,
        method=packing.method,
        seed=packing.seed,
        oversized=packing.oversized,
        exchange_steps=packing.exchange_steps,
        mixture=mixture,
    )
    return plan, sampler


def open_together(section: OmnibalSection, part: str) -> ConversationDataset:
    """The section's ``data.train`` or ``data.held_out``, its samples measured; all ranks together.

    Rank 0 alone indexes the annotations and measures the samples, or finds that those of an earlier run are as they
    were. The others read what it has kept in ``run.output``.

    Raises:
        ConfigError: It or ``model.path`` (for tokenizer and preprocessor) is not named, or the hosts do not share
            ``run.output``.
        DataError: A file it names is missing, or samples are broken.
    """

    def open_and_measure() -> ConversationDataset:
        dataset = _open(section, part, measured=dist.get_rank() != 0)
        dataset.lengths()
        return dataset

    check_shared(Path(section.run.output), name="run.output")
    return rank_zero_first(open_and_measure, doing=MEASURES)


def _open(section: OmnibalSection, part: str, *, measured: bool) -> ConversationDataset:
    path = named(None, getattr(section.data, part), "dataset", f"omnibal.data.{part}")
    processor = named(None, section.model.path, "tokenizer and preprocessor", "omnibal.model.path")
    return open_dataset(
        path,
        processor,
        image_folder=section.data.images,
        max_tiles=section.data.max_tiles,
        max_image_pixels=section.data.max_image_pixels,
        broken=section.data.broken,
        cache=section.run.files.lengths,
        measured=measured,
        each_once=part == "train" and section.data.mixture is not None,
    )


def _spare_weights(resolved: ResolvedRun, source: Weights | None) -> dict[str, Tensor]:
    return spare_weights(resolved.vlm, source, seed=resolved.section.model.seed) if dist.get_rank() == 0 else {}


def build_engine(
    resolved: ResolvedRun,
    plan: Plan,
    loader: Loader,
    total_steps: int,
    own: UserOptimizer | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    module_class: type[VlmPipelineModule] = VlmPipelineModule,
    engine_class: type[E] = OmnibalEngine,  # type: ignore[assignment]  # mypy has no defaults for type variables
    **others: Any,
) -> E:
    """The engine of this process, for packs from any loader; all ranks together.

    It does what deepspeed.initialize does for a PipelineModule, but with an engine class of our own.

    Args:
        resolved: What is trained, and how.
        plan: Partition and recompute levels; every process of the run holds the same.
        loader: This rank's packs.
        total_steps: Optimizer steps of the whole run.
        own: What the caller makes itself.
        weights: All of the model's weights by name, where they are in memory; by default the ds_config says.
        module_class: What holds this process's layers.
        engine_class: What is made.
        **others: Further arguments of the engine class.

    Raises:
        ConfigError: The ds_config cannot be right under a pipeline, or weights do not fit.
    """
    own = (own or UserOptimizer()).over(total_steps)
    config = run_on_all_ranks(
        lambda: _deepspeed_config(resolved, total_steps=total_steps, schedule=plan.schedule),
    )
    source = weights or resolved.weights_folder
    module = module_class(resolved, plan, source)
    spare = run_on_all_ranks(lambda: _spare_weights(resolved, source))
    with closing(ExplainedWait()):  # for an optimizer that is compiled
        return engine_class(
            resolved=resolved,
            plan=plan,
            loader=loader,
            spare=spare,
            on_gradient=own.on_gradient,
            optimizer=own.optimizer,
            lr_scheduler=own.lr_scheduler,
            model_parameters=module.parameter_groups(resolved.section.optimizer),
            args=None,
            model=module,
            mpu=module.mpu(),
            dist_init_required=False,
            config=config._param_dict,
            config_class=config,
            **others,
        )
