"""DeepSpeed's grid of ranks where encoder and LLM have replicas of their own, so that stages are no rectangle.

Micro-batch ``n`` of a step passes replica ``n mod replicas`` of every stage. As one number of replicas divides the
other, the ranks that pass micro-batches to each other are those whose replica is the same modulo the smaller number: a
*column*. Where all stages have as many replicas, a column is what DeepSpeed calls a pipe group.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any

import torch.distributed as dist
from deepspeed.comm import ReduceOp
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from omnibal.cluster import Layout

Pair = tuple[int, int]  # a rank, and one of the next stage


def pairs_below(layout: Layout, stage: int) -> list[list[Pair]]:
    """The pairs that micro-batches cross behind a stage, in rounds without a rank in two pairs; tensor ranks each send.

    A rank of the side with fewer replicas passes its micro-batch ``m`` in round ``m mod rounds``; a rank of the other
    side is in one round only.

    >>> from omnibal.cluster import Encoder
    >>> pairs_below(Layout(num_stages=2, num_replicas=2, encoder=Encoder(num_stages=1, num_replicas=1)), 0)
    [[(0, 1)], [(0, 2)]]
    """
    (upper, num_tensor), (lower, _) = layout.shape(stage), layout.shape(stage + 1)
    fewer, more = sorted((upper, lower))
    return [
        [
            (layout.rank(stage, n % upper, tensor), layout.rank(stage + 1, n % lower, tensor))
            for n in range(first, first + fewer)
            for tensor in range(num_tensor)
        ]
        for first in range(0, more, fewer)
    ]


def topology_of(layout: Layout) -> ProcessTopology:
    """DeepSpeed's view of which rank is which; a layout numbers ranks as DeepSpeed's own topologies do."""
    if layout.has_units:
        return UnequalTopology(layout)
    shape = {"num_pp": layout.num_stages, "num_dp": layout.num_replicas}
    # One more axis renames a checkpoint's files.
    if layout.num_tensor == 1:
        return PipeDataParallelTopology(**shape)
    return PipeModelDataParallelTopology(num_mp=layout.num_tensor, **shape)


class UnequalTopology(ProcessTopology):
    """The ranks of a layout as (stage, replica); of a rectangle DeepSpeed's ``PipeDataParallelTopology``."""

    # Along `data` lie the replicas of each stage, along `pipe` the ranks of each column.

    def __init__(self, layout: Layout) -> None:
        self.replicas = [layout.shape(stage)[0] for stage in range(layout.num_stages)]
        self.num_columns = layout.num_columns
        super().__init__(axes=["pipe", "data"], dims=[layout.num_stages, self.num_columns])
        positions = [layout.position(rank) for rank in range(layout.num_devices)]
        self.mapping = {
            self.ProcessCoord(position.stage, position.replica): rank for rank, position in enumerate(positions)
        }

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks of a stage, or of a column: PipelineParallelGrid makes its model groups of the latter."""
        index = self.axes.index(axis)
        sizes = (len(self.replicas), self.num_columns)
        return [rank for coordinates, rank in self.mapping.items() if coordinates[index] % sizes[index] == idx]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        others = {"data": "pipe", "pipe": "data"}
        if axis not in others:
            return []
        return [self.get_axis_list(others[axis], idx) for idx in range(self.get_dim(others[axis]))]


class UnequalGrid(PipelineParallelGrid):
    """The process groups of an `UnequalTopology`; of a rectangle those of DeepSpeed's grid."""

    def __init__(self, topology: UnequalTopology, process_group: Any = None) -> None:
        super().__init__(topology, process_group)
        # PipelineParallelGrid asks the topology, which knows the columns but no rank.
        self.data_parallel_size = len(self.dp_group)

    def _is_grid_valid(self) -> bool:
        return bool(self._topo.world_size() == self.world_size)

    def _build_p2p_groups(self) -> list[list[int]]:
        return []  # DeepSpeed reads these under a torch without send and receive only

    def get_model_parallel_rank(self) -> int:
        """The stage: DeepSpeed names checkpoint files by this number, and replicas of a stage share a file."""
        return int(self.stage_id)

    def get_model_parallel_world_size(self) -> int:
        """The number of stages: DeepSpeed looks for as many of those files."""
        return int(self.pipe_parallel_size)

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """A rank of a stage and this rank's column, the first one if it has several."""
        replica = coordinates.get("data", self.data_parallel_id)
        return int(self._topo.get_rank(pipe=stage_id, data=replica % self._topo.replicas[stage_id]))


def count_stages_once(optimizer: Any, copies: int) -> None:
    """Let the gradient norm count each stage once, where a column has ``copies`` replicas of this rank's stage."""
    if isinstance(optimizer, BF16_Optimizer):
        # A stage of one replica takes the norm of all its gradients, others each of their shares
        # (`reduction.Bfloat16Sums`): the sum over all processes counts every gradient once.
        optimizer.mpu = copy(optimizer.mpu)
        optimizer.mpu.get_model_parallel_group = lambda: dist.group.WORLD
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and copies > 1:
        # DeepSpeedZeroOptimizer adds up squares over the replicas of a stage, then over the model-parallel group, which
        # is a column. It takes the largest of overflow flags by the same method.
        over_column = optimizer._model_parallel_all_reduce

        def once(tensor: Tensor, op: Any) -> None:
            if op == ReduceOp.SUM:  # DeepSpeed's own, which no ReduceOp of torch equals
                tensor.div_(copies)
            over_column(tensor=tensor, op=op)

        optimizer._model_parallel_all_reduce = once


def unequal_grids() -> AbstractContextManager[None]:
    """Let a PipelineModule that is built inside make an `UnequalGrid`."""
    # PipelineModule.__init__ has no argument for a grid: it calls the class by its module's name.
    return replaced(pipe_module, PipelineParallelGrid=UnequalGrid)


def no_handshake() -> AbstractContextManager[None]:
    """Let a PipelineEngine that is built inside send nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    # PipelineEngine.__init__ lets neighbouring stages send each other a number by p2p: stage_to_global would let
    # several replicas send to one that receives once.
    return replaced(p2p, send=nothing, recv=nothing)


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Put values in the place of what a module, or methods of an object, have under these names."""
    before = {name: vars(holder)[name] for name in values if name in vars(holder)}  # an object has none of its methods
    vars(holder).update(values)
    try:
        yield
    finally:
        vars(holder).update(before)
        for name in values.keys() - before.keys():
            delattr(holder, name)
