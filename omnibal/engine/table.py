"""DeepSpeed's PipelineEngine that also runs a schedule table: split backward passes, transfers beside computations.

PipelineEngine runs a list of instructions through a table of methods (``_INSTRUCTION_MAP``). `TableSchedule` gives it
one instruction of ours per entry of the schedule; `TableEngine` runs the pass with DeepSpeed's own methods and moves
tensors by `omnibal.engine.transfers`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Final, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from omnibal.engine.grid import count_stages_once, no_handshake
from omnibal.engine.reduction import exchange_of, sums_of
from omnibal.engine.spread import SpreadEncoder, states_on_all_ranks
from omnibal.engine.transfers import DESCRIPTION, DtypeAndSize, StageLinks, describe, read_description, settle
from omnibal.pipeline.schedule import Instruction, Operation, Schedule
from omnibal.ranks.watchdog import WORK
from omnibal.vlm.payload import PackCounts, WeightGradients, defer_linears, note_counts
from omnibal.vlm.tensor import add_up, partial_parameters


class RunEntry(deepspeed_schedule.PipeInstruction):
    """Run an entry of a schedule table, and the transfers that belong to it."""


# DeepSpeed's instructions about micro-batches: whether it is of a forward pass, comes behind a pass, waits for a peer.
# What an instruction says of its micro-batch is a buffer. In 1F1B it is the next one to run forward, or backward, and
# behind a pass the one that has just run.
_NOTED: Final[dict[type, tuple[bool, bool, bool]]] = {
    deepspeed_schedule.LoadMicroBatch: (True, False, False),
    deepspeed_schedule.RecvActivation: (True, False, True),
    deepspeed_schedule.ForwardPass: (True, False, False),
    deepspeed_schedule.SendActivation: (True, True, True),
    deepspeed_schedule.RecvGrad: (False, False, True),
    deepspeed_schedule.BackwardPass: (False, False, False),
    deepspeed_schedule.SendGrad: (False, True, True),
}


def _method(kind: type, name: str) -> Callable[..., None]:
    """An instruction that notes its kind for the watchdog and calls the engine's method of this name."""
    is_forward, is_behind, waits = _NOTED.get(kind, (False, False, True))

    def run(engine: Any, **arguments: Any) -> None:
        if kind is not RunEntry:  # which notes its own parts
            left = engine._forwards_left if is_forward else engine._backwards_left
            number = engine.micro_batches - left - is_behind if kind in _NOTED and WORK.step is not None else None
            WORK.at(kind.__name__, number, waits=waits)
        getattr(engine, name)(**arguments)

    return run


class TableSchedule(deepspeed_schedule.PipeSchedule):
    """One stage of a schedule table: its entries one after another, then the instructions that end a step."""

    # Without a table micro-batches run forward alone, with a table's transfers, and no step ends.

    def __init__(self, micro_batches: int, num_stages: int, stage: int, table: Schedule | None = None) -> None:
        super().__init__(micro_batches, num_stages, stage)
        self._table = table

    def steps(self) -> Iterator[list[Any]]:
        forwards = [Instruction(Operation.F, micro_batch) for micro_batch in range(self.micro_batches)]
        for operation, micro_batch in forwards if self._table is None else self._table.stages[self.stage_id]:
            yield [RunEntry(operation=operation, micro_batch=micro_batch)]
        if self._table is None:
            return
        # The end of a step as in DeepSpeed's TrainSchedule; every stage comes to it behind its own last pass.
        yield [
            deepspeed_schedule.ReduceTiedGrads(),
            deepspeed_schedule.ReduceGrads(),
            deepspeed_schedule.OptimizerStep(),
        ]

    def num_pipe_buffers(self) -> int:
        return int(self.micro_batches)  # the number of a micro-batch is the index of its buffer


