"""Blocks that torch.compile takes: few graphs for many packs, and the numbers of blocks that are not compiled."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText, InternVLConfig, InternVLVisionConfig, Qwen2Config

from omnibal.errors import ConfigError
from omnibal.packs.apart import attend_by_bounds
from omnibal.packs.blocks import blocks_of, compile_blocks
from omnibal.vlm import attention
from tests.integrations.items import config_of
from tests.vlm.families import plain_family_model

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
IMAGE = 3


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def small_model(*, recomputes=False, lora=False, dtype=torch.float32, **text):
    sizes = {"num_key_value_heads": 1, "vocab_size": 60, "max_position_embeddings": 1024}
    vision = InternVLVisionConfig(image_size=56, patch_size=14, **WIDTHS)
    parts = {"vision_config": vision, "text_config": Qwen2Config(**WIDTHS, **sizes, **text)}
    config = InternVLConfig(**parts, image_token_id=IMAGE, image_seq_length=4, downsample_ratio=0.5)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").to(dtype).train()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if recomputes:
        model.gradient_checkpointing_enable()
        if lora:
            model.enable_input_require_grads()
    assert attend_by_bounds(model)
    return model


def packs_of(count, seed=1):
    """Packs of 1 to 9 samples, each with an image or without; the first has two samples, one with an image."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    for number in range(count):
        lengths = [draw(6, 40) for _ in range(draw(1, 10) if number else 2)]
        samples = [torch.randint(4, 60, (length,), generator=generator) for length in lengths]
        with_image = [place == 0 or draw(0, 2) for place in range(len(samples))]
        for sample, has in zip(samples, with_image, strict=True):
            sample[1:5] = IMAGE if has else sample[1:5]
        ids = torch.cat(samples)[None]
        yield {
            "input_ids": ids,
            "labels": ids,
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "pixel_values": torch.randn(sum(map(bool, with_image)), 3, 56, 56, generator=generator),
            "use_cache": False,
        }


def trained(model, pack, autocast):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**pack).loss
    loss.backward()
    return [loss, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def check_equal(compiled, plain, count, autocast=False):
    for pack in packs_of(count):
        found, expected = (trained(model, pack, autocast) for model in (compiled, plain))
        assert len(found) == len(expected) > 10
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def check_graphs(most=4):
    """At most two of each kind of block, and no break."""
    assert 2 <= counters["stats"]["unique_graphs"] <= most
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("options", "autocast", "count"),
    [
        ({}, False, 30),
        ({"recomputes": True}, True, 6),
        pytest.param({"dtype": torch.bfloat16}, False, 6, marks=pytest.mark.slow),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, False, 6, marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "recomputing, autocast", "bfloat16", "window"],
)
def test_packs_of_any_number_of_samples_share_graphs(options, autocast, count):
    model = small_model(**options)
    plain = copy.deepcopy(model)
    compiled = compile_blocks(model, backend=CompileCounterWithBackend("aot_eager"))
    assert str(compiled) == "2 InternVLVisionLayer, 2 Qwen2DecoderLayer compiled"
    check_equal(model, plain, count, autocast)
    check_graphs()


@pytest.mark.slow
def test_adapters_share_graphs_too():
    model = small_model(lora=True, recomputes=True)
    plain = copy.deepcopy(model)
    compile_blocks(model, backend=CompileCounterWithBackend("aot_eager"))
    check_equal(model, plain, 6)
    check_graphs()


@pytest.mark.slow
@pytest.mark.parametrize("by_call", [True, False])
def test_blocks_that_a_user_compiles_share_graphs(by_call):
    model = small_model(recomputes=True)
    plain = copy.deepcopy(model)
    options = {"backend": CompileCounterWithBackend("aot_eager"), "dynamic": True}
    for block in blocks_of(model):
        if by_call:
            block.compile(**options)
        else:
            block.forward = torch.compile(block.forward, **options)
    check_equal(model, plain, 6)
    if by_call:  # hidden states of encoders are captured within their call, and behind their forward
        assert all("ContextVar" in reason for reason in counters["graph_break"])
        counters["graph_break"].clear()
    check_graphs()


@pytest.mark.slow
def test_the_kernel_for_packs_stays_in_the_graph(monkeypatch):
    def kernel(query, key, value, bounds, keys, longest, longest_key, scale, window_size, **groups):
        assert window_size == (-1, 0)
        sample = torch.bucketize(torch.arange(len(query)), bounds[1:], right=True)
        mask = (sample[:, None] == sample).tril()
        mixed = functional.scaled_dot_product_attention(
            *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)), mask, scale=scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1)

    plain = small_model()
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_kernel_serves", lambda query, dropout: True)
    model = copy.deepcopy(plain)
    compile_blocks(model, backend=CompileCounterWithBackend("aot_eager"))
    for pack in packs_of(4):
        found = trained(model, pack, autocast=False)
        with monkeypatch.context() as without:
            without.setattr(attention, "_kernel_serves", lambda query, dropout: False)
            assert_close(found, trained(plain, pack, autocast=False))
    check_graphs()


def test_evaluation_copies_and_models_left_alone_run_uncompiled():
    model, ran = small_model(), []
    (pack,) = packs_of(1)
    compiled = compile_blocks(model, backend=lambda graph, inputs: ran.append(1) or graph)
    expected = trained(model, pack, autocast=False)[0]
    assert ran
    other = copy.deepcopy(model)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    assert torch.equal(trained(other, pack, autocast=False)[0], expected)  # by its own weights
    torch._dynamo.reset()
    ran.clear()
    with torch.no_grad():
        model.eval()(**pack)
    assert not ran
    compiled.undo()
    trained(model.train(), pack, autocast=False)
    assert not ran and not any("forward" in vars(block) for block in model.modules())


def test_blocks_that_count_what_packs_hold_are_left():
    compiled = compile_blocks(plain_family_model(config_of("qwen2_5_vl")))
    assert str(compiled) == "2 Qwen2_5_VLDecoderLayer compiled; 4 Qwen2_5_VLVisionBlock left"
    with pytest.raises(ConfigError, match=r"model must have blocks that torch.compile can take, .* got 1 Qwen2_5_VLD"):
        compile_blocks(compiled.blocks[0])


def test_attention_weights_are_captured_as_before():
    model, (pack,) = small_model().eval(), packs_of(1)
    tower = model.model.vision_tower
    assert tower(pack["pixel_values"], output_attentions=True).attentions == ()
    tower.set_attn_implementation("eager")
    found = tower(pack["pixel_values"], output_attentions=True).attentions
    assert [weights.shape[:2] for weights in found] == [(len(pack["pixel_values"]), 2)] * 2
