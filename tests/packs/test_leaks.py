"""A model's packs are proved exact, or the layer that lets something across is named."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

import omnibal
from omnibal.errors import ConfigError
from omnibal.formats.collate import SLICED_TYPES, VIDEO_TYPES
from omnibal.packs.apart import StatefulLayers, mask_images
from omnibal.packs.collator import FAMILIES, as_alone
from omnibal.packs.encoders import blank_image, image_tokens
from omnibal.packs.leaks import compare
from omnibal.packs.proof import as_pack, check_packed, check_packing, made_samples, small_config, two_texts
from tests.families import models

# What lets something across in transformers' own layers.
LEAKING = {
    "gemma3": ("Gemma3Attention", "attention"),
    "gemma4": ("Gemma4TextAttention", "attention"),
    "paligemma": ("GemmaAttention", "attention"),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", "recurrent state"),
    "lfm2_vl": ("Lfm2ShortConv", "convolution"),
}


def model_of(family, **changes):
    config = models.small_config(family, **changes)
    config.text_config.initializer_range = 0.3  # with smaller weights little gets across
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).float()


def llama():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "initializer_range": 0.3, "pad_token_id": None,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes))


HEARING = ("qwen2_audio", "qwen2_5_omni_thinker")  # test_sounds.py holds their packs against samples alone


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*LEAKING, *HEARING}))
def test_exact_packs_are_proved(family):
    model = model_of(family)
    videos = [sample for sample in made_samples(model) if "pixel_values_videos" in sample]
    assert len(videos) == (family in (*VIDEO_TYPES, *SLICED_TYPES))
    found = check_packing(model)
    assert found.is_exact
    assert found.leaks == ()
    assert found.has_images
    assert found.logits_error < 1e-6
    assert 0 < found.gradients_error < 1e-5
    found.require()


@pytest.mark.parametrize("family", LEAKING)
def test_layers_that_leak_are_all_named_and_no_others(family):
    model, (class_name, kind) = model_of(family), LEAKING[family]
    found = check_packing(model)
    assert not found.is_exact
    expected = [name for name, module in model.named_modules() if type(module).__name__ == class_name]
    expected = expected[:2] if family == "gemma4" else expected  # which sees images whole in layers with a window alone
    assert [leak.module for leak in found.leaks] == expected
    assert {leak.kind for leak in found.leaks} == {kind}
    with pytest.raises(
        ConfigError, match=rf"got logits that differ .*, through \S+ \({class_name}, {kind}\): .*; {kind}: "
    ):
        found.require()


def test_only_the_layer_that_leaks_is_named():
    class Mean(nn.Module):
        """Adds what all tokens say to each of them."""

        def forward(self, hidden):
            return hidden + hidden.mean(dim=1, keepdim=True)

    model = llama()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, Mean())
    found = check_packing(model)
    assert [(leak.module, leak.class_name, leak.kind) for leak in found.leaks] == [
        ("model.layers.1.mlp.1", "Mean", "other")
    ]


def test_what_leaks_by_less_than_the_tolerance_is_found():
    class Trace(nn.Module):
        def forward(self, hidden):
            return hidden + 1e-7 * hidden.cumsum(dim=1)

    model = llama()
    model.model.layers[2].input_layernorm = nn.Sequential(model.model.layers[2].input_layernorm, Trace())
    found = check_packing(model)
    assert found.logits_error < found.tolerance
    assert [leak.class_name for leak in found.leaks] == ["Trace"]
    assert not found.is_exact


@pytest.mark.parametrize("family", ["llava", "llava_onevision", "mistral3"])
def test_a_leak_that_32_bits_would_drown_is_named(family):
    class Mean(nn.Module):
        def forward(self, hidden):
            return hidden + 1e-4 * hidden.mean(dim=1, keepdim=True)

    model = model_of(family)
    layer = model.model.language_model.layers[-1]
    layer.input_layernorm = nn.Sequential(layer.input_layernorm, Mean())
    before = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    found = check_packing(model)
    assert [leak.class_name for leak in found.leaks] == ["Mean"]
    assert found.logits_error < 1e-4
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())


def test_positions_that_go_on_are_named():
    class Learned(nn.Module):
        """Adds a vector of a token's place in its row."""

        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(99, 16))

        def forward(self, hidden):
            return hidden + self.table[: hidden.shape[1]]

    model = llama()
    model.model.layers[0].input_layernorm = Learned()
    found = check_packing(model)
    assert [leak.module for leak in found.leaks] == ["model.layers.0.input_layernorm"]


