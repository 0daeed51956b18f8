import gc
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnibal.profile.records import LEVELS
from omnibal.vlm import load_model
from omnibal.vlm.payload import DeferringLinear, Payload, WeightGradients, defer_linears, run_layer
from tests.vlm.models import build_layers, disk_state, make_pack, make_sample, pack_loss, tiny_config

PACK = make_pack([make_sample(1, tiles=(1,)), make_sample(2), make_sample(3, tiles=(2, 1))])
TEXT_PACK = make_pack([make_sample(4), make_sample(5)])


@pytest.fixture(autouse=True)
def quick_collections():
    """Let collections of garbage look at what a test makes alone, not at all that earlier ones have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


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


DTYPES = (torch.float32, torch.bfloat16)


def inputs(shape, dtype, *, contiguous, seed):
    generator = torch.Generator().manual_seed(seed)
    if contiguous:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator).to(dtype).transpose(-1, -2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 16), (1, 37, 16), (3, 5, 16), (2, 3, 5, 16), (0, 16)])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 300])
def test_a_deferring_layer_gives_the_same_bits(dtype, bias, shape, contiguous, budget):
    plain, split = (nn.Linear(16, 24, bias=bias, dtype=dtype) for _ in range(2))
    split.load_state_dict(plain.state_dict())
    queue = WeightGradients(budget_bytes=budget)
    defer_linears(split, queue)
    for queue.micro_batch in range(3):
        given = inputs(shape, dtype, contiguous=contiguous, seed=queue.micro_batch)
        outputs, gradients = [], []
        for layer in (plain, split):
            received = given.detach().requires_grad_()
            outputs.append(layer(received))
            outputs[-1].backward(torch.full_like(outputs[-1], 0.3) + outputs[-1].detach())
            gradients.append(received.grad)
        assert torch.equal(*outputs)
        assert torch.equal(*gradients)
    assert budget != 0 or len(queue) == 0
    queue.run(2)
    assert torch.equal(plain.weight.grad, split.weight.grad)
    assert not bias or torch.equal(plain.bias.grad, split.bias.grad)
    assert queue.pending_bytes == len(queue) == 0
    assert budget is None or queue.peak_bytes <= budget


def model_gradients(dtype, level, queue=None, frozen=()):
    """Gradients of a tiny model after two micro-batches, the ``W`` of both at the end; what came before them."""
    model = load_model(tiny_config())
    layers = build_layers(model, dtype=dtype)
    for record, layer in zip(model.records, layers, strict=True):
        layer.requires_grad_(record.kind not in frozen)
        if queue is not None:
            defer_linears(layer, queue)
    for number, pack in enumerate((PACK, TEXT_PACK)):
        if queue is not None:
            queue.micro_batch = number
        given = pack | {"pixel_values": pack["pixel_values"].to(dtype)}
        pack_loss(layers, given, level).backward()
    before = {name for name, value in disk_state(model, layers, gradients=True).items() if value is not None}
    if queue is not None:
        queue.run(0)
        queue.run(1)
    return disk_state(model, layers, gradients=True), before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("frozen", [(), ("patch_embedding", "vision_block")])
def test_a_models_gradients_are_the_same_bits_at_every_level(dtype, level, frozen):
    plain, _ = model_gradients(dtype, level, frozen=frozen)
    split, before = model_gradients(dtype, level, WeightGradients(), frozen)
    assert plain.keys() == split.keys()
    for name, gradient in plain.items():
        assert (gradient is None) == (split[name] is None), name
        assert gradient is None or torch.equal(gradient, split[name]), name
    late = {name for name, gradient in split.items() if gradient is not None} - before
    trained = ("language_model.model.layers", "multi_modal_projector")
    assert "language_model.lm_head.weight" in before  # the logits that it would wait with are not kept
    assert {name for name in late if name.startswith(trained)} == {
        name for name in plain if name.startswith(trained) and name.endswith("weight") and "norm" not in name
    } - {"multi_modal_projector.layer_norm.weight"}


class Products(TorchDispatchMode):
    """Counts the products of matrices by their shapes."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::mm", "aten::addmm"):
            self.found[tuple(tuple(tensor.shape) for tensor in args[-2:])] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_computed_twice(level):
    with Products() as plain:
        model_gradients(torch.float32, level)
    with Products() as split:
        model_gradients(torch.float32, level, WeightGradients())
    assert plain.found == split.found


