"""DeepSpeed's PipelineEngine fed with packs: a loss exact over the tokens of a step, finite steps, honest counts.

Its parts stand one on the other: `TableEngine` (schedules and transfers), `CheckpointedEngine` (saving and loading),
`OmnibalEngine` (a step).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import isfinite
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime import engine as deepspeed_engine
from torch import Tensor

from omnibal.config import settings_of
from omnibal.data.epoch import Step
from omnibal.engine.checkpointed import CheckpointedEngine
from omnibal.engine.grid import replaced
from omnibal.engine.loader import Loader, Steps, read_step
from omnibal.engine.measured import StagePeaks, StageTimes, measure_step
from omnibal.engine.module import Joined
from omnibal.engine.reading import Batch, VlmDataset
from omnibal.engine.resolve import OnGradient, ResolvedRun
from omnibal.engine.samples import CheckedSamples, SampleRules, checked_lengths
from omnibal.engine.settings import Settings
from omnibal.engine.table import floats_of
from omnibal.errors import ConfigError, OmnibalError, reporting, said
from omnibal.feeds.feed import Share
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.loss import EVALUATION_STATISTICS, targets_of
from omnibal.plan import Plan
from omnibal.ranks import gather, rank_zero_first
from omnibal.ranks.failures import failures_reach_all_ranks, keep_watchdog, lost_ranks_named, naming_lost_ranks
from omnibal.ranks.watchdog import WORK, Watchdog
from omnibal.vlm.payload import Payload, counts_of, note_counts

MicroBatch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
# A pack as it is read, on the host: what the first stage takes, and labels with the weight of a token.
ReadPack = tuple[Payload | None, tuple[Tensor, ...]]
LOG: Final = logging.getLogger(__name__)
# Steps in a row without finite gradients after which a run ends: one broken sample is survived, a diverged run not.
MOST_SKIPPED: Final = 5
MOST_NAMED: Final = 12  # samples in a message


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean of a target token
    accuracy: float  # share of the samples whose answer greedy decoding would give exactly
    samples: int  # samples with an answer


class _ReportingMonitor(MonitorMaster):  # type: ignore[misc]
    """DeepSpeed's monitor of TensorBoard, CSV files, wandb and comet on rank 0; what fails there ends no run."""

    def __init__(self, monitor_config: Any) -> None:
        self.enabled = False
        with reporting("DeepSpeed's monitor"):
            super().__init__(monitor_config)

    def write_events(self, event_list: Any) -> None:
        with reporting("DeepSpeed's monitor"):
            super().write_events(event_list)


def samples_in_words(samples: Sequence[int]) -> str:
    """Sample numbers behind other words in a message; nothing if there are none.

    >>> samples_in_words([4, 17]), samples_in_words(range(20))
    (', samples 4, 17', ', samples 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 8 more')
    """
    more = f" and {len(samples) - MOST_NAMED} more" if len(samples) > MOST_NAMED else ""
    return f", samples {', '.join(map(str, samples[:MOST_NAMED]))}{more}" if samples else ""


