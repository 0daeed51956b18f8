"""The process groups of units, without processes; of a rectangle they are those of DeepSpeed's own grid."""

from itertools import product
from types import SimpleNamespace

import pytest
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe import p2p, topology
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from omnibal.cluster import Encoder, Layout
from omnibal.engine.grid import UnequalGrid, UnequalTopology, no_handshake, pairs_below, unequal_grids

ASKED = (
    "global_rank", "world_size", "data_parallel_size", "pipe_parallel_size", "model_parallel_size",
    "slice_parallel_size", "stage_id", "data_parallel_id", "ds_model_proc_group", "ds_model_rank",
    "ds_model_world_size", "dp_group", "dp_groups", "dp_proc_group", "is_first_stage", "is_last_stage", "p2p_groups",
    "pp_group", "pp_proc_group", "pipe_groups", "slice_group", "slice_proc_group",
)  # fmt: skip


def units(num_stages, replicas, encoder_replicas, encoder_stages=1):
    return Layout(num_stages, replicas, encoder=Encoder(encoder_stages, encoder_replicas))


@pytest.fixture
def grid_on(monkeypatch):
    """Makes a grid on one rank; a process group is the list of its ranks, and all that are made are counted."""

    def make(grid_class, of, rank, made=None):
        made = [] if made is None else made
        network = SimpleNamespace(
            get_rank=lambda: rank,
            get_world_size=of.world_size,
            new_group=lambda ranks: made.append(list(ranks)) or list(ranks),
        )
        monkeypatch.setattr(topology, "dist", network)
        return grid_class(topology=of, process_group=None)

    return make


@pytest.mark.parametrize(("num_stages", "replicas"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 4), (4, 2)])
def test_a_rectangle_has_deepspeeds_own_grid(grid_on, num_stages, replicas):
    ours, theirs = UnequalTopology(Layout(num_stages, replicas)), PipeDataParallelTopology(num_stages, replicas)
    assert dict(ours.mapping) == dict(theirs.mapping)
    for axis in ("pipe", "data", "model"):
        assert ours.get_dim(axis) == theirs.get_dim(axis)
        assert ours.get_axis_comm_lists(axis) == theirs.get_axis_comm_lists(axis)
    for axis, size in (("pipe", num_stages), ("data", replicas)):
        assert all(ours.get_axis_list(axis, idx) == theirs.get_axis_list(axis, idx) for idx in range(size))
    for rank in range(ours.world_size()):
        assert ours.get_coord(rank) == theirs.get_coord(rank)
        assert ours.get_rank_repr(rank, omit_axes=["data"]) == theirs.get_rank_repr(rank, omit_axes=["data"])
        made = ([], [])
        own = grid_on(UnequalGrid, ours, rank, made[0])
        deepspeeds = grid_on(PipelineParallelGrid, theirs, rank, made[1])
        for name in {*ASKED} - {"p2p_groups"}:  # read under a torch without send and receive only
            assert getattr(own, name) == getattr(deepspeeds, name), name
        assert made[0] == made[1]
        assert own.get_model_parallel_rank() == deepspeeds.get_model_parallel_rank()
        for stage, replica in product(range(num_stages), range(replicas)):
            assert own.stage_to_global(stage) == deepspeeds.stage_to_global(stage)
            assert own.stage_to_global(stage, data=replica) == deepspeeds.stage_to_global(stage, data=replica)


def test_every_attribute_of_deepspeeds_grid_is_compared(grid_on):
    attributes = vars(grid_on(PipelineParallelGrid, PipeDataParallelTopology(2, 2), 0))
    assert attributes.keys() - {"_topo"} == set(ASKED)


@pytest.mark.parametrize("layout", [units(2, 2, 1), units(2, 1, 2), units(3, 2, 4, 2), units(4, 6, 2), units(2, 2, 2)])
def test_stages_have_replicas_of_their_own_and_columns_pass_micro_batches(grid_on, layout):
    topology, made = UnequalTopology(layout), []
    for rank in range(layout.num_devices):
        grid = grid_on(UnequalGrid, topology, rank, [])
        place = layout.position(rank)
        assert (grid.stage_id, grid.data_parallel_id) == (place.stage, place.replica)
        assert grid.get_model_parallel_rank() == place.stage
        assert grid.get_data_parallel_world_size() == layout.shape(place.stage)[0]
        assert grid.get_data_parallel_group_ranks() == [*layout.ranks(place.stage)]
        assert grid.get_model_parallel_group() == grid.get_pipe_parallel_group() == grid.pp_group
        assert grid.stage_to_global(layout.num_stages - 1) in grid.pp_group  # whence PipelineEngine gets the loss
        for stage in range(layout.num_stages - 1):
            crossed = {pair for pairs in pairs_below(layout, stage) for pair in pairs}
            assert all((upper in grid.pp_group) == (lower in grid.pp_group) for upper, lower in crossed)
        made.append(grid.ds_model_rank)
    assert sorted(set(made)) == [*range(max(made) + 1)]


def test_all_ranks_make_the_same_groups(grid_on):
    layout = units(3, 4, 2)
    of_ranks = []
    for rank in range(layout.num_devices):
        made = []
        grid_on(UnequalGrid, UnequalTopology(layout), rank, made)
        of_ranks.append(made)
    columns, stages = [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]], [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert of_ranks == [[*columns, *stages, *columns, *([rank] for rank in range(10))]] * 10


def test_deepspeed_has_what_units_run_in_another_way():
    relied_on = {
        PipelineParallelGrid: ("_is_grid_valid", "_build_p2p_groups", "stage_to_global"),
        pipe_module.PipelineModule: ("_index_tied_modules",),
        pipe_engine.PipelineEngine: ("_aggregate_total_loss",),
        DeepSpeedZeroOptimizer: ("_model_parallel_all_reduce",),
    }
    for owner, names in relied_on.items():
        assert vars(owner).keys() >= set(names)


def test_a_micro_batch_crosses_in_the_round_of_its_number():
    assert pairs_below(units(2, 2, 1), 0) == [[(0, 1)], [(0, 2)]]
    assert pairs_below(units(2, 1, 2), 0) == [[(0, 2)], [(1, 2)]]
    assert pairs_below(units(3, 4, 2), 0) == [[(0, 2), (1, 3)], [(0, 4), (1, 5)]]
    assert pairs_below(units(3, 4, 2), 1) == [[(2, 6), (3, 7), (4, 8), (5, 9)]]
    assert pairs_below(Layout(2, 3), 0) == [[(0, 3), (1, 4), (2, 5)]]


def test_deepspeed_calls_its_grid_and_its_handshake_by_these_names():
    sent = p2p.send, p2p.recv
    assert pipe_engine.p2p is p2p
    assert pipe_module.PipelineParallelGrid is PipelineParallelGrid
    with unequal_grids(), no_handshake():
        assert pipe_module.PipelineParallelGrid is UnequalGrid
        assert p2p.send(None, 1) is p2p.recv(None, 1) is None
    assert pipe_module.PipelineParallelGrid is PipelineParallelGrid
    assert (p2p.send, p2p.recv) == sent
