"""omnibal.initialize: from a ds_config, a model and a dataset to an engine that trains, in DeepSpeed's shape.

Processes meet; a run is read (`Workspace`), resolved (`ResolvedRun`: layers on ranks), gets its plan and loader
(`training_loader`) and is built, each once. What one rank finds wrong all ranks learn before anybody
waits: whatever can fail runs in ``run_on_all_ranks``.
"""

import atexit
import logging
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar
from zlib import crc32

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn

from omnibal.compiled import folder_hash
from omnibal.config import check_deferral, fill_in_steps, settings_of
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.loader import Loader, open_samples, training_loader
from omnibal.engine.module import VlmPipelineModule
from omnibal.engine.reading import VlmDataset
from omnibal.engine.resolve import (
    MakeOptimizer,
    MakeScheduler,
    OnGradient,
    ResolvedRun,
    UserOptimizer,
    deepspeed_config_of,
    resolve,
)
from omnibal.errors import ENGINE_MODULES, ConfigError, end_in_one_line
from omnibal.families.base import trained_in_words
from omnibal.plan import Plan
from omnibal.processes import end_with_launcher
from omnibal.ranks import check_same, gloo_group, run_on_all_ranks
from omnibal.ranks.failures import lost_ranks_named, watch
from omnibal.vlm.weights import spare_weights
from omnibal.workspace import Workspace

LOG: Final = logging.getLogger(__name__)
E = TypeVar("E", bound=OmnibalEngine)
# Hosts may have the same files in places of their own; lengths tell whether these are the same.
_PATHS: Final = (
    *("omnibal.model.path", "omnibal.data.train", "omnibal.data.held_out", "omnibal.data.images", "omnibal.run.output"),
    *("omnibal.pipeline.plan", "omnibal.data.workers", "csv_monitor.output_path", "tensorboard.output_path"),
)


