"""omnibal.initialize: from a ds_config, a model and a dataset to an engine that trains, in DeepSpeed's shape.

A run is read (`Workspace`), resolved (`ResolvedRun`: layers on ranks) and built, each once. What one rank finds wrong
all ranks learn before anybody waits: whatever can fail runs in ``run_on_all_ranks``.
"""

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeVar

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn

from omnibal.config import check_deferral, complete_deepspeed_config, fill_in_steps
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import PackingOptions
from omnibal.data.source_draws import typical_lengths
from omnibal.engine.contract import CheckedSamples, SampleRules, checked_lengths
from omnibal.engine.distributed import meet
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.loader import Loader, PackReader, VlmDataset, cores_of_process, view_of
from omnibal.engine.module import VlmPipelineModule
from omnibal.engine.resolve import (
    MakeOptimizer,
    MakeScheduler,
    OnGradient,
    ResolvedRun,
    UserOptimizer,
    Weights,
    resolve,
)
from omnibal.engine.streams import stream_feed
from omnibal.errors import ConfigError, said
from omnibal.families.base import trained_in_words
from omnibal.feeds.feed import Feed
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.formats.conversations import ConversationDataset
from omnibal.plan import Plan
from omnibal.ranks import check_shared, gather, rank_zero_first, run_on_all_ranks
from omnibal.ranks.extensions import ExplainedWait
from omnibal.vlm.weights import spare_weights
from omnibal.workspace import Workspace

LOG: Final = logging.getLogger(__name__)
E = TypeVar("E", bound=OmnibalEngine)
MEASURES: Final = "measures the samples"  # what rank 0 does while the others wait
# How to have what `deepspeed.initialize` takes and `initialize` does not.
OTHERWISE = {
    "args": "pass the ds_config as config",
    "model_parameters": "all are trained but what omnibal.model.frozen names, in the groups that "
    "omnibal.optimizer asks for",
    "training_data": "pass it as dataset",
    "collate_fn": "samples of dataset are packed",
}


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
    own = user_optimizer(optimizer, lr_scheduler, on_gradient, **others)
    meet(get_accelerator().communication_backend_name())
    engine = start(run_on_all_ranks(lambda: Workspace.read(config)), model, dataset, own)
    return engine, engine.optimizer, engine.loader, engine.lr_scheduler


def user_optimizer(
    optimizer: MakeOptimizer | None = None,
    lr_scheduler: MakeScheduler | None = None,
    on_gradient: OnGradient | None = None,
    **others: object,
) -> UserOptimizer:
    """What a caller of initialize makes itself; refuses what else ``deepspeed.initialize`` takes."""
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                "arguments of initialize must be config, model, dataset, optimizer, lr_scheduler and on_gradient, "
                f"got {name}; {OTHERWISE.get(name, 'leave it out')}"
            )
    return UserOptimizer(optimizer, lr_scheduler, on_gradient)


def start(workspace: Workspace, model: Any, dataset: Any, own: UserOptimizer) -> OmnibalEngine:
    """The engine of this process for a run that is read; all ranks together, which have met."""
    # Whatever can be refused is refused here, before samples are measured, which may take hours, and weights are read.
    resolved, config = run_on_all_ranks(lambda: _resolve(workspace, model, own))
    section, place = workspace.section, resolved.layout.place(dist.get_rank())
    # Data: a caller's dataset or stream, else the ds_config's stream, else its annotations, measured by rank 0.
    samples = dataset
    if dataset is None and section.data.streaming:
        # A process to read each of this process's cores but one, which trains.
        workers = cores_of_process() - 1 if section.data.workers is None else section.data.workers
        samples = run_on_all_ranks(lambda: workspace.streams(workers))
    elif dataset is None:
        samples = open_together(workspace, "train")
    if dist.get_rank() == 0:
        LOG.info("parameters trained: %s", trained_in_words(resolved.trained))
        warn_of_float32(get_accelerator().device_name(), resolved.layout.precision)
        warn_of_added_end(samples)
    reader = PackReader(
        view=view_of(place.stage, resolved.layout.num_stages),
        pixel_shape=resolved.vlm.pixel_shape,
        pixel_dtype=resolved.dtype,
        image_integers=resolved.vlm.image_integers,
        positions=resolved.vlm.positions,
        workers=section.data.workers,
        pin_memory=get_accelerator().device_name() == "cuda",
    )
    # Plan and feed. With lengths all ranks arrange the same epoch, and compare what they arranged it from; a stream's
    # packs are planned as samples come.
    feed: Feed
    if not hasattr(samples, "lengths"):  # a stream: samples are drawn one by one
        plan, feed = run_on_all_ranks(lambda: stream_feed(workspace, resolved, samples, place, reader))
    else:
        lengths = rank_zero_first(lambda: checked_lengths(samples), doing=MEASURES)
        plan, sampler = run_on_all_ranks(lambda: _arrange(workspace, resolved, samples, lengths, place.replica))
        sampler.verify(gather)
        checked = CheckedSamples(samples, lengths, SampleRules.of(resolved.vlm))
        if plan.predicted is not None:
            reader = replace(reader, step_seconds=plan.predicted.step_seconds)
        feed = reader.feed(checked, sampler)
    # Only now the number of steps is known, which "auto" in DeepSpeed's scheduler waits for.
    loader = Loader(feed, reader)
    total_steps = section.run.max_steps or loader.steps_left(section.run.epochs)
    weights = model.state_dict() if isinstance(model, nn.Module) else None
    return build_engine(resolved, plan, loader, total_steps, own, weights=weights, deepspeed_config=config)


def _resolve(workspace: Workspace, model: Any, own: UserOptimizer) -> tuple[ResolvedRun, DeepSpeedConfig]:
    resolved = resolve(workspace, model, dist.get_world_size())
    own.check(resolved.config)
    return resolved, _deepspeed_config(resolved)