class BehindFrozenFront(deepspeed_schedule.PipeSchedule):
    """DeepSpeed's own schedule of a stage, without the backward passes and gradients of a frozen front."""

    def __init__(self, whole: deepspeed_schedule.PipeSchedule, frozen_stages: int) -> None:
        super().__init__(whole.micro_batches, whole.stages, whole.stage_id)
        self._whole = whole
        self._left_out: tuple[type, ...] = ()
        if whole.stage_id <= frozen_stages:
            self._left_out += (deepspeed_schedule.SendGrad,)
        if whole.stage_id < frozen_stages:
            self._left_out += (deepspeed_schedule.RecvGrad, deepspeed_schedule.BackwardPass)

    def steps(self) -> Iterator[list[Any]]:
        # On both sides of a cut: the first trained stage sends no gradient, and the last frozen one awaits none.
        for step in self._whole.steps():
            yield [instruction for instruction in step if not isinstance(instruction, self._left_out)]

    def num_pipe_buffers(self) -> int:
        return int(self._whole.num_pipe_buffers())  # the instructions index as many


class TableEngine(PipelineEngine):
    """Runs training steps by a table of all stages, or by DeepSpeed's own 1F1B, whose transfers block, without one.

    In the table micro-batches pass each stage in order, forward and backward. ``pending_bytes`` is for each stage the
    most that weight gradients may keep while they wait; None is no limit.
    """

    # DeepSpeed's methods run the passes. Weight gradients of linear layers wait in weight_gradients for their W. If the
    # first stages train nothing (module.frozen_stages), they run forward only, keep nothing, and get no gradient.
    #
    # Who sends what when, under a table: a stage starts to send an activation behind its forward pass and a gradient
    # behind its backward pass, and waits for no send; it receives an activation before its forward pass. It posts the
    # receive of the next gradient right after it has taken one, so that the gradient arrives during computations. Only
    # a step's first receive is posted later, exactly where the blocking order would receive it: earlier, and on a GPU
    # the waiting receive holds up the host when it synchronises with the device; later, and the sender may wait before
    # it takes the next activation.

    # PipelineEngine._exec_schedule looks for what an instruction runs in this mapping, whose functions a subclass would
    # have to replace one by one: here each finds the method by its name.
    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **{kind: _method(kind, run.__name__) for kind, run in PipelineEngine._INSTRUCTION_MAP.items()},
        RunEntry: _method(RunEntry, "_run_entry"),
    }

    def __init__(
        self, *, table: Schedule | None, pending_bytes: Sequence[int] | None, **deepspeed_arguments: Any
    ) -> None:
        # PipelineEngine.__init__ makes the optimizer, and lets neighbouring stages send each other a number.
        layout = deepspeed_arguments["model"].layout
        own = no_handshake() if layout.has_units else states_on_all_ranks() if layout.is_spread else nullcontext()
        with own:
            super().__init__(**deepspeed_arguments)
        self.spread = SpreadEncoder(self.module, self.device) if layout.is_spread else None
        front = self.module.frozen_stages
        self._runs_backward, self._sends_gradients = self.stage_id >= front, self.stage_id > front
        stages = self.stage_id, min(self.stage_id + 1, self.num_stages - 1)
        replicas, replicas_behind = (layout.shape(stage)[0] for stage in stages)
        # Each stage averages over its own replicas, and the next one scales the loss to be averaged over its own.
        self._gradient_scale = replicas / replicas_behind
        if layout.has_units:
            count_stages_once(self.optimizer, replicas // layout.num_columns)
        self.table = None if table is None else table.with_frozen_front(front)
        self.pending_bytes = None if pending_bytes is None else pending_bytes[self.stage_id]
        self.sums = sums_of(self.optimizer)
        self.exchange = exchange_of(self, self.sums)
        self.module.before_layer = self._before_layer if self.exchange else None
        self.weight_gradients = WeightGradients(budget_bytes=None if table else 0, accumulate=self.sums.add)
        self._forwards_left = self._backwards_left = 0
        self._losses: dict[int, Tensor] = {}
        self._counts_received: PackCounts | None = None
        # Micro-batches and shapes of sent outputs, whose gradients no receive is posted for yet.
        self._awaited: deque[tuple[int, list[DtypeAndSize]]] = deque()
        self.links: StageLinks | None = None
        if table is not None and self.table is not None:
            self._in_flight = table.in_flight[self.stage_id]
            self._in_flight_before = _in_flight_before(table, self.stage_id)
            self._first_gradient_before = _behind_first_gradient(self.table.blocking[self.stage_id])
            for layer in self.module.forward_funcs:
                defer_linears(layer, self.weight_gradients)
            self.links = StageLinks(layout, self.global_rank, self.device)
            self.links.try_out()

    def _train_schedule(self) -> Any:
        # DeepSpeed's hook for schedules, which PipelineEngine.train_batch runs and DualPipeV overrides, too: only what
        # instructions do (_INSTRUCTION_MAP) has no hook. Evaluation runs an InferenceSchedule of DeepSpeed's.
        self._forwards_left = self._backwards_left = self.micro_batches
        if self.table is not None:
            micro_batches = self.table.micro_batches_of(self.stage_id)
            return TableSchedule(micro_batches, self.num_stages, self.stage_id, self.table)
        front, whole = self.module.frozen_stages, super()._train_schedule()
        return BehindFrozenFront(whole, front) if front else whole

    def _run_forward_alone(self, micro_batches: int) -> None:
        if not self.module.layout.has_units:
            self._exec_schedule(self._inference_schedule(micro_batches))
            return
        # DeepSpeed's InferenceSchedule pairs equal replicas. A stage that runs no backward pass keeps nothing.
        runs_backward, self._runs_backward = self._runs_backward, False
        self._exec_schedule(TableSchedule(micro_batches, self.num_stages, self.stage_id))
        self._runs_backward = runs_backward
        self._losses.clear()

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        super()._exec_schedule(pipe_schedule)
        # The next step numbers its micro-batches from 0 again: no send of this one may still be under way.
        if self.links is not None:
            self.links.settle(pipe_schedule.micro_batches)

    def _aggregate_total_loss(self) -> Tensor:
        if not self.module.layout.has_units:
            return cast(Tensor, super()._aggregate_total_loss())
        # PipelineEngine's own has the last rank of a pipe group broadcast the loss; a column may have several.
        loss = torch.zeros((), device=self.device)
        if self.is_last_stage():
            loss += self.total_loss.detach() / (self.micro_batches * self.dp_world_size)
        dist.all_reduce(loss)
        self.dp_group_loss = loss
        return loss

    def _exec_reduce_tied_grads(self) -> None:
        # The first instruction behind the passes, before replicas add up gradients.
        assert not len(self.weight_gradients), "a gradient that still waits would be missing from the ranks' sum"
        if not self._runs_backward:  # DeepSpeed's optimizers fail on the norm of no gradient at all
            for placeholder in self.module.placeholders:
                self.weight_gradients.accumulate(placeholder, torch.zeros_like(placeholder))
        # The passes of the stage have ended: start the layers whose hook has not run, as with packs without images.
        self._start_reductions(len(self.module.encoder))
        super()._exec_reduce_tied_grads()
        if self.module.ranks.size > 1:
            partial_sums = {each: self.sums.take(each) for each in partial_parameters(self.module)}
            add_up(partial_sums, self.module.ranks)
        if self.spread is not None:
            self.spread.backward()
            self._start_reductions(0)

    def _start_reductions(self, first: int) -> None:
        if self.exchange is not None:
            for layer in reversed(range(first, self.exchange.gradients.left)):
                self._start_reduction(layer)

    def _exec_reduce_grads(self) -> None:
        if self.exchange is None:
            super()._exec_reduce_grads()
        else:
            self.exchange.gradients.finish()

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self._forwards_left -= 1
        super()._exec_forward_pass(buffer_id)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        super()._exec_backward_pass(buffer_id)
        self._backwards_left -= 1
        # Where DeepSpeed reduces gradients itself, nothing takes the sums apart.
        if self._backwards_left == 0 and (self.exchange is not None or self.module.ranks.size > 1):
            self.sums.end_passes()

    def _before_layer(self, layer: int, hidden: Tensor) -> None:
        """Wait for a layer's weights; in a step's last pass through it, let its gradients leave when it is done."""
        assert self.exchange is not None
        self.exchange.weights.settle(layer)
        is_spread, start = layer < len(self.module.encoder), partial(self._start_reduction, layer)
        if (is_spread or self._forwards_left == 0) and hidden.requires_grad:
            # The hook runs when the gradient of the layer's input is known. Autograd runs later operations first, so
            # nothing of this layer or a later one is left then, but for weight gradients that wait: the start of the
            # reduction queues behind those. A spread encoder runs backward once, and none of its gradients wait.
            then = start if is_spread else partial(self.weight_gradients.defer, start)
            hidden.register_hook(lambda gradient: then())  # type: ignore[no-untyped-call]

    def _start_reduction(self, layer: int) -> None:
        assert self.exchange is not None
        self.exchange.gradients.start(layer)

    def settle_weights(self) -> None:
        """Wait for updated weights that other replicas still send.

        They arrive while the next step begins: whoever reads weights between steps and outside the engine's passes
        (saving, say) calls this method first.
        """
        if self.exchange is not None:
            self.exchange.weights.settle()

    def _send_tensor_meta(self, buffer: tuple[Tensor, ...], recv_stage: int) -> None:
        # With dynamic_shape PipelineEngine calls this before each pack's tensors, and the next method on the other end.
        p2p.send(describe(buffer).to(self.device, non_blocking=True), recv_stage)

    def _recv_tensor_meta(self, send_stage: int) -> tuple[Tensor, ...]:
        # One message in place of PipelineEngine's, which reads one number after another from the device.
        dtype, size = DESCRIPTION
        description = torch.empty(size, dtype=dtype, device=self.device)
        p2p.recv(description, send_stage)
        shapes, self._counts_received = read_description(description)
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in shapes)

    def _exec_recv_activations(self, buffer_id: int) -> None:
        super()._exec_recv_activations(buffer_id)
        self.pipe_recv_buf = None  # PipelineEngine keeps this buffer for ever, though it has cloned it
        received = self.pipe_buffers["inputs"][buffer_id]
        self._require_gradients(received)
        note_counts(received, self._counts_received)

    def _require_gradients(self, received: Iterable[Tensor]) -> None:
        # PipelineEngine lets every float that it receives require a gradient, also behind a frozen front.
        for tensor in floats_of(received):
            tensor.requires_grad_(self._sends_gradients)

    def _exec_send_activations(self, buffer_id: int) -> None:
        super()._exec_send_activations(buffer_id)
        if not self._runs_backward:
            self._free(buffer_id)

    def _free(self, buffer_id: int) -> None:
        for buffers in self.pipe_buffers.values():
            buffers[buffer_id] = None

    def _run_entry(self, operation: Operation, micro_batch: int) -> None:
        if operation == Operation.F:
            self._run_forward(micro_batch)
        if operation in (Operation.B, Operation.BW):
            self.weight_gradients.budget_bytes = self.pending_bytes if operation == Operation.B else 0
            self._run_backward(micro_batch)
        if operation == Operation.W:
            WORK.at("weight gradients", micro_batch)
            self._run_weight_gradients(micro_batch)

    def _run_weight_gradients(self, micro_batch: int) -> None:
        self.weight_gradients.run(micro_batch)

    def _run_forward(self, micro_batch: int) -> None:
        links = self._table_links
        if not self._runs_backward and not self.is_last_stage():
            # Such a stage has no backward pass that holds it back. It waits until the next stage has received all but
            # as many micro-batches as would be in flight, or outputs would pile up.
            settle(links.activations_out.ends, micro_batch - self._in_flight)
        if self.is_first_stage() or self.is_last_stage():  # inputs for the first one, labels for the last
            self._exec_load_micro_batch(micro_batch)
        if not self.is_first_stage():
            WORK.at("receive of the activation", micro_batch, waits=True)
            received = links.activations_in[micro_batch].take_described()
            self._require_gradients(received)
            self.pipe_buffers["inputs"][micro_batch] = received
        WORK.at("forward pass", micro_batch)
        self._exec_forward_pass(micro_batch)
        if self.is_last_stage():
            self._losses[micro_batch] = self.loss
        else:
            if self._first_gradient_before == (Operation.SEND_ACTIVATION, micro_batch):
                self._expect_gradients()  # the step's first: the blocking order receives it before this send
            outputs = self.pipe_buffers["outputs"][micro_batch]
            links.activations_out[micro_batch].send_described(micro_batch, outputs)
            if self._runs_backward:
                self._awaited.append((micro_batch, [(each.dtype, tuple(each.shape)) for each in floats_of(outputs)]))
            else:
                self._free(micro_batch)

    def _run_backward(self, micro_batch: int) -> None:
        links = self._table_links
        if self.is_last_stage():
            self.loss = self._losses.pop(micro_batch)  # PipelineEngine runs backward from the loss computed last
        else:
            self._expect_gradients()  # does nothing if the last backward pass has posted the receive
            # PipelineEngine._exec_backward_pass runs backward from pipe_buffers["outputs"] with these.
            WORK.at("receive of the gradient", micro_batch, waits=True)
            gradients = links.gradients_in[micro_batch].take()
            if self._gradient_scale != 1:
                gradients = tuple(gradient * self._gradient_scale for gradient in gradients)
            self.grad_layer = gradients
            links.activations_out[micro_batch].settle(micro_batch)  # its gradient has come back: it has been received
            self._expect_gradients()  # the next micro-batch's
        self.weight_gradients.micro_batch = micro_batch
        WORK.at("backward pass", micro_batch)
        self._exec_backward_pass(micro_batch)
        if self._sends_gradients:
            # What was received are leaves that require gradients (_require_gradients): backward has filled their grad.
            filled = [tensor.grad for tensor in floats_of(self.pipe_buffers["inputs"][micro_batch])]
            links.gradients_out[micro_batch].send(micro_batch, cast(list[Tensor], filled))
            # The stage before has at most _in_flight_before micro-batches in flight: it has received the gradients of
            # earlier ones, or it could not have sent this micro-batch.
            settle(links.gradients_out.ends, micro_batch - self._in_flight_before)
        self._free(micro_batch)

    def _expect_gradients(self) -> None:
        """Post the receive of the next gradients, if their micro-batch has been sent and no receive is posted."""
        receivers = self._table_links.gradients_in
        if self._awaited and all(receiver.is_idle for receiver in receivers.ends):
            micro_batch, shapes = self._awaited.popleft()
            receivers[micro_batch].expect(shapes)

    @property
    def _table_links(self) -> StageLinks:
        assert self.links is not None, "entries are of a table"
        return self.links


def _in_flight_before(table: Schedule, stage: int) -> int:
    """The most micro-batches in flight on the stage before, in micro-batches of a replica of this one."""
    before = max(stage - 1, 0)
    return -(-table.in_flight[before] * table.micro_batches_of(stage) // table.micro_batches_of(before))


def _behind_first_gradient(order: Sequence[Instruction]) -> Instruction | None:
    """The instruction behind a step's first receive of a gradient, in the blocking order; None on the last stage."""
    gradient = Operation.RECEIVE_GRADIENT
    return next((after for before, after in pairwise(order) if before.operation == gradient), None)


def floats_of(payload: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in payload if tensor.is_floating_point()]
