"""One run from a ds_config: train, evaluate, save, export, and say what is where.

    deepspeed launch/train.py --deepspeed_config ds_configs/quickstart.json [--resume [TAG] | --restart]
    torchrun --nproc_per_node 2 -m omnibal.train --deepspeed_config ds_configs/quickstart.json

Everything else is in the ds_config: its "omnibal" section names model, data, packing, pipeline and run.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, Final

from omnibal.errors import ENGINE_MODULES, end_in_one_line, require

require(*ENGINE_MODULES)

from omnibal.processes import EndRequest, let_segments_grow

let_segments_grow()

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from omnibal.config.section import RunSection
from omnibal.data.epoch import Step
from omnibal.engine.checkpoint import (
    UNFINISHED,
    choose,
    delete_all,
    export_newest,
    has_all_files,
    latest_checkpoint,
)
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import meet, start
from omnibal.engine.loader import Loader, open_together
from omnibal.engine.measured import StageTimes
from omnibal.engine.reading import VlmDataset
from omnibal.engine.resolve import UserOptimizer
from omnibal.errors import ConfigError, OmnibalError, reporting
from omnibal.families.base import trained_in_words
from omnibal.passes import device_name
from omnibal.plan import Plan
from omnibal.profile.calibration import STEPS, WARM_UP, TimedPass, calibrate
from omnibal.profile.counted import analytic_profile, device_to_count
from omnibal.ranks import any_rank, rank_zero_first, rank_zero_only, run_on_all_ranks
from omnibal.report.training import MetricsLog, peak_text, plot_training, read_metrics, run_table, training_table
from omnibal.workspace import Workspace

# Between two states of the progress bar where it goes into a file.
LOG_SECONDS: Final = 10.0
LOG: Final = logging.getLogger(__name__)
OnEvaluation = Callable[[OmnibalEngine], object]


def train(
    config: str | Path | dict[str, Any],
    model: Any = None,
    dataset: VlmDataset | Iterable[Any] | Mapping[str, Any] | None = None,
    *,
    held_out: VlmDataset | None = None,
    resume: bool | str = False,
    restart: bool = False,
    on_evaluation: OnEvaluation | None = None,
    **others: Any,
) -> OmnibalEngine:
    """Train as the ds_config says, and leave checkpoints, metrics, loss curve and model in its ``run.output``.

    Every process of a launch calls it with the same arguments. A SIGTERM or Ctrl-C to any of them, or to the launcher,
    ends the run behind the step that runs, with a checkpoint of it and without evaluation and export.

    Args:
        config: The ds_config: its path or its content. This argument and the next two go to ``omnibal.initialize``.
        model: A transformers model in memory, in place of the ds_config's folder.
        dataset: Samples to train on, in place of the ds_config's data.
        held_out: Samples to evaluate on; by default the section's ``data.held_out``, if it names any.
        resume: Whether to go on from the newest whole checkpoint, or the name of the one to go on from.
        restart: Whether to delete the run's checkpoints and begin anew.
        on_evaluation: Called with the engine on all processes, every ``run.evaluate_every`` steps and at the end.
        **others: Further arguments of ``omnibal.initialize``: ``optimizer``, ``lr_scheduler``, ``on_gradient``.

    Returns:
        The engine, behind the last step that was trained.

    Raises:
        ConfigError: ``run.output`` has checkpoints and neither ``resume`` nor ``restart`` is asked for, or both are; it
            has none to go on from, or another run trains into it; else as ``omnibal.initialize``.
        OmnibalError: As ``engine.train_batch`` and ``engine.save_checkpoint``.
    """
    end_in_one_line()
    meet(get_accelerator().communication_backend_name())
    evaluates = held_out is not None or on_evaluation is not None
    workspace = run_on_all_ranks(lambda: _read(config, resume=resume, restart=restart, evaluates=evaluates))
    if resume:
        workspace = run_on_all_ranks(lambda: _under_own_plan(workspace))
    run = workspace.section.run
    checkpoints, tag = run.files.checkpoints, resume if isinstance(resume, str) else None
    with rank_zero_first(lambda: _claimed(run), doing="claims run.output"):
        check = partial(_check_checkpoints, run, tag, resume=bool(resume), restart=restart)
        rank_zero_only(check, doing="looks for checkpoints")
        engine = start(workspace, model, dataset, UserOptimizer(**others))
        del model  # its weights are copied
        if held_out is None and workspace.section.data.held_out:
            held_out = open_together(workspace, "held_out")
        evaluated = None if held_out is None else engine.held_out_loader(held_out)
        if resume:
            engine.load_checkpoint(checkpoints, tag, fall_back=True)
        if restart:
            rank_zero_only(lambda: _delete(checkpoints), doing="deletes checkpoints", where=engine.where)
        log = rank_zero_first(lambda: _begin(engine, workspace), doing="opens the log", where=engine.where)
        with EndRequest() as request:
            is_done = _train(engine, run, log, partial(_evaluate, engine, evaluated, log, on_evaluation), request)
        if is_done:
            rank_zero_only(lambda: _finish(run), doing="exports the model", where=engine.where)
    return engine


def _read(config: str | Path | dict[str, Any], *, resume: bool | str, restart: bool, evaluates: bool) -> Workspace:
    if resume and restart:
        raise ConfigError(f"resume must be False with restart, got {resume!r}; go on from a checkpoint, or begin anew")
    workspace = Workspace.read(config)
    every = workspace.section.run.evaluate_every
    if every and not evaluates and not workspace.section.data.held_out:
        raise ConfigError(
            f"omnibal.run.evaluate_every must be 0 without held-out data, got {every}; name some in "
            "omnibal.data.held_out"
        )
    return workspace


def _under_own_plan(workspace: Workspace) -> Workspace:
    """The ds_config of a run that goes on, with the plan that the run followed before where the new one cannot be."""
    own = workspace.section.run.files.run_plan
    if workspace.followed_plan is None or not own.is_file():
        return workspace
    before = Plan.load(own)
    # A plan with other limits makes other packs, in the middle of an epoch.
    with suppress(ConfigError):
        if (now := workspace.named_plan) is not None and now.limits == before.limits:
            return workspace
    if dist.get_rank() == 0:
        LOG.warning(
            "The run goes on under the plan that it followed before, %s; %s has other packs or is no plan: restart "
            "(--restart) begins anew under it",
            own,
            workspace.followed_plan,
        )
    return replace(workspace, overrides=replace(workspace.overrides, plan=before))


def _claimed(run: RunSection) -> ExitStack:
    """On rank 0, keep other runs out of ``run.output`` until this is closed: they would delete each other's files."""
    claim = ExitStack()
    if dist.get_rank() != 0:
        return claim
    try:
        run.files.folder.mkdir(parents=True, exist_ok=True)
        lock = claim.enter_context(run.files.lock.open("w"))
    except OSError as error:
        raise ConfigError(f"run.output must be a folder that can be written, got {error}") from error
    try:
        flock(lock, LOCK_EX | LOCK_NB)
        claim.callback(flock, lock, LOCK_UN)  # loader processes have the file open, too, and live longer
    except BlockingIOError:
        claim.close()
        raise ConfigError(
            f"run.output must be a folder that no other run trains into now, got {run.output}; name another one, or "
            "wait for that run's end"
        ) from None
    except OSError as error:  # a file system without locks
        LOG.warning("Nothing keeps other runs out of %s: %s", run.output, error)
    return claim