def initialize(
    config: str | Path | dict[str, Any],
    model: Any = None,
    dataset: VlmDataset | Iterable[Any] | Mapping[str, Any] | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    lr_scheduler: MakeScheduler | None = None,
    on_gradient: OnGradient | None = None,
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
            ``partial(torch.optim.AdamW, lr=1e-4)``. A group has a ``name``, ``params``, ``names`` (those of the
            parameters on disk), and the ``lr`` and ``weight_decay`` that ``omnibal.optimizer`` gives it.
        lr_scheduler: Makes the learning-rate schedule from the optimizer, in place of the ds_config's "scheduler";
            gets the steps of the run, too, if it has a parameter ``total_steps`` without a value.
        on_gradient: Called in every step, before the optimizer steps, with the name on disk and the gradient of each
            weight that this process's stage trains: averaged over the step's target tokens, not yet clipped, the same
            on all replicas. A weight that two stages tie comes on both.

    Returns:
        ``engine, optimizer, loader, lr_scheduler``; then ``engine.train_batch()`` trains one step.

    Raises:
        ConfigError: The configuration cannot work: unknown keys, stages that do not divide the processes or exceed
            the layers, a partition that does not fit the model, what a pipeline forbids, weights to load for a
            model without a folder; an optimizer or scheduler that is made already, or named twice.
        DataError: The dataset has broken samples (the message names files and lines), or other lengths than samples.
    """
    end_in_one_line()
    meet(get_accelerator().communication_backend_name())
    workspace = run_on_all_ranks(lambda: Workspace.read(config))
    engine = start(workspace, model, dataset, UserOptimizer(optimizer, lr_scheduler, on_gradient))
    return engine, engine.optimizer, engine.loader, engine.lr_scheduler


def meet(backend: str, **rendezvous: Any) -> None:
    """Let this process communicate with the others of its launch, and leave nothing behind; all ranks together."""
    # The processes may have met before. The device is set before anything communicates: NCCL sends from the current
    # device, which would be the first one of the host for every process. `rendezvous` is as for
    # `deepspeed.init_distributed`; by default the launcher says where they meet.
    have_met = dist.is_initialized()
    if not have_met:
        end_with_launcher()
    if "LOCAL_RANK" in os.environ:  # processes that MPI started learn theirs when they meet
        _set_device()
    elif find_spec("mpi4py") is None:
        raise ConfigError(
            "processes must be started by a launcher, got no LOCAL_RANK; start them with `deepspeed` or `torchrun`"
        )
    # On a CPU it would compile an extension for minutes; gloo does without. As an attribute the module is torch itself.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend=backend, verbose=False, **rendezvous)
    _set_device()
    gloo_group(dist.group.WORLD)
    watch()
    if backend == "gloo" and not have_met:
        atexit.register(_leave)  # gloo's threads abort a process that ends without having taken leave


def _set_device() -> None:
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))


def _leave() -> None:
    gloo_group.cache_clear()  # or its threads would outlive what follows
    if dist.is_initialized():
        dist.destroy_process_group()


@lost_ranks_named()
def start(workspace: Workspace, model: Any, dataset: Any, own: UserOptimizer) -> OmnibalEngine:
    """The engine of this process for a run that is read; all ranks together, which have met."""

    def refuse_or_resolve() -> tuple[ResolvedRun, DeepSpeedConfig]:
        resolved = resolve(workspace, model, dist.get_world_size())
        own.check(resolved.config)
        return resolved, deepspeed_config_of(resolved, dist.get_rank())

    resolved, config = run_on_all_ranks(refuse_or_resolve)
    section = workspace.section
    settings = settings_of(workspace.config, section).items()
    check_same(_versions() | {key: value for key, value in settings if key not in _PATHS})
    if dist.get_rank() == 0:
        LOG.info("parameters trained: %s", trained_in_words(resolved.trained))
        warn_of_float32(get_accelerator().device_name(), resolved.layout.precision)
    plan, loader = training_loader(resolved, open_samples(workspace, dataset))
    # Only now the number of steps is known, which "auto" in DeepSpeed's scheduler waits for.
    total_steps = section.run.max_steps or loader.steps_left(section.run.epochs)
    weights = model.state_dict() if isinstance(model, nn.Module) else None
    return build_engine(resolved, plan, loader, total_steps, own, weights=weights, deepspeed_config=config)


def _versions() -> dict[str, str]:
    # omnibal's is the hash of its files: its version stays the same while somebody works on them.
    package = Path(__file__).parents[1]
    folders = sorted({file.parent for file in package.rglob("*.py")})
    own = f"{crc32(''.join(map(folder_hash, folders)).encode()):08x}"
    return {package: version(package) for package in (*ENGINE_MODULES, "numpy")} | {"omnibal": own}


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
    """The engine of this process, for packs from any loader; all ranks together, which hold the same plan.

    It does what deepspeed.initialize does for a PipelineModule, but with an engine class of our own. ``weights`` are
    all of the model's by name, where they are in memory; by default the ds_config says.
    """
    own = (own or UserOptimizer()).over(total_steps)
    check_same({"plan": plan.to_record()})

    def settled() -> DeepSpeedConfig:
        if plan.runs_table:
            check_deferral(resolved.config)
        config = deepspeed_config or deepspeed_config_of(resolved, dist.get_rank())
        if config.scheduler_params:  # what DeepSpeed's engine makes its schedule from; config._param_dict holds it, too
            fill_in_steps(config.scheduler_params, total_steps)
        return config

    config = run_on_all_ranks(settled)
    source = weights or resolved.weights_folder
    # PipelineModule makes its process groups and the layers of this rank's stage; weights are read as layers are made.
    module = module_class(resolved, plan, source)
    is_first = dist.get_rank() == 0
    spare = run_on_all_ranks(lambda: spare_weights(resolved.vlm, source) if is_first else {})
    return engine_class(
        resolved=resolved,
        plan=plan,
        loader=loader,
        spare=spare,
        on_gradient=own.on_gradient,
        optimizer=own.optimizer,
        lr_scheduler=own.lr_scheduler,
        model_parameters=module.parameter_groups(resolved.section.optimizer),
        args=None,  # of a command line, where DeepSpeed would look for its configuration
        model=module,
        mpu=module.mpu(),  # the groups of stages and replicas that the module has made
        dist_init_required=False,  # the processes have met
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
