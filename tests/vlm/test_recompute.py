import gc
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnibal.profile.records import LEVELS
from omnibal.vlm import load_model
from omnibal.vlm.backward import run_layer
from omnibal.vlm.payload import Payload
from tests.vlm.models import build_layers, disk_state, make_pack, make_sample, pack_loss, tiny_config

PACK = make_pack([make_sample(1, tiles=(1,)), make_sample(2), make_sample(3, tiles=(2, 1))])
TEXT_PACK = make_pack([make_sample(4), make_sample(5)])


class Meter(TorchDispatchMode):
    """Counts the bytes of everything that operators make and that is still alive."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        for address, storage in storages(result).items():
            if address not in given:
                self.made[address] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self):
        gc.collect()
        return sum(size for reference, size in self.made.values() if not reference.expired())


def storages(values):
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


def gradients_of(model, pack, level, *, seed=0, dtype=torch.float32):
    layers = build_layers(model, dtype=dtype)
    torch.manual_seed(seed)
    pack = pack | {"pixel_values": pack["pixel_values"].to(dtype)}
    loss = pack_loss([partial(run_layer, layer, level=level) for layer in layers], pack)
    loss.backward()
    return loss, disk_state(model, layers, gradients=True)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("pack", [PACK, TEXT_PACK], ids=["mixed", "text only"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_level_gives_the_same_bits(pack, dropout, tied):
    vision = dict.fromkeys(("hidden_dropout_prob", "attention_dropout", "projection_dropout"), dropout)
    model = load_model(tiny_config(tied=tied, vision_options=vision, text_options={"attention_dropout": dropout}))
    loss, gradients = gradients_of(model, pack, "none")
    for level in ("selective", "full"):
        other_loss, other_gradients = gradients_of(model, pack, level)
        assert torch.equal(loss, other_loss)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, other_gradients[name]), (level, name)
    if dropout:
        assert not torch.equal(loss, gradients_of(model, pack, "full", seed=1)[0])


def test_every_level_gives_the_same_bits_in_bfloat16():
    model = load_model(tiny_config())
    results = [gradients_of(model, PACK, level, dtype=torch.bfloat16) for level in LEVELS]
    for loss, gradients in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in results[0][1].items())


def kept_by_blocks(level):
    """Bytes that the forward pass of each kind of block leaves behind, beyond its output."""
    model = load_model(tiny_config())
    layers, payload, kept = build_layers(model), Payload.of_pack(PACK), {}
    for record, layer in zip(model.records, layers, strict=True):
        payload = payload.replace(hidden=payload.hidden.detach().requires_grad_())
        with Meter() as meter:
            after = run_layer(layer, payload, level)
        kept[record.kind] = meter.alive() - after.hidden.untyped_storage().nbytes()
        payload = after.replace(hidden=after.hidden.detach())
    return kept


def test_a_level_keeps_less_than_the_one_before():
    kept = [kept_by_blocks(level) for level in LEVELS]
    for more, less in pairwise(kept):
        for kind in ("vision_block", "decoder_block"):
            assert less[kind] < more[kind], kind
    assert kept[2]["vision_block"] == kept[2]["decoder_block"] == 0


def test_selective_keeps_the_results_of_products_and_attention():
    tokens, width, kv_width, wide = PACK["input_ids"].shape[1], 32, 16, 48
    queries_keys_values, attention, out = width + 2 * kv_width, width, width
    rows = queries_keys_values + attention + out + 2 * wide + width
    statistics = kept_by_blocks("selective")["decoder_block"] - 4 * tokens * rows
    assert 0 <= statistics <= 4 * tokens * (4 + width)  # log-sum-exp of each head, one layout of the values


def test_full_shows_autograd_the_layers_input_alone():
    model = load_model(tiny_config())
    layer = build_layers(model)[1]
    hidden = torch.randn(2, 17, 24, requires_grad=True)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        run_layer(layer, Payload.of_pack(PACK).replace(hidden=hidden), "full")
    assert sum(tensor.numel() for tensor in seen if tensor.is_floating_point()) == hidden.numel()


def test_no_level_keeps_anything_without_gradients():
    layer = build_layers(load_model(tiny_config()))[1]
    for level in LEVELS:
        hidden = torch.randn(2, 17, 24)
        with torch.no_grad(), Meter() as meter:
            after = run_layer(layer, Payload.of_pack(PACK).replace(hidden=hidden), level)
        assert meter.alive() == after.hidden.untyped_storage().nbytes()