class OmnibalEngine(CheckpointedEngine):
    """Trains a VlmPipelineModule on the packs of a loader.

    ``train_batch()`` runs one optimizer step. Its loss is the mean over all target tokens of the step, whatever the
    packs and ranks they lie on. ``global_samples`` counts samples, not packs, so that DeepSpeed's monitor does too.

    Args:
        plan: What the run follows; ``module`` was built from its partition and recompute levels. Under ``"1f1b"``
            DeepSpeed's own schedule runs.
        spare: Weights that no layer has, by name, on rank 0: checkpoints keep them.
    """

    _skipped_in_a_row = 0

    def __init__(
        self,
        *,
        resolved: ResolvedRun,
        plan: Plan,
        loader: Loader,
        spare: Mapping[str, Tensor] = MappingProxyType({}),
        on_gradient: OnGradient | None = None,
        **deepspeed_arguments: Any,
    ) -> None:
        with replaced(deepspeed_engine, MonitorMaster=_ReportingMonitor):
            super().__init__(
                table=plan.make_schedule() if plan.runs_table else None,
                pending_bytes=None if plan.predicted is None else [s.pending_bytes for s in plan.predicted.stages],
                **deepspeed_arguments,
            )
        self.resolved, self.spare = resolved, dict(spare)
        # Before the first step, and before a checkpoint is loaded: both change what the optimizer's groups hold.
        self.settings = Settings.of(
            settings_of(self._config._param_dict, resolved.section), self.basic_optimizer, self.lr_scheduler
        )
        self.plan, self.loader = plan, loader
        self.last_step: Step | None = None
        self._pack_losses: list[Tensor] = []  # of this step's packs, on the last stage
        self.data_seconds = 0.0  # how long the slowest rank waited for its packs of the last step
        self.stage_times: StageTimes | None = None  # where a run's first steps are timed
        self._on_gradient = on_gradient
        if hasattr(self.optimizer, "check_grad_overflow") and not self.bfloat16_enabled():
            self.optimizer.check_grad_overflow = True  # in float32 ZeRO's own would take NaN into the weights
        seconds, dog = resolved.section.run.watchdog_seconds, None
        if seconds:
            layout = resolved.layout
            names = [f"rank {rank}, stage {layout.position(rank).stage}" for rank in range(layout.num_devices)]
            dog = Watchdog(self.global_rank, names, lambda *of: samples_in_words(self._samples_of(*of)), seconds)
        keep_watchdog(dog)

    def train_batch(self, data_iter: Steps | None = None) -> Tensor:
        """Train on the loader's next step, all ranks together; the mean loss of its target tokens, the same on all."""
        return self._train(nullcontext(), data_iter)

    def measured_batch(self) -> tuple[Tensor, StagePeaks]:
        """As ``train_batch``, and measure the memory of the step, which takes longer on a CPU."""
        return measure_step(self, self._train)

    @naming_lost_ranks
    def _train(self, meter: AbstractContextManager[object], steps: Steps | None = None) -> Tensor:
        """One step; what it computes and receives, without the reading of its samples, runs under the meter."""
        self._finish_written_save()
        with WORK.within(self.global_steps + 1):
            step, packs = self._next_step(self.loader, steps)
            self.last_step, self._pack_losses = step, []
            # Every step of every stage and replica draws dropout masks from a stream of its own, so that a resumed run
            # draws the same without stored generator states. Tensor ranks share it, or whole weights would differ.
            position = self.resolved.layout.position(self.global_rank)
            first = self.resolved.layout.rank(position.stage, position.replica)
            stream = [self.resolved.section.model.seed, self.global_steps, first]
            torch.manual_seed(np.random.SeedSequence(stream).generate_state(1)[0])
            # DeepSpeedEngine._take_model_step adds train_batch_size(), one a pack, when the optimizer has stepped.
            self.global_samples += step.num_samples - self.train_batch_size()
            skipped = self.skipped_steps
            with meter, failures_reach_all_ranks(where=self.where), lost_ranks_named(self.where):
                # PipelineEngine.train_batch runs _train_schedule, which takes a micro-batch of the iterator per forward
                # pass of the first and of the last stage, then averages the loss (_aggregate_total_loss).
                loss: Tensor = super().train_batch(iter(self._micro_batches(packs)))
            if self.stage_times is not None:
                self.stage_times.end_step(lambda: step.load[position.replica])
            self._check_step(loss, self.skipped_steps - skipped)
            if self.global_rank == 0 and self.monitor.enabled:
                with reporting("DeepSpeed's monitor"):
                    balance = step.balance().items()
                    events = [(f"Train/Balance/{name}", value, self.global_samples) for name, value in balance]
                    self.monitor.write_events(events)
            return loss

    def _samples_of(self, rank: int, micro_batch: int) -> list[int]:
        """The samples of a rank's micro-batch of the last step; none of a stream."""
        layout, step = self.resolved.layout, self.last_step
        if step is None or not isinstance(self.loader, Loader):
            return []
        position = layout.position(rank)
        return self.loader.samples_of(step, Share(position.replica, layout.shape(position.stage)[0]), micro_batch)

    def held_out_loader(self, dataset: VlmDataset) -> Loader:
        """A loader of held-out samples for ``evaluate``, all ranks together."""
        lengths = rank_zero_first(
            lambda: checked_lengths(dataset, "held-out data"), doing="measures held-out samples", where=self.where
        )
        layout = self.resolved.layout
        replica = layout.position(self.global_rank).replica
        sampler = BalancedBatchSampler(
            lengths,
            self.plan.limits,
            num_replicas=layout.num_replicas,
            micro_batches=self.plan.micro_batches,
            rank=replica % layout.num_replicas,  # encoders read by their share alone
        )
        rules, broken = SampleRules.of(self.module.vlm), self.resolved.section.data.broken
        return self.loader.over(CheckedSamples(dataset, lengths, rules, broken), sampler)

    @naming_lost_ranks
    def evaluate(self, loader: Loader) -> Evaluation:
        """Measure loss and accuracy on one epoch of the packs of a ``held_out_loader``, all ranks together."""
        if loader is self.loader:
            raise ConfigError(
                "loader must be of held-out samples, got that of training; engine.held_out_loader(dataset) makes one"
            )
        training_iterator, totals = self.data_iterator, torch.zeros(len(EVALUATION_STATISTICS), dtype=torch.float64)
        self.module.eval()
        for _ in range(loader.steps_per_epoch):
            with WORK.within():
                _, packs = self._next_step(loader)
                # PipelineEngine._next_batch reads from this iterator, on the first and the last stage.
                with torch.no_grad(), failures_reach_all_ranks(where=self.where), lost_ranks_named(self.where):
                    self.set_dataiterator(iter(self._micro_batches(packs)))
                    # PipelineEngine._exec_forward_pass adds what the module's loss_fn returns to total_loss, on the
                    # last stage, if _compute_loss is set, as train_batch does.
                    self.total_loss, self._compute_loss = None, True
                    self._run_forward_alone(len(packs) or loader.micro_batches)
                    if self.total_loss is not None:
                        totals += self.total_loss.cpu()
        self.module.train()
        self.set_dataiterator(training_iterator)
        # Sums over the last stages of all replicas, which every rank learns: the other stages bring zeros, and of
        # tensor ranks, which have the same, the first one brings them.
        totals = totals.to(self.device) * (self.module.ranks.rank == 0)
        dist.all_reduce(totals)
        loss, targets, exact, samples = totals.tolist()
        return Evaluation(loss / max(targets, 1), exact / max(samples, 1), int(samples))

    def _next_step(self, loader: Loader, steps: Steps | None = None) -> tuple[Step, list[ReadPack]]:
        """Read a step's packs; each knows what a token weighs among those of the whole step."""
        step, batches, targets, self.data_seconds = read_step(
            loader, steps, layout=self.resolved.layout, rank=self.global_rank, device=self.device, where=self.where
        )
        if targets == 0 and self.global_rank == 0:
            LOG.warning("labels must name targets, got none in a whole step (%d of epoch %d)", step.index, step.epoch)
        # PipelineEngine._aggregate_total_loss averages over micro-batches and replicas; this weight makes that an
        # average over tokens, and as much of the gradients.
        weight = self.micro_batches * self.dp_world_size / max(targets, 1)
        return step, [self._pack(batch, weight) for batch in batches]

    def _pack(self, batch: Batch, weight: float) -> ReadPack:
        inputs = None
        if self.is_first_stage():
            inputs = Payload.of_pack(batch, self.resolved.dtype)
            note_counts([inputs.cu_seq_lens], self.module.count(batch))
        return inputs, (*targets_of(batch["labels"]).values(), torch.tensor(weight, dtype=torch.float32))

    def _micro_batches(self, packs: Sequence[ReadPack]) -> list[MicroBatch]:
        """What the first and the last stage take of a step; with a spread encoder all ranks together."""
        inputs = [each for each, _ in packs if each is not None]
        if self.spread is not None:
            inputs = self.spread.encode(inputs)
        sent = self.module.vlm.sent_tensors(self.module._local_start)
        flat = [sent.flatten(each) for each in inputs] or [()] * len(packs)  # stages behind the first one take labels
        return [(tensors, labels) for tensors, (_, labels) in zip(flat, packs, strict=True)]

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        # PipelineEngine's own clones on the host first, into memory that a device copies only while the host waits.
        inputs, targets = self._next_batch()
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = self._on_device(inputs)
            note_counts(self.pipe_buffers["inputs"][buffer_id], counts_of(inputs))
        if self.is_last_stage():
            self.pipe_buffers["labels"][buffer_id] = self._on_device(targets)

    def _on_device(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        # PipelineEngine's own hands the module clones of the inputs, of which no counts are noted.
        self.module.counts = counts_of(self.pipe_buffers["inputs"][buffer_id])
        if self.is_last_stage():
            self.module.targets = dict(
                zip(("target_rows", "targets"), self.pipe_buffers["labels"][buffer_id], strict=False)
            )
        with self._timed(False, self.micro_batches - self._forwards_left):
            super()._exec_forward_pass(buffer_id)
        if self.is_last_stage() and self.module.training:
            self._pack_losses.append(self.loss.detach())

    def _timed(self, is_backward: bool, micro_batch: int) -> AbstractContextManager[object]:
        times = self.stage_times if self.module.training else None
        return nullcontext() if times is None else times.time(is_backward, micro_batch)

    def _run_weight_gradients(self, micro_batch: int) -> None:
        with self._timed(True, micro_batch):
            super()._run_weight_gradients(micro_batch)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        # PipelineEngine's own calls backward once for each float in the outputs, and runs the layers as often.
        floats = [] if self.is_last_stage() else floats_of(self.pipe_buffers["outputs"][buffer_id])
        if len(floats) > 1:
            root: Tensor = Joined.apply(self.grad_layer, *floats)  # type: ignore[no-untyped-call]
            self.pipe_buffers["outputs"][buffer_id], self.grad_layer = (root,), (torch.ones_like(root),)
        with self._timed(True, self.micro_batches - self._backwards_left):
            super()._exec_backward_pass(buffer_id)
        # On the last stage PipelineEngine keeps these, and with their graph a micro-batch's input and its gradient.
        self.pipe_buffers["outputs"][buffer_id] = None
        self.loss = self.loss.detach()

    def _allocate_or_extend_buffers(self, idx: int, shape: list[int], dtype: torch.dtype) -> Tensor:
        # PipelineEngine reuses receive buffers by size alone, across dtypes and between activations and gradients,
        # which breaks tuples of mixed dtypes that change from pack to pack. A fresh tensor costs nothing.
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _exec_reduce_grads(self) -> None:
        if self.exchange or self.dp_world_size > 1 or self.zero_optimization() or self.using_bf16_optimizer:
            super()._exec_reduce_grads()
        else:
            # One replica: DeepSpeedEngine.allreduce_gradients would copy all gradients together, times one, and back.
            # What the optimizer needs of it is that parameters without a gradient get zeros.
            self._get_gradients_for_reduction()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        # The schedule's last instructions are ReduceTiedGrads, ReduceGrads and OptimizerStep: gradients are whole now.
        if self._on_gradient is not None:
            for name, gradient in self.module.gradients():
                self._on_gradient(name, gradient)
        # Under ZeRO 1 or bf16 DeepSpeed's optimizers leave out steps whose gradients are not finite (their overflow),
        # and DeepSpeedEngine._take_model_step counts them. A plain optimizer would step: the same is done here.
        if self.optimizer is not self.basic_optimizer or self._gradients_are_finite():
            super()._exec_optimizer_step(lr_kwargs)
            return
        self.zero_grad()
        self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    def _gradients_are_finite(self) -> bool:
        found = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        # An infinity norm is finite if every element is. The least of all ranks' answers is 0 if one rank says no.
        largest = torch.stack(torch._foreach_norm(found, float("inf")))
        finite = largest.isfinite().all().to(torch.int32)
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    def _check_step(self, loss: Tensor, skipped: int) -> None:
        """Say that the step was skipped, if it was, and end a run that has diverged; all ranks together."""
        # The last stage broadcasts its loss (_aggregate_total_loss), so all ranks see one value.
        value = loss.item()
        if isfinite(value) and not skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        last, samples = self.global_steps, self._not_finite()
        text = f"loss and gradients must be finite, got others in step {last} (loss {value}{samples}); "
        text += "the step is skipped, weights stay" if skipped else "weights took it in"
        if self.resolved.section.run.not_finite == "error":
            raise OmnibalError(f"{text}, and omnibal.run.not_finite is 'error'")
        if self.global_rank == 0:
            LOG.warning(text)
        if self._skipped_in_a_row == MOST_SKIPPED:
            raise OmnibalError(
                f"loss and gradients must be finite, got others in each of the last {MOST_SKIPPED} steps (loss {value} "
                f"in step {last}{samples}); look for NaN in the samples, or lower the learning rate"
            )

    def _not_finite(self) -> str:
        """The samples of packs whose loss is not finite; of the whole step, where only gradients are not."""
        own = [number for number, loss in enumerate(self._pack_losses) if not isfinite(loss.item())]
        each = [self._samples_of(self.global_rank, number) for number in range(len(self._pack_losses))]
        of_ranks = gather(([sample for number in own for sample in each[number]], [*chain(*each)]))
        bad, whole = (sorted({*chain(*kind)}) for kind in zip(*of_ranks, strict=True))
        return samples_in_words(bad) or (whole and f"{samples_in_words(whole)} in the step") or ""

    # What follows says in one line what DeepSpeed cannot do, or what would be wrong here.

    def eval_batch(self, *_: Any, **__: Any) -> Tensor:
        """Refused: DeepSpeed's takes a mean over packs, whatever they hold."""
        raise ConfigError("eval_batch must not be called; engine.evaluate(engine.held_out_loader(dataset)) evaluates")

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refused: packs are arranged for the micro-batches of the ds_config."""
        raise ConfigError(
            f"train_batch_size must stay as it is, got {train_batch_size}; set gradient_accumulation_steps in the "
            "ds_config and resume"
        )

    set_train_micro_batch_size = set_train_batch_size

    # DeepSpeedEngine.__init__ calls these three.

    def _do_sanity_check(self) -> None:
        try:
            super()._do_sanity_check()
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"ds_config must be one that DeepSpeed takes, got: {said(error)}") from error

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        return self._made("optimizer", partial(super()._configure_basic_optimizer, model_parameters))

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        return self._made("scheduler", partial(super()._scheduler_from_config, optimizer))

    def _made(self, key: str, make: Callable[[], Any]) -> Any:
        """What DeepSpeed makes of a ds_config's optimizer or scheduler."""
        try:
            return make()
        except Exception as error:  # assertions, and what torch's own say of parameters
            name, params = getattr(self, f"{key}_name")(), getattr(self, f"{key}_params")()
            raise ConfigError(
                f"{key} of a ds_config must be one that DeepSpeed can make, got {name} with {params}: {said(error)}"
            ) from error
