"""The layers of a model together are plain transformers on each sample alone."""

import pytest
import torch
from torch.testing import assert_close

from omnibal.errors import DataError
from omnibal.vlm import Payload, load_model
from tests.vlm.models import (
    build_layers,
    disk_state,
    make_pack,
    make_sample,
    pack_loss,
    plain_gradients,
    plain_logits,
    plain_loss,
    plain_model,
    run_layers,
    tiny_config,
)

ONE_IMAGE, TWO_IMAGES, TEXT = make_sample(1, tiles=(2,)), make_sample(2, tiles=(1, 3)), make_sample(3, answer=5)
SHORT = make_sample(4, question=1, answer=1)
PACKS = {
    "mixed": [TEXT, TWO_IMAGES, SHORT, ONE_IMAGE],
    "text only": [TEXT, SHORT, make_sample(5)],
    "one sample": [ONE_IMAGE],
}
CONFIGS = {
    "qwen2 tied": tiny_config(tied=True),
    "llama tied": tiny_config(tied=True, text="llama", text_options={"attention_bias": True, "mlp_bias": True}),
    "sliding window": tiny_config(
        text_options={"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "num_hidden_layers": 2}
    ),
    "dynamic rotary": tiny_config(
        text_options={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    ),
    "llama 3 rotary": tiny_config(
        text="llama",
        text_options={
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    "other ViT": tiny_config(
        vision_options={
            "norm_type": "rms_norm",
            "use_qk_norm": True,
            "attention_bias": True,
        }
    ),
}


@pytest.mark.parametrize("samples", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_packs_give_the_logits_loss_and_gradients_of_plain_transformers(config, samples):
    model = load_model(config)
    layers = build_layers(model)
    plain, pack = plain_model(model, layers), make_pack(samples)

    logits = run_layers(layers, pack)
    expected = torch.cat([plain_logits(plain, sample) for sample in samples])
    assert_close(logits[0], expected, rtol=1e-5, atol=2e-6)

    loss, plain_sum = pack_loss(layers, pack), plain_loss(plain, samples)
    assert_close(loss, plain_sum, rtol=1e-6, atol=0)
    loss.backward()
    plain_sum.backward()
    ours, theirs = disk_state(model, layers, gradients=True), plain_gradients(model, plain)
    assert ours.keys() == theirs.keys()
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        assert parameter.requires_grad == (parameter.grad is not None)
    for name, gradient in theirs.items():
        if name.endswith("mask_token"):
            assert ours[name] is None
        elif gradient is None:  # plain transformers never ran the ViT
            assert ours[name].count_nonzero() == 0, name
        else:
            assert_close(ours[name], gradient, rtol=1e-4, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_the_comparison_would_notice_attention_across_samples():
    model = load_model(tiny_config())
    layers, pack = build_layers(model), make_pack([TEXT, SHORT])
    together = pack | {"cu_seq_lens": torch.tensor([0, pack["input_ids"].shape[1]], dtype=torch.int32)}
    difference = run_layers(layers, pack) - run_layers(layers, together)
    assert difference[0, : len(TEXT["input_ids"])].abs().max() == 0
    assert difference.abs().max() > 1e-2


def muted(sample):
    """The sample without targets."""
    return sample | {"labels": torch.full_like(sample["labels"], -100)}


def test_a_sample_does_not_notice_what_its_neighbours_say():
    model = load_model(tiny_config())
    layers = build_layers(model)
    results = []
    for before, after in ((11, 12), (13, 14)):
        pack = make_pack([muted(make_sample(before, tiles=(1,))), TWO_IMAGES, muted(make_sample(after, tiles=(1,)))])
        start, stop = pack["cu_seq_lens"][1:3].tolist()
        for layer in layers:
            layer.zero_grad()
        pack_loss(layers, pack).backward()
        gradients = {name: grad.clone() for name, grad in disk_state(model, layers, gradients=True).items()}
        results.append((run_layers(layers, pack)[0, start:stop], gradients))
    (logits, gradients), (other_logits, other_gradients) = results
    assert torch.equal(logits, other_logits)
    for name, gradient in gradients.items():
        assert_close(gradient, other_gradients[name], rtol=0, atol=1e-7, msg=name)


def test_a_samples_gradient_is_the_same_alone_and_in_company():
    model = load_model(tiny_config(tied=True))
    gradients = []
    for samples in ([ONE_IMAGE], [TEXT, ONE_IMAGE, TWO_IMAGES]):
        layers = build_layers(model)
        pack = make_pack([sample if sample is ONE_IMAGE else muted(sample) for sample in samples])
        pack_loss(layers, pack).backward()
        gradients.append(disk_state(model, layers, gradients=True))
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("samples", PACKS.values(), ids=PACKS.keys())
def test_between_layers_one_contiguous_float_then_the_same_integers(samples):
    model, pack = load_model(tiny_config()), make_pack(samples)
    payload = Payload.of_pack(pack)
    tiles, tokens = len(pack["pixel_values"]), pack["input_ids"].shape[1]
    shapes = {
        "patch_embedding": (tiles, 17, 24),
        "vision_block": (tiles, 17, 24),
        "projector": (4 * tiles, 32),
        "text_embedding": (1, tokens, 32),
        "decoder_block": (1, tokens, 32),
        "final_norm": (1, tokens, 32),
        "head": (1, tokens, 61),
    }
    for record, layer in zip(model.records, build_layers(model), strict=True):
        before, payload = payload, layer(payload)
        assert payload.hidden.shape == shapes[record.kind] and payload.hidden.is_contiguous(), record.name
        assert payload.integers is before.integers and not payload.features


def test_a_pack_without_images_sends_zero_gradients_through_every_boundary():
    model, pack = load_model(tiny_config()), make_pack([TEXT])
    layers = build_layers(model)
    payload = Payload.of_pack(pack)
    passed = []
    for layer in layers:  # as stages do: each float received is a leaf that requires a gradient
        hidden = payload.hidden.detach().requires_grad_()
        payload = layer(payload.replace(hidden=hidden))
        passed.append((hidden, payload.hidden))
    gradient = torch.ones_like(payload.hidden)
    for hidden, output in reversed(passed):
        output.backward(gradient)
        gradient = hidden.grad
        assert gradient is not None and gradient.shape == hidden.shape
    for record, layer in zip(model.records, layers, strict=True):
        silent = record.kind in ("patch_embedding", "vision_block", "projector")
        assert all(parameter.grad is not None for parameter in layer.parameters()), record.name
        if silent:
            assert all(parameter.grad.count_nonzero() == 0 for parameter in layer.parameters()), record.name


def test_bfloat16_goes_through_whole():
    model, pack = load_model(tiny_config()), make_pack([ONE_IMAGE, TEXT])
    exact, rounded = (run_layers(build_layers(model, dtype=dtype), pack) for dtype in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert_close(rounded.float(), exact, rtol=0, atol=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_wrong_number_of_image_tokens_names_both_counts(tied):
    layers, pack = build_layers(load_model(tiny_config(tied=tied))), make_pack([ONE_IMAGE])
    pack["pixel_values"] = pack["pixel_values"][:1]
    with pytest.raises(DataError, match="got 8 image tokens in input_ids and 4 features"):
        run_layers(layers, pack)


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "rope_theta": 1e4,
    "factor": 2.0, "original_max_position_embeddings": 40,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
BY_LENGTH = {
    "dynamic": tiny_config(text_options={"rope_parameters": DYNAMIC, "max_position_embeddings": 40}),
    "longrope": tiny_config(text="llama", text_options={"rope_parameters": LONGROPE}),
}


@pytest.mark.parametrize("config", BY_LENGTH.values(), ids=BY_LENGTH.keys())
def test_each_sample_gets_the_rotary_tables_of_its_own_length(config):
    model = load_model(config)
    layers = build_layers(model)
    plain = plain_model(model, layers)
    samples = [make_sample(number, question=words) for number, words in enumerate((20, 60, 34, 5, 90, 70, 30))]
    rotary = plain.model.language_model.rotary_emb
    with torch.no_grad():
        found = run_layers(layers, make_pack(samples))[0].split([len(each["input_ids"]) for each in samples])
        for logits, sample in zip(found, samples, strict=True):
            fresh = type(rotary)(plain.config.text_config)  # transformers' frequencies are state
            plain.model.language_model.rotary_emb = fresh
            torch.testing.assert_close(logits, plain_logits(plain, sample), rtol=1e-4, atol=1e-5)
            if len(sample["input_ids"]) > 40:
                assert not torch.equal(fresh.inv_freq, fresh.original_inv_freq), "the sample is long enough to show"