def test_a_backward_pass_that_leaks_is_found():
    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(context, hidden):
            return hidden * 1.0

        @staticmethod
        def backward(context, gradient):
            return gradient + gradient.mean(dim=1, keepdim=True)

    class Leaky(nn.Module):
        def forward(self, hidden):
            return Shared.apply(hidden)

    model = llama()
    model.model.layers[1].input_layernorm = Leaky()
    found = check_packing(model)
    assert (found.leaks, found.logits_error < 1e-5) == ((), True)
    assert found.gradients_error > found.tolerance
    with pytest.raises(ConfigError, match="through a backward pass, and no module of the forward pass"):
        found.require()
    assert check_packing(model, gradients=False).is_exact


def test_a_collator_of_ones_own():
    model = llama()
    items = [torch.arange(3, 9), torch.arange(20, 23)]

    def flat(items, restart=True):
        places = [torch.arange(len(item)) for item in items]
        where = torch.cat(places) if restart else torch.arange(sum(map(len, items)))
        return {"input_ids": torch.cat(items)[None], "position_ids": where[None], "use_cache": False}

    def masked(items):
        return {"input_ids": torch.cat(items)[None], "attention_mask": torch.ones(1, sum(map(len, items)))}

    assert check_packing(model, flat, items).is_exact
    for leaking in (masked, lambda items: flat(items, restart=False)):
        found = check_packing(model, leaking, items)
        assert {leak.kind for leak in found.leaks} == {"attention"}
        assert len(found.leaks) == 3
    with pytest.raises(ConfigError, match=r"tokens of its items one after another in one row of 9, .* \(2, 6\)"):
        check_packing(model, lambda items: {"input_ids": nn.utils.rnn.pad_sequence(items, batch_first=True)}, items)
    with pytest.raises(ConfigError, match="items must be two samples or more to check packs with, got 1"):
        check_packing(model, flat, items[:1])
    with pytest.raises(ConfigError, match="collate and items must come together, got collate alone"):
        check_packing(model, flat)


def test_a_check_changes_nothing():
    model = model_of("qwen3_5")
    model.train()
    model.model.visual.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    omnibal.check_packing(model)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("share", [0.3, 0.1, 0.03])
def test_16_bits_hide_no_small_leak_and_no_other_module_is_named(share):
    class Mean(nn.Module):
        def forward(self, hidden):
            return hidden + share * hidden.mean(dim=1, keepdim=True)

    model = llama().bfloat16()
    model.model.layers[1].input_layernorm = nn.Sequential(model.model.layers[1].input_layernorm, Mean())
    assert [leak.class_name for leak in check_packing(model, gradients=False).leaks] == ["Mean"]


def test_16_bits_hide_no_leak_of_a_state():
    model = model_of("qwen3_5").bfloat16()
    assert {leak.kind for leak in check_packing(model, gradients=False).leaks} == {"recurrent state"}
    assert check_packing(model_of("qwen3_vl").bfloat16(), gradients=False).is_exact


def test_the_start_of_a_training_names_the_layer():
    model = model_of("internvl")
    model.model.language_model.layers[1].mlp.register_forward_hook(lambda module, given, output: output.cumsum(1))
    with pytest.raises(ConfigError, match=r"through model\.language_model\.layers\.1.* balance\(\.\.\., padded=True\)"):
        check_packed(model, *two_texts(model.config))


