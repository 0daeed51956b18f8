"""Tensor ranks as threads of one process, which add up tensors where processes would."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from threading import Barrier

import torch

from omnibal.vlm.layers import is_adapter
from omnibal.vlm.tensor import TensorGroup, part_of, share_layer
from omnibal.vlm.weights import load_layer


class Threads(TensorGroup):
    """A group whose ranks are threads; ``group`` is what they have in common."""

    @classmethod
    def of(cls, size):
        shared = Barrier(size, timeout=60), [None] * size
        return [cls(rank, size, shared) for rank in range(size)]

    def sum_in_place(self, tensor):
        return tensor.copy_(self._of_all(tensor, partial(reduce, torch.add)))

    def max_in_place(self, tensor):
        return tensor.copy_(self._of_all(tensor, partial(reduce, torch.maximum)))

    def gather(self, rows):
        return self._of_all(rows, torch.cat)

    def scatter_sum(self, rows):
        return self._of_all(rows, partial(reduce, torch.add)).chunk(self.size)[self.rank].clone()

    @torch.no_grad()
    def _of_all(self, tensor, join):
        barrier, given = self.group
        given[self.rank] = tensor.clone()
        barrier.wait()
        found = join(given)
        barrier.wait()
        return found


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


def slices_of(model, num_tensor, rank):
    """By name on disk, what a tensor rank holds of each weight that is cut."""
    found = {}
    for index in range(len(model.records)):
        names = model.weight_names(index)
        found |= {names[name]: own for name, own in model.slices(index, num_tensor, rank).items()}
    return found


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


@torch.no_grad()
def load_adapters(layer, whole, slices):
    """Give a rank's layer its part of a whole layer's adapters."""
    for name, parameter in layer.named_parameters():
        if is_adapter(name):
            parameter.copy_(part_of(whole[name], slices[name]) if name in slices else whole[name])
