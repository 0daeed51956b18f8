"""What the model's layers do on a CUDA device, against the same on a CPU."""

from functools import partial

import pytest
import torch

from omnibal.data.limits import PackLimits
from omnibal.passes import device_name, kept_bytes, this_device
from omnibal.profile.records import LEVELS
from omnibal.vlm import load_model
from omnibal.vlm.attention import attention_kwargs, sample_lengths
from omnibal.vlm.measure import LayerRun, MadePack, measure_profile
from omnibal.vlm.payload import run_layer
from tests.vlm.models import build_layers, disk_state, make_pack, make_sample, pack_loss, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PACKS = {
    "mixed": make_pack([make_sample(1, tiles=(1,)), make_sample(2), make_sample(3, tiles=(2, 1))]),
    "text only": make_pack([make_sample(4), make_sample(5)]),
}


def loss_and_gradients(pack, level, dtype, device):
    model = load_model(tiny_config())
    layers = build_layers(model, dtype=dtype, device=device)
    pack = {name: tensor.to(device) for name, tensor in pack.items()}
    pack["pixel_values"] = pack["pixel_values"].to(dtype)
    loss = pack_loss([partial(run_layer, layer, level=level) for layer in layers], pack)
    loss.backward()
    return loss.item(), disk_state(model, layers, gradients=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pack", PACKS)
def test_loss_and_gradients_are_those_of_a_cpu(pack, level, dtype):
    expected_loss, expected = loss_and_gradients(PACKS[pack], "none", torch.float32, "cpu")
    loss, gradients = loss_and_gradients(PACKS[pack], level, dtype, "cuda")
    tolerance = 5e-3 if dtype == torch.float32 else 0.1  # products run in TF32, or in 16 bits
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        error = (gradient.cpu().float() - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)
        assert error < tolerance, name


@pytest.mark.parametrize("level", ["selective", "full"])
def test_recompute_changes_no_gradient(level):
    loss, gradients = loss_and_gradients(PACKS["mixed"], "none", torch.float32, "cuda")
    again, others = loss_and_gradients(PACKS["mixed"], level, torch.float32, "cuda")
    assert again == loss
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            others[name], gradient, rtol=1e-5, atol=1e-7, msg=name
        )  # sums may be taken atomically


def test_a_packs_bounds_cross_to_the_host_once():
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32, device="cuda")
    assert attention_kwargs(bounds)["max_length_q"] == 3
    with_sync = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert sample_lengths(bounds) == (3, 2)
    finally:
        torch.cuda.set_sync_debug_mode(with_sync)


@pytest.mark.parametrize("level", LEVELS)
def test_kept_bytes_are_what_the_allocator_says(level):
    model = load_model(
        tiny_config(
            text_options={"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
        )
    )
    index = next(index for index, record in enumerate(model.records) if record.kind == "decoder_block")
    layer = model.build_layer(index, seed=0, dtype=torch.bfloat16, device="cuda")
    payload = MadePack(0, (700, 324)).payload(model, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(1, 1024, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    run = partial(run_layer, layer, payload.replace(hidden=hidden), level)
    output = run().hidden  # kernels and their workspaces are loaded
    del output
    free = [*layer.parameters(), *layer.buffers(), hidden, *payload.integers.values()]
    predicted = kept_bytes(lambda: run().hidden, free=free)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = run().hidden
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before - output.nbytes == pytest.approx(predicted, rel=0.05, abs=2**16)


def test_a_profile_is_measured_on_the_device():
    model = load_model(tiny_config())
    profile = measure_profile(model, PackLimits(4, 64), dtype=torch.bfloat16, device="cuda")
    assert this_device().type == "cuda"
    assert profile.device == device_name(torch.device("cuda")) == torch.cuda.get_device_name()
    for layer in profile.layers:
        assert sum(vars(layer.forward_seconds).values()) > 0, layer.name


def test_split_backward_passes_are_timed_on_the_device():
    model = load_model(tiny_config())
    index = next(index for index, record in enumerate(model.records) if record.kind == "vision_block")
    layer = model.build_layer(index, seed=0, dtype=torch.bfloat16, device="cuda")
    payload = MadePack(2, (40,)).payload(model, dtype=torch.bfloat16, device="cuda")
    hidden = torch.randn(2, 17, 24, device="cuda", dtype=torch.bfloat16)
    measured = LayerRun(
        layer, payload.replace(hidden=hidden), model.sent_tensors(index + 1), from_pixels=False
    ).measure()
    assert measured.pending_bytes > 0
    assert measured.weights.seconds > 0
    assert measured.kept_bytes["full"] < measured.kept_bytes["none"]