@pytest.mark.parametrize("level", LEVELS)
def test_what_waits_is_what_is_kept(level):
    model = load_model(tiny_config())
    block = model.build_layer([record.kind for record in model.records].index("decoder_block"), seed=0)
    block.requires_grad_(False)
    for layer in block.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.requires_grad_()
    queue = WeightGradients()
    defer_linears(block, queue)
    tokens = int(TEXT_PACK["input_ids"].shape[1])
    with Meter() as meter:
        hidden = torch.randn(1, tokens, 32)
        payload = Payload.of_pack(TEXT_PACK).replace(hidden=hidden.requires_grad_())
        output = run_layer(block, payload, level).hidden
        output.backward(torch.ones_like(output))
        queries, keys = 32, 16
        # inputs: both norms' outputs, attention's output, the MLP's product; and the gradient of each output
        columns = (32 + 32 + queries + 48) + (queries + 2 * keys + 32 + 2 * 48 + 32)
        assert queue.pending_bytes == queue.peak_bytes == 4 * tokens * columns
        del output
        held = meter.alive()
        queue._jobs.clear()
        assert held - meter.alive() == queue.pending_bytes


def test_the_oldest_run_first_when_the_budget_overflows():
    queue, ran = WeightGradients(budget_bytes=80), []
    kept = [torch.zeros(8) for _ in range(6)]
    for queue.micro_batch in range(3):
        for job in range(2):
            queue.defer(partial(ran.append, (queue.micro_batch, job)), [kept[2 * queue.micro_batch + job]])
    assert ran == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (len(queue), queue.pending_bytes, queue.peak_bytes) == (2, 64, 64)
    queue.run(1)
    assert len(ran) == 4
    queue.run(2)
    assert ran[4:] == [(2, 0), (2, 1)]


def test_a_storage_counts_once():
    queue, shared, other = WeightGradients(), torch.zeros(4, 8), torch.zeros(2)
    queue.defer(lambda: None, [shared, shared[1:]])
    queue.defer(lambda: None, [shared.view(-1), other])
    assert queue.pending_bytes == 4 * 32 + 8
    queue._run_oldest()
    assert queue.pending_bytes == 4 * 32 + 8
    queue._run_oldest()
    assert queue.pending_bytes == 0


def test_only_plain_linear_layers_defer_and_no_name_changes():
    class Special(nn.Linear):
        pass

    module = nn.ModuleDict({"plain": nn.Linear(2, 3), "special": Special(2, 3), "convolution": nn.Conv1d(2, 3, 1)})
    names = list(module.state_dict())
    defer_linears(module, WeightGradients())
    assert list(module.state_dict()) == names
    assert [type(layer) for layer in module.values()] == [DeferringLinear, Special, nn.Conv1d]
    assert isinstance(module["plain"], nn.Linear)


def test_a_layer_whose_input_and_bias_need_no_gradient_waits_for_nothing():
    layer, queue = nn.Linear(2, 3, bias=False), WeightGradients()
    defer_linears(layer, queue)
    layer(torch.ones(4, 2)).sum().backward()
    assert len(queue) == 0
    torch.testing.assert_close(layer.weight.grad, torch.full((3, 2), 4.0))


def test_nothing_waits_without_gradients():
    layer, queue = nn.Linear(2, 3), WeightGradients()
    defer_linears(layer, queue)
    with torch.no_grad():
        layer(torch.ones(4, 2))
    layer.weight.requires_grad_(False)
    layer(torch.ones(4, 2)).sum().backward()
    assert len(queue) == 0
    assert layer.weight.grad is None