def _check_checkpoints(run: RunSection, tag: str | None, *, resume: bool, restart: bool) -> None:
    """Refuse a run that could not begin as it is asked to, before anything that takes long."""
    checkpoints = run.files.checkpoints
    # A run that was killed in its first save has left an unfinished folder, and DeepSpeed's scripts beside it.
    found = {path.name for path in checkpoints.iterdir() if path.is_dir()} if checkpoints.is_dir() else set()
    found = {name for name in found if not name.endswith(UNFINISHED)}
    if resume and not found:
        raise ConfigError(
            f"run.output must hold checkpoints to go on from, got {run.output} without any; begin without resume "
            "(--resume)"
        )
    if resume:
        choose(checkpoints, tag, fall_back=True, check=has_all_files)
    elif found and not restart:
        raise ConfigError(
            f"run.output must be a folder without checkpoints, got {run.output}; "
            "resume (--resume) goes on from the newest one, restart (--restart) deletes them and begins anew"
        )


def _delete(checkpoints: Path) -> None:
    left = delete_all(checkpoints)
    if left:
        names = ", ".join(path.name for path in left)
        LOG.warning("restart leaves in %s what omnibal did not write: %.500s", checkpoints, names)


def _begin(engine: OmnibalEngine, workspace: Workspace) -> MetricsLog | None:
    """On rank 0, say what runs, keep a named plan for when the run goes on, and open the log."""
    if engine.global_rank != 0:
        return None
    files, named = workspace.section.run.files, workspace.named_plan
    if named is None:
        files.run_plan.unlink(missing_ok=True)
    else:
        named.save(files.run_plan)
    with reporting("the table of the plan"):
        data = engine.loader.feed.summary() | {"parameters trained": trained_in_words(engine.resolved.trained)}
        if workspace.replaced_batch:
            data["the plan's batch, in place of"] = f"{workspace.replaced_batch} of the ds_config"
        Console(markup=False).print(run_table(engine.plan, engine.module.vlm.records, data))
    return MetricsLog(files.metrics, first_step=engine.global_steps, device=device_name(engine.device))


