"""Records which transfers and computations the engine starts in which order; nothing is computed or sent."""

from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from omnibal.cluster import Layout
from omnibal.config.section import OmnibalSection
from omnibal.engine import transfers
from omnibal.engine.engine import OmnibalEngine
from omnibal.pipeline.schedule import Operation
from tests.engine.nccl import Kernel, Post, Wait

WORLD, GLOO = -1, -2


class Network:
    """Takes ``torch.distributed``'s place in one process after another, first stage first.

    What a stage receives from the one before it is there, as that has been recorded before; gradients are of no matter.
    """

    def __init__(self, device):
        self.device = torch.device(device)
        self.mail = defaultdict(deque)
        backend = SimpleNamespace(supports_splitting=True)
        self.group = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=0, _get_backend=lambda device: backend))

    def enter(self, rank):
        self.rank, self.program, self.groups = rank, [], 0

    def split_group(self, split_ranks):
        self.groups += 1
        return self.groups

    def isend(self, tensor, peer, group=WORLD):
        self.mail[group, self.rank, peer].append(tensor.detach().clone())
        return self._post(tensor, peer, group, sends=True)

    def irecv(self, tensor, peer, group=WORLD):
        if peer < self.rank:
            tensor.copy_(self.mail[group, peer, self.rank].popleft())
        return self._post(tensor, peer, group, sends=False)

    def _post(self, tensor, peer, group, *, sends):
        number = len(self.program)
        self.program.append(Post(group, peer, sends, on_device=tensor.device == self.device))
        return SimpleNamespace(wait=lambda: self.program.append(Wait(number)))

    def send(self, tensor, peer):
        self.isend(tensor, peer).wait()

    def recv(self, tensor, peer):
        self.irecv(tensor, peer).wait()


class RecordedEngine(OmnibalEngine):
    """The engine, whose passes are only written down."""

    def _exec_load_micro_batch(self, buffer_id):
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = self._payload()

    def _exec_forward_pass(self, buffer_id):
        self.network.program.append(Kernel("F"))
        self.pipe_buffers["outputs"][buffer_id] = self._payload()
        self.loss, self._forwards = None, self._forwards + 1

    def _exec_backward_pass(self, buffer_id):
        self.network.program.append(Kernel("B"))
        if not self.is_first_stage():
            hidden = self.pipe_buffers["inputs"][buffer_id][0]
            hidden.grad = torch.empty_like(hidden)

    def _run_entry(self, operation, micro_batch):
        if operation == Operation.W:
            self.network.program.append(Kernel("W"))
        super()._run_entry(operation, micro_batch)

    def _payload(self):
        """What every layer returns; packs in turn without an image, of which a cut within the ViT passes nothing."""
        tiles = 0 if self.stage_id == 0 and self._forwards % 2 else 2
        integers = [torch.ones(1, 3, dtype=torch.int64, device=self.device) for _ in range(2)]
        bounds = torch.tensor([0, 3], dtype=torch.int32).to(self.device)
        return torch.ones(tiles, 2, device=self.device), *integers, bounds

    def _nothing(self):
        pass

    _exec_reduce_tied_grads = _exec_reduce_grads = _exec_optimizer_step = _nothing


def record(plan, *, forward_only=False, steps=2, engine_class=RecordedEngine, frozen_stages=0):
    """What each process starts in a few steps under a plan's table, or under DeepSpeed's own 1F1B."""
    # DeepSpeed sends descriptions through the device, which must then have values; ours are the host's.
    layout = getattr(plan, "layout", None) or Layout(plan.num_stages)
    network = Network("cpu" if plan.schedule == "1f1b" or forward_only else "meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineEngine, "__init__", _bare(network, plan, layout, frozen_stages))
        patch.setattr(transfers, "dist", network)
        patch.setattr(transfers, "gloo_group", lambda world: GLOO)
        patch.setattr("omnibal.engine.engine.keep_watchdog", lambda dog: None)  # there are no ranks to watch
        patch.setattr(p2p, "send", network.send)
        patch.setattr(p2p, "recv", network.recv)
        programs = []
        for rank in range(layout.num_devices):  # those of earlier stages go before
            network.enter(rank)
            engine = engine_class(
                resolved=SimpleNamespace(section=OmnibalSection(run={"watchdog_seconds": 0}), layout=layout),
                plan=plan,
                loader=None,
                model=SimpleNamespace(layout=layout),
            )
            for _ in range(steps):
                micro_batches = engine.micro_batches
                made = engine._inference_schedule(micro_batches) if forward_only else engine._train_schedule()
                engine._exec_schedule(made)
            programs.append(network.program)
        return programs


def _bare(network, plan, layout, frozen_stages):
    """In the place of DeepSpeed's constructor: what its instructions ask the engine for."""

    def initialize(engine, model):
        nn.Module.__init__(engine)
        module = nn.Module()
        module.frozen_stages, module.forward_funcs, module.encoder = frozen_stages, [], nn.ModuleList()
        module.layout = layout
        stage = layout.position(network.rank).stage
        replicas, _ = layout.shape(stage)
        engine.__dict__ |= {
            "network": network,
            "device": network.device,
            "module": module,
            "optimizer": None,
            "basic_optimizer": SimpleNamespace(param_groups=[]),
            "lr_scheduler": None,
            "stage_id": stage,
            "global_rank": network.rank,
            "num_stages": plan.num_stages,
            "micro_batches": plan.micro_batches * layout.num_replicas // replicas,
            "dp_world_size": 1,
            "prev_stage": stage - 1,
            "next_stage": stage + 1,
            "pipe_buffers": {name: [] for name in ("inputs", "labels", "outputs", "output_tensors")},
            "num_pipe_buffers": 0,
            "pipe_recv_buf": None,
            "grad_layer": None,
            "dynamic_shape": True,
            "first_output_send": True,
            "_forwards": 0,
            "_config": SimpleNamespace(wall_clock_breakdown=False, _param_dict={}),
            **dict.fromkeys(("is_pipe_partitioned", "is_grad_partitioned"), False),
            **dict.fromkeys(("has_attention_mask", "has_bool_tensors"), False),
        }

    return initialize
