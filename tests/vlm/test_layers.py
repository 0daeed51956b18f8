"""Building layers one at a time."""

import pytest
import torch
from torch.testing import assert_close
from transformers import InternVLForConditionalGeneration

from omnibal.families import layer_records
from omnibal.vlm import load_model
from omnibal.vlm.measure import MadePack
from omnibal.vlm.text import Head, TextEmbedding, TiedEmbedding
from tests.vlm.models import disk_state, tiny_config


def weights_of(layer):
    return dict(layer.state_dict())


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_do_not_depend_on_what_else_is_built(tied):
    model = load_model(tiny_config(tied=tied))
    forwards = [weights_of(model.build_layer(index, seed=7)) for index in range(len(model.records))]
    torch.manual_seed(99)
    another = load_model(tiny_config(tied=tied))
    for index in reversed(range(len(another.records))):
        assert same_bits(weights_of(another.build_layer(index, seed=7)), forwards[index])


def test_initial_weights_differ_between_layers_and_seeds():
    model = load_model(tiny_config())
    names = [record.name for record in model.records]
    blocks = [names.index("vision_block.0"), names.index("vision_block.1")]
    first, second = (weights_of(model.build_layer(index, seed=0)) for index in blocks)
    again = weights_of(model.build_layer(blocks[0], seed=1))
    assert not torch.equal(first["block.mlp.fc1.weight"], second["block.mlp.fc1.weight"])
    assert not torch.equal(first["block.mlp.fc1.weight"], again["block.mlp.fc1.weight"])


def test_tied_ends_are_one_class_with_one_weight():
    model = load_model(tiny_config(tied=True))
    keys = [record.tied_key for record in model.records]
    first, last = keys.index("embedding"), len(keys) - 1
    assert keys.count("embedding") == 2 and keys[last] == "embedding"
    assert model.layer_class(first) is model.layer_class(last) is TiedEmbedding
    assert same_bits(weights_of(model.build_layer(first, seed=3)), weights_of(model.build_layer(last, seed=3)))
    assert model.weight_names(first) == model.weight_names(last)
    for name in TiedEmbedding.tied_weights:
        assert model.build_layer(first, seed=0).get_parameter(name).shape == (61, 32)
    untied = load_model(tiny_config())
    assert (untied.layer_class(first), untied.layer_class(last)) == (TextEmbedding, Head)


def test_the_random_state_outside_stays_as_it_was():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = load_model(tiny_config())
    for index in range(len(model.records)):
        model.build_layer(index, seed=index)
    assert torch.equal(torch.get_rng_state(), before)


def test_bfloat16_weights_are_the_float32_ones_rounded():
    model = load_model(tiny_config())
    for index in range(len(model.records)):
        exact, rounded = (
            weights_of(model.build_layer(index, seed=0, dtype=t)) for t in (torch.float32, torch.bfloat16)
        )
        assert same_bits({name: tensor.bfloat16() for name, tensor in exact.items()}, rounded)


@pytest.mark.parametrize("cast", ["built", "cast later"])
def test_rotary_frequencies_stay_exact_in_bfloat16(cast):
    model = load_model(tiny_config())
    index = [record.kind for record in model.records].index("decoder_block")
    if cast == "built":
        layer = model.build_layer(index, seed=0, dtype=torch.bfloat16)
    else:  # as DeepSpeed's engine does
        layer = model.build_layer(index, seed=0).bfloat16()
    assert layer.block.mlp.up_proj.weight.dtype == torch.bfloat16
    expected = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    assert_close(layer.rotary.rotary.inv_freq, expected, rtol=1e-6, atol=0)
    cosines, _ = layer.rotary(torch.zeros(1, 1, 32, dtype=torch.bfloat16), torch.tensor([[1001]]))
    assert_close(cosines[0, 0, :4], (1001 * expected).cos().bfloat16())


def test_layers_follow_to_other_devices_whole():
    model = load_model(tiny_config())
    for index in range(len(model.records)):
        layer = model.build_layer(index, seed=0, device="meta")
        assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))


def test_initial_weights_are_distributed_as_transformers_does():
    config = tiny_config(vision_options={"initializer_range": 0.05, "hidden_size": 64})
    model = load_model(config)
    layers = [model.build_layer(index, seed=0) for index in range(len(model.records))]
    ours = disk_state(model, layers)
    plain = InternVLForConditionalGeneration(config)
    theirs = {model.disk_name(name): tensor.detach() for name, tensor in plain.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if tensor.std() == 0:
            assert torch.equal(ours[name], tensor), name
        else:
            assert_close(ours[name].std(), tensor.std(), rtol=0.1, atol=0, msg=name)
    assert ours["language_model.model.embed_tokens.weight"][0].count_nonzero() == 0  # the pad token's row


def test_without_a_seed_every_weight_waits_to_be_loaded():
    model = load_model(tiny_config())
    for index in range(len(model.records)):
        layer = model.build_layer(index, seed=None)
        assert all(parameter.isnan().all() for parameter in layer.parameters())
        assert all(buffer.isfinite().all() for buffer in layer.buffers())


CONFIGS = {
    "plain": tiny_config(),
    "tied": tiny_config(tied=True),
    "llama": tiny_config(text="llama"),
    "llama with biases": tiny_config(text="llama", text_options={"attention_bias": True, "mlp_bias": True}),
    "mistral": tiny_config(text="mistral"),
    "qwen3": tiny_config(text="qwen3", text_options={"attention_bias": True}),
    "other ViT": tiny_config(
        vision_options={
            "norm_type": "rms_norm",
            "use_qk_norm": True,
            "attention_bias": True,
        },
        downsample_ratio=0.25,
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_records_count_the_parameters_that_layers_have(config):
    model = load_model(config)
    assert model.records == layer_records(config.to_dict())
    for index, record in enumerate(model.records):
        layer = model.build_layer(index, seed=0, device="meta")
        assert sum(parameter.numel() for parameter in layer.parameters()) == record.sizes["parameters"], record.name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_weight_of_the_plain_model_is_in_exactly_one_layer(config):
    model = load_model(config)
    names = [
        name
        for index in range(len(model.records))
        if model.first_tied(index) == index
        for name in model.weight_names(index).values()
    ]
    assert sorted(names) == sorted(model.disk_name(name) for name, _ in model.skeleton.named_parameters())
    for index in range(len(model.records)):
        assert model.weight_names(index).keys() == model.build_layer(index, seed=None).state_dict().keys()


def test_records_say_how_many_bytes_of_integers_a_cut_sends():
    model, pack = load_model(tiny_config()), MadePack(2, (20, 7))
    payload = pack.payload(model, dtype=torch.float32)
    for boundary, record in enumerate(model.records, start=1):
        integers = [payload.integers[name] for name in model.sent_tensors(boundary).integers if name != "cu_seq_lens"]
        assert sum(tensor.nbytes for tensor in integers) == pack.tokens * record.token_bytes


def test_the_configuration_given_is_left_alone():
    config = tiny_config()
    before = config.to_dict()
    load_model(config)
    assert config.to_dict() == before
    assert config.text_config._attn_implementation != "omnibal_packed"