def _deepspeed_config(resolved: ResolvedRun) -> DeepSpeedConfig:
    """The ds_config as DeepSpeed reads it, where the steps of the run may still be ``"auto"``."""
    config = complete_deepspeed_config(resolved.config, resolved.layout)
    # DeepSpeedConfig asks its mpu for nothing but the data-parallel ranks; the grid that knows them is yet to be made.
    replicas = SimpleNamespace(get_data_parallel_world_size=lambda: resolved.layout.num_replicas)
    try:
        return DeepSpeedConfig(config, replicas)
    except Exception as error:  # pydantic's, assertions, and DeepSpeed's own
        raise ConfigError(f"ds_config must be one that DeepSpeed takes, got: {said(error)}") from error


def _arrange(
    workspace: Workspace, resolved: ResolvedRun, samples: VlmDataset, lengths: SampleLengths, replica: int
) -> tuple[Plan, BalancedBatchSampler]:
    packing, mixture = workspace.section.packing, workspace.section.data.mixture
    if mixture == "repeat_time":
        if not isinstance(samples, ConversationDataset):
            raise ConfigError(
                f"omnibal.data.mixture must be shares by source for a dataset of your own, got {mixture!r}"
            )
        mixture = samples.repeat_time()
    typical = typical_lengths(lengths, mixture)
    plan = workspace.resolve_plan(resolved.vlm.records, resolved.layout, typical)
    if dist.get_rank() == 0:
        warn_of_other_data(plan, typical)
        if packing.oversized != "drop":
            warn_of_long_samples(resolved.vlm.config, lengths, plan.limits)
    options: PackingOptions = {**packing.options, "mixture": mixture}
    sampler = BalancedBatchSampler(
        lengths, plan.limits, num_replicas=resolved.layout.num_replicas, rank=replica,
        micro_batches=plan.micro_batches, **options,
    )  # fmt: skip
    return plan, sampler


def open_together(workspace: Workspace, part: Literal["train", "held_out"]) -> ConversationDataset:
    """The section's ``data.train`` or ``data.held_out``, its samples measured; all ranks together.

    Rank 0 alone indexes the annotations and measures the samples, or finds that those of an earlier run are as they
    were. The others read what it has kept in ``run.output``, which all hosts must share.
    """

    def open_and_measure() -> ConversationDataset:
        dataset = workspace.dataset(part, measured=dist.get_rank() != 0)
        dataset.lengths()  # rank 0 measures and keeps them; the others read what is kept
        return dataset

    check_shared(Path(workspace.section.run.output), name="run.output")
    return rank_zero_first(open_and_measure, doing=MEASURES)


def _spare_weights(resolved: ResolvedRun, source: Weights | None) -> dict[str, Tensor]:
    return spare_weights(resolved.vlm, source, seed=resolved.section.model.seed) if dist.get_rank() == 0 else {}


def _settled(resolved: ResolvedRun, config: DeepSpeedConfig | None, plan: Plan, total_steps: int) -> DeepSpeedConfig:
    """DeepSpeed's configuration of a run whose plan and number of steps are known."""
    if plan.schedule != "1f1b":
        check_deferral(resolved.config)
    config = config or _deepspeed_config(resolved)
    if config.scheduler_params:  # what DeepSpeed's engine will make its schedule from; config._param_dict holds it, too
        fill_in_steps(config.scheduler_params, total_steps)
    return config


def build_engine(
    resolved: ResolvedRun,
    plan: Plan,
    loader: Loader,
    total_steps: int,
    own: UserOptimizer | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    deepspeed_config: DeepSpeedConfig | None = None,
    module_class: type[VlmPipelineModule] = VlmPipelineModule,
    engine_class: type[E] = OmnibalEngine,  # type: ignore[assignment]  # mypy has no defaults for type variables
    **others: Any,
) -> E:
    """The engine of this process, for packs from any loader; all ranks together.

    It does what deepspeed.initialize does for a PipelineModule, but with an engine class of our own.

    Args:
        plan: Partition and recompute levels; every process of the run holds the same.
        weights: All of the model's weights by name, where they are in memory; by default the ds_config says.
        deepspeed_config: The ds_config as DeepSpeed reads it, where that has been made.
    """
    own = (own or UserOptimizer()).over(total_steps)
    config = run_on_all_ranks(lambda: _settled(resolved, deepspeed_config, plan, total_steps))
    source = weights or resolved.weights_folder
    # PipelineModule makes its process groups and the layers of this rank's stage; weights are read as layers are made.
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
            # DeepSpeedEngine reads the parsed config_class; config is what its checkpoints keep of it.
            config=config._param_dict,
            config_class=config,
            **others,
        )


def warn_of_float32(device_name: str, dtype: str) -> None:
    """Say what float32 costs on a GPU, whose kernel for packs takes 16 bits only."""
    if device_name == "cuda" and dtype == "float32":
        LOG.warning(
            "bf16.enabled should be true on a GPU, got float32; it takes twice the memory, and attention runs sample "
            'by sample: set "bf16": {"enabled": true}'
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


def warn_of_other_data(plan: Plan, lengths: SampleLengths) -> None:
    """Say that a plan was made for other samples, if it was."""
    if plan.made_from.get("lengths", lengths.content_hash) != lengths.content_hash:
        LOG.warning(
            "omnibal.pipeline.plan should be made for this run's data, got one made for other data; its packs and "
            "times may not suit these: `omnibal plan --write` makes another"
        )


def warn_of_long_samples(config: Any, lengths: SampleLengths, limits: PackLimits) -> None:
    """Say that samples are longer than what the model has learned positions for, if some are."""
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
