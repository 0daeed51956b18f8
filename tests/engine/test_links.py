"""How many groups of processes it takes to link the stages of hundreds of replicas; nothing is sent."""

from types import SimpleNamespace

import pytest
import torch

from omnibal.cluster import Layout
from omnibal.engine import transfers

STAGES, REPLICAS = 4, 128


class Network:
    """Takes torch.distributed's place on one rank, and counts what all ranks of the world do together."""

    def __init__(self, rank, *, splits):
        self.rank, self.splits, self.groups = rank, [], []
        backend = SimpleNamespace(supports_splitting=splits)
        world = SimpleNamespace(bound_device_id="cuda:0" if splits else None, _get_backend=lambda device: backend)
        self.group = SimpleNamespace(WORLD=world)

    def get_rank(self):
        return self.rank

    def get_default_backend_for_device(self, device):
        return "nccl"

    def split_group(self, split_ranks):
        self.splits.append(split_ranks)
        return next((("split", len(self.splits), tuple(pair)) for pair in split_ranks if self.rank in pair), None)

    def new_group(self, ranks, backend):
        self.groups.append(ranks)
        return ("new", len(self.groups), tuple(ranks))


@pytest.fixture
def open_links(monkeypatch):
    """Opens the links of one process of four stages and 128 replicas; the network, and the process's links."""

    def open_on(rank, device, *, splits=True):
        network = Network(rank, splits=splits)
        monkeypatch.setattr(transfers, "dist", network)
        monkeypatch.setattr(transfers, "gloo_group", lambda world: "gloo")
        return network, transfers.StageLinks(Layout(STAGES, REPLICAS), rank, torch.device(device))

    return open_on


def test_a_world_is_split_four_times_whatever_the_replicas(open_links):
    found = [open_links(stage * REPLICAS + 5, "cuda")[0].splits for stage in range(STAGES)]
    assert found == [found[0]] * STAGES  # all ranks split alike
    assert [len(pairs) for pairs in found[0]] == [2 * REPLICAS, 2 * REPLICAS, REPLICAS, REPLICAS]
    for pairs in found[0]:
        members = [rank for pair in pairs for rank in pair]
        assert len(set(members)) == len(members)
        assert all(lower - upper == REPLICAS for upper, lower in pairs)


def test_a_direction_has_a_group_of_its_own(open_links):
    _, links = open_links(REPLICAS + 5, "cuda")
    above, below = (5, REPLICAS + 5), (REPLICAS + 5, 2 * REPLICAS + 5)
    own = [
        links.activations_in[0]._link,
        links.gradients_out[0]._link,
        links.activations_out[0]._link,
        links.gradients_in[0]._link,
    ]
    assert [link.on_device for link in own] == [
        ("split", 1, above),
        ("split", 2, above),
        ("split", 3, below),
        ("split", 4, below),
    ]
    assert {link.on_host for link in own} == {"gloo"}
    assert [sender.peer for sender in links.senders] == [5, 2 * REPLICAS + 5]
    assert own[0].group(torch.ones(1)) == "gloo"
    assert own[0].group(torch.ones(1, device="meta")) == ("split", 1, above)


def test_a_world_that_cannot_be_split_makes_a_group_per_direction_and_pair(open_links):
    network, links = open_links(5, "cuda", splits=False)
    assert network.splits == []
    assert len(network.groups) == 2 * (STAGES - 1) * REPLICAS
    assert links.activations_out[0]._link.on_device[2] == links.gradients_in[0]._link.on_device[2] == (5, REPLICAS + 5)


def test_on_a_cpu_no_group_is_made(open_links):
    network, links = open_links(5, "cpu")
    assert network.splits == network.groups == []
    assert links.activations_out[0]._link == transfers.StageLink("gloo", "gloo")
