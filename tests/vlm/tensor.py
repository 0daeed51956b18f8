"""Tensor ranks as threads of one process, which add up tensors where processes would."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from omnibal.vlm.tensor import TensorGroup, share_layer
from omnibal.vlm.weights import load_layer


class Threads(TensorGroup):
    """A group whose ranks are threads; ``group`` is what they have in common."""

    @classmethod
    def of(cls, size):
        shared = Barrier(size, timeout=60), [None] * size
        return [cls(rank, size, shared) for rank in range(size)]

    @torch.no_grad()
    def sum_in_place(self, tensor):
        barrier, given = self.group
        given[self.rank] = tensor.clone()
        barrier.wait()
        found = sum(given[1:], given[0])
        barrier.wait()
        return tensor.copy_(found)


def on_ranks(size, work):
    """What ``work`` returns for each rank of a group."""
    ranks = Threads.of(size)

    def of_rank(own):
        try:
            return work(own)
        except BaseException:
            own.group[0].abort()  # or the others would wait
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of_rank, ranks))


def shared_layers(model, source, ranks):
    """A rank's layers with its slices of the weights, tied ones being one module."""
    layers = []
    for index in range(len(model.records)):
        first = model.first_tied(index)
        if first < index:
            layers.append(layers[first])
            continue
        layers.append(model.build_layer(index, seed=None))
        share_layer(model, index, layers[index], ranks)
        load_layer(model, index, layers[index], source, model.slices(index, ranks.size, ranks.rank))
    return layers
