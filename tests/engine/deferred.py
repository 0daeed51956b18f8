"""What the processes of the zero-bubble tests run: the same training under a schedule, and what becomes of it."""

from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.pipe import schedule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from omnibal.engine.engine import OmnibalEngine
from omnibal.vlm import payload
from tests.engine.cases import engine_of, weights_of


def train_both(cases):
    """What each case makes of this stage under 1F1B and under zero-bubble."""
    return [(train(replace(case, schedule="1f1b")), train(case)) for case in cases]


def two_processes(cases, case, budgets):
    """The same, and all else that two processes show of a zero-bubble case; the step that fails comes last."""
    both = train_both(cases)
    engines = [engine_of(replace(case, schedule=schedule)) for schedule in ("1f1b", "zero-bubble")]
    return {
        "both": both,
        "budgets": [train(replace(case, pending_bytes=budget)) for budget in budgets],
        "no weights": train_without_weights(case),
        "reads": [host_reads(engine) for engine in engines],
        "inputs": [inputs_alive(engine) for engine in engines],
        "evaluated": [both[cases.index(case)][1]["losses"], losses_around_an_evaluation(case)],
        "failed": failure(case, failing_stage=1),
    }


def train(case):
    """Losses, first gradients, weights after the last step; what waited at most and what still waits."""
    engine = engine_of(case)
    queue, first = engine.weight_gradients, {}

    def capture(engine):
        first.update({} if first else _gradients(engine))
        OmnibalEngine._exec_reduce_tied_grads(engine)

    engine._INSTRUCTION_MAP = {**OmnibalEngine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: capture}
    losses = [engine.train_batch().item() for _ in range(case.steps)]
    return {
        "losses": losses,
        "gradients": first,
        "weights": weights_of(engine),
        "stage": engine.stage_id,
        "peak_bytes": queue.peak_bytes,
        "left": (len(queue), queue.pending_bytes),
    }


def _gradients(engine):
    """What this process has accumulated in a step, before ranks and tied layers are added up."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        gradient = getattr(parameter, _name_of_sums(engine), None)
        found |= {} if gradient is None else {name: gradient.clone()}
    return found


def _name_of_sums(engine):
    if engine.using_bf16_optimizer:
        return "_hp_grad"
    return "grad_accum" if getattr(engine.optimizer, "use_grad_accum_attribute", False) else "grad"


def train_without_weights(case):
    """As train, with every ``W`` left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "_run", lambda *job: None)
        return train(case)


def losses_around_an_evaluation(case):
    """Losses of two steps, with an evaluation of the packs in another order between them."""
    engine = engine_of(case)
    losses = [engine.train_batch().item()]
    packs = [packs_of_rank[::-1] for packs_of_rank in case.packs]
    engine.evaluate(engine_of(replace(case, packs=packs)).loader)
    return [*losses, engine.train_batch().item()]


class Reads(TorchDispatchMode):
    """Counts how often the host asks a tensor for its values."""

    asks = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in self.asks
        return function(*args, **(kwargs or {}))


def host_reads(engine):
    """How often this stage's host asks for values in the instructions of a step's micro-batches, for each of these."""
    reads, tolist = Reads(), torch.Tensor.tolist
    ends = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)

    def counted(instruction):
        def execute(engine, **arguments):
            with reads, pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", asked)
                instruction(engine, **arguments)

        return execute

    def asked(tensor):
        reads.count += 1
        return tolist(tensor)

    engine._INSTRUCTION_MAP = {
        kind: instruction if kind in ends else counted(instruction)
        for kind, instruction in OmnibalEngine._INSTRUCTION_MAP.items()
    }
    engine.train_batch()
    del engine._INSTRUCTION_MAP
    return reads.count / engine.micro_batches


def inputs_alive(engine):
    """How many hidden states that this stage has received are alive at most when a forward pass begins."""
    received, counts = [], []

    def forward(engine, buffer_id, run=OmnibalEngine._exec_forward_pass):
        for tensors in (engine.pipe_buffers["inputs"][buffer_id], engine.pipe_recv_buf):
            received.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (tensors or ())[:1])
        counts.append(sum(not storage.expired() for storage in received))
        run(engine, buffer_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmnibalEngine, "_exec_forward_pass", forward)
        engine.train_batch()
    return max(counts)


def failure(case, failing_stage):
    """What this rank hears of a layer that fails in the midst of a step on one stage."""
    engine = engine_of(case)
    if engine.stage_id == failing_stage:
        calls = iter(range(2))

        def fail(module, payload):
            if next(calls, None) is None:
                raise RuntimeError("the layer fails")

        engine.module.register_forward_pre_hook(fail)
    try:
        engine.train_batch()
    except Exception as error:
        return str(error)
    return None