def _train(
    engine: OmnibalEngine,
    run: RunSection,
    log: MetricsLog | None,
    evaluate: Callable[[tqdm], None],
    request: EndRequest,
) -> bool:
    """Train to the end of the last epoch, or to ``max_steps``; rank 0 has a log and shows the progress bar."""
    # The memory of the second step is measured: by then the optimizer has its state. The result is whether the last
    # step was reached, or a signal ended the run before.
    second_step = engine.global_steps + 1
    last_step = run.max_steps or engine.global_steps + engine.loader.steps_left(run.epochs)
    first_step, timed = engine.global_steps, list[tuple[Step, float]]()
    bar = tqdm(
        total=last_step,
        initial=first_step,
        disable=log is None,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else LOG_SECONDS,
    )
    while engine.global_steps < last_step:
        started, done = perf_counter(), engine.global_steps - first_step
        if done == WARM_UP and engine.resolved.layout.encoder is None:
            engine.stage_times = StageTimes(engine.device, engine.plan.partition.layers(engine.stage_id))
        is_second = engine.global_steps == second_step
        batch_loss = _measured_batch(engine, log, bar) if is_second else engine.train_batch()
        loss, step = batch_loss.item(), engine.last_step
        assert step is not None, "train_batch sets it"
        if engine.stage_times is not None:
            timed.append((step, perf_counter() - started - engine.data_seconds))
        if log is not None:
            with reporting("the line about a step"):
                _log_step(engine, log, bar, loss, perf_counter() - started)
        if engine.stage_times is not None and done + 1 == STEPS:
            passes, engine.stage_times = engine.stage_times.gathered(), None
            if log is not None:
                with reporting("calibration of counted costs"):
                    _calibrate(engine, passes, timed, log, bar)
        is_last = engine.global_steps == last_step
        ends = any_rank(request.signal is not None, engine.device) and not is_last
        if is_last or ends or _due(engine.global_steps, run.save_every):
            beside = run.async_save and not ends
            engine.save_checkpoint(run.files.checkpoints, keep=run.keep, async_save=beside)
        if ends:
            bar.close()
            if log is not None:
                LOG.warning("The run ends early, as asked: step %d is saved, --resume goes on", engine.global_steps)
            return False
        if is_last or _due(engine.global_steps, run.evaluate_every):
            # An evaluation runs a caller's code and reads other data: what fails there must cost no step.
            engine.finish_saving()
            evaluate(bar)
    bar.close()
    return True


def _measured_batch(engine: OmnibalEngine, log: MetricsLog | None, bar: tqdm) -> Tensor:
    loss, peaks = engine.measured_batch()
    if log is not None:
        with reporting("the line about memory"):
            bar.write(peak_text(peaks.step, peaks.overhead, engine.plan))
    return loss