def test_layers_with_a_state_run_sample_by_sample():
    model = model_of("qwen3_5")
    samples = made_samples(model)
    leaks = check_packing(model).leaks
    StatefulLayers(model, [leak.module for leak in leaks])
    assert check_packing(model).is_exact
    pack = as_pack(model, samples)
    with torch.no_grad():  # whatever is no pack runs as before: rows with padding, and generation with its cache
        padded = model(**as_alone(samples[1]))["logits"]
        model(**pack)
        assert torch.equal(model(**as_alone(samples[1]))["logits"], padded)
        assert model.generate(samples[1]["input_ids"][None], max_new_tokens=3, do_sample=False).shape[1] == 19


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_images_are_seen_whole_in_their_own_samples_alone(family):
    model = model_of(family)
    mask_images(model)
    found = check_packing(model)
    assert found.is_exact
    assert found.has_images


def by_segment(function, bounds, dim, tensors, **options):
    """What a kernel with bounds of samples computes: a function of transformers, which knows none, for each sample."""
    parts = [
        function(*(tensor.narrow(dim, start, stop - start) for tensor in tensors), **options)
        for start, stop in pairwise(bounds.tolist())
    ]
    return torch.cat(parts, dim)


@pytest.mark.parametrize("honest", [True, False])
def test_kernels_get_the_bounds_of_samples_where_they_heed_them(monkeypatch, honest):
    rule, convolution = modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn
    given = []

    def chunked(query, key, value, *, g, beta, cu_seqlens=None, seq_idx=None, **options):
        given.append(cu_seqlens)
        if cu_seqlens is None or not honest:
            return rule(query, key, value, g=g, beta=beta, **options)

        def part(query, key, value, g, beta):
            return rule(query, key, value, g=g, beta=beta, **options)[0]

        return by_segment(part, cu_seqlens, 1, (query, key, value, g, beta)), None

    def convolved(hidden, weight, bias, activation=None, seq_idx=None, **others):
        if seq_idx is None:
            return convolution(hidden, weight, bias, activation=activation)
        bounds = torch.tensor([0, *seq_idx[0].bincount().cumsum(0)])
        return by_segment(lambda part: convolution(part, weight, bias, activation=activation), bounds, 2, (hidden,))

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", chunked)
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", convolved)
    for name in ("is_flash_linear_attention_available", "is_causal_conv1d_available"):
        monkeypatch.setattr(f"transformers.utils.import_utils.{name}", lambda: True)
    model = model_of("qwen3_5")
    check_packed(model, *two_texts(model.config))
    assert check_packing(model).is_exact
    given.clear()
    model(**as_pack(model, made_samples(model)))
    layers = model.config.text_config.layer_types.count("linear_attention")
    if honest:
        assert [bounds.tolist() for bounds in given] == layers * [[0, 12, 28, 35, 43]]
    else:
        assert given == 4 * layers * [None]  # once for each sample


def test_small_models_have_each_kind_of_layer_and_leak_alike():
    config = models.small_config(
        "qwen3_5", text={"num_hidden_layers": 12, "hidden_size": 96}, vision={"out_hidden_size": 96}
    )
    small = small_config(config)
    text = small.get_text_config()
    assert set(text.layer_types) == set(config.get_text_config().layer_types)
    assert text.num_hidden_layers == len(text.layer_types) < 12
    assert text.hidden_size == small.vision_config.out_hidden_size < 96
    assert config.get_text_config().hidden_size == 96


def test_samples_differ_in_what_they_hold():
    model = model_of("qwen2_5_vl")
    samples = made_samples(model)
    assert [len(sample.get("image_grid_thw", ())) for sample in samples] == [1, 0, 2, 0]
    assert len({len(sample["input_ids"]) for sample in samples}) == len(samples)
    found = compare(model, [*map(as_alone, samples)], as_pack(model, samples))
    assert found.gradients_error is None


def test_images_go_to_the_model_wherever_it_lies():
    model = model_of("internvl")
    image = blank_image(model)
    assert image_tokens(model, image) == image_tokens(model.to("meta"), image) > 0