def _log_step(engine: OmnibalEngine, log: MetricsLog, bar: tqdm, loss: float, seconds: float) -> None:
    step = engine.last_step
    assert step is not None, "train_batch sets it"
    text = log.training_step(
        step=engine.global_steps,
        epoch=step.epoch,
        loss=loss,
        learning_rate=engine.get_lr()[0],
        seconds=seconds,
        data_seconds=engine.data_seconds,
        samples=step.num_samples,
        llm_tokens=step.llm_tokens,
        balance=step.balance(),
        shares=dict(step.shares),
        oversized=dict(step.oversized),
        left_out=step.left_out,
    )
    bar.set_postfix_str(text, refresh=False)
    bar.update()


def _calibrate(
    engine: OmnibalEngine, passes: list[TimedPass], timed: list[tuple[Step, float]], log: MetricsLog, bar: tqdm
) -> None:
    """Correct counted costs by the steps that were timed, log them, and say by how much a plan's promise was off."""
    resolved, plan = engine.resolved, engine.plan
    name, frozen = device_name(engine.device), resolved.section.model.frozen
    device, dtype, degree = device_to_count(name), resolved.layout.precision, resolved.layout.num_tensor
    counted = analytic_profile(resolved.vlm.records, device, dtype=dtype, frozen=frozen, tensor_parallel=degree)
    found = calibrate(counted, passes, plan.recompute, device=name)
    if found is None:
        return
    log.calibration(engine.global_steps, found)
    told = f"steps {engine.global_steps - len(timed) + 1} to {engine.global_steps} measured: {found}"
    if plan.predicted is not None and plan.cluster is not None:
        profile = found.apply(counted)
        now = fmean(plan.simulate(profile, list(step.load)).step_seconds for step, _ in timed)
        told += (
            f"; a step was promised to take {plan.predicted.step_seconds:.3g} s, now {now:.3g} s by measured costs, "
            f"and took {median(seconds for _, seconds in timed):.3g} s"
        )
    bar.write(f"{told}\n`omnibal plan CONFIG --from-run {log.path.parent} --write` plans for these costs")


def _evaluate(
    engine: OmnibalEngine,
    held_out: Loader | None,
    log: MetricsLog | None,
    on_evaluation: OnEvaluation | None,
    bar: tqdm,
) -> None:
    if held_out is not None:
        result = engine.evaluate(held_out)
        if log is not None:
            with reporting("the line about an evaluation"):
                step = engine.global_steps
                bar.write(log.evaluation(step, loss=result.loss, accuracy=result.accuracy, samples=result.samples))
    if on_evaluation is not None:
        engine.settle_weights()
        on_evaluation(engine)


def _finish(run: RunSection) -> None:
    """Export the trained model, draw the loss curve, and say what is where."""
    files = run.files
    checkpoint = latest_checkpoint(files.checkpoints)
    model = export_newest(files)
    written = {"metrics": files.metrics, "checkpoint": checkpoint, "model": model}
    with reporting("reading of the run's log"):
        metrics = read_metrics(files.metrics)
        if not metrics.steps:  # the log is gone, and the checkpoint is of the last step
            return
        with reporting("the loss curve"):
            plot_training(metrics, files.loss_curve)
            written["loss curve"] = files.loss_curve
        Console(markup=False).print(training_table(metrics, written))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    begin = parser.add_mutually_exclusive_group()
    resume = "go on from the run's newest whole checkpoint, or from the one of that name"
    begin.add_argument("--resume", nargs="?", default=False, const="", metavar="TAG", help=resume)
    begin.add_argument("--restart", action="store_true", help="delete the run's checkpoints and begin anew")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    if arguments.deepspeed_config is None:
        parser.error("--deepspeed_config must name a ds_config, such as ds_configs/quickstart.json")
    try:
        train(
            arguments.deepspeed_config,
            resume=arguments.resume or arguments.resume == "",  # "" where no tag is named
            restart=arguments.restart,
        )
    except OmnibalError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
