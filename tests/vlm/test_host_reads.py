"""A micro-batch passes the layers, forward and backward, without the host asking the device for a single number.

Tensors of torch's device "meta" have shapes but no values: whoever asks for one fails. Attention goes as on a GPU.
"""

import pytest
import torch

from omnibal.loss import targets_of
from omnibal.profile.records import LEVELS
from omnibal.vlm import attention, load_model
from omnibal.vlm.payload import PackCounts, Payload, WeightGradients, defer_linears, note_counts, run_layer
from tests.families.models import small_config
from tests.vlm.families import TRAINED, family_samples, pack_of
from tests.vlm.models import IMAGE_TOKEN, build_layers, make_pack, make_sample, tiny_config

PACK = make_pack([make_sample(1, tiles=(1,)), make_sample(2), make_sample(3, tiles=(2, 1))])
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
TEXT_PACK = make_pack([make_sample(4), make_sample(5)])


@pytest.fixture(autouse=True)
def gpu_attention(monkeypatch):
    monkeypatch.setattr(attention, "_kernel_serves", lambda query, dropout: dropout == 0)


def on_meta(pack, *, noted=True):
    payload = Payload.of_pack({name: tensor.to("meta") for name, tensor in pack.items()}, torch.bfloat16)
    if noted:
        image_tokens = int((pack["input_ids"] == IMAGE_TOKEN).sum())
        note_counts([payload.cu_seq_lens], PackCounts(image_tokens, tuple(pack["cu_seq_lens"].diff().tolist())))
    return payload


def family_on_meta(model, samples):
    """What a family's model gets on a GPU, with all that the engine notes of it."""
    pack = pack_of(model, samples)
    payload = Payload.of_pack({name: tensor.to("meta") for name, tensor in pack.items()}, torch.bfloat16)
    image_tokens = int((pack["input_ids"] == model.config.image_token_id).sum())
    integers = {name: pack[name].tolist() for name in model.image_integers}
    note_counts([payload.cu_seq_lens], PackCounts(image_tokens, tuple(pack["cu_seq_lens"].diff().tolist()), integers))
    return payload, pack["labels"]


@pytest.mark.parametrize("chosen", [[0, 1, 2, 6], [1, 4]], ids=["mixed", "text only"])
@pytest.mark.parametrize("family", [family for family in TRAINED if family != "internvl"])
def test_families_ask_the_device_for_nothing(family, chosen):
    model = load_model(small_config(family))
    layers = [layer.to("meta") for layer in build_layers(model, dtype=torch.bfloat16)]
    payload, labels = family_on_meta(model, [family_samples(family)[index] for index in chosen])
    run(layers, payload.with_integers(meta_targets(labels)), "full").backward()
    assert all(parameter.grad is not None for layer in layers for parameter in layer.parameters())


def meta_targets(labels):
    return {name: value.to("meta") for name, value in targets_of(labels).items()}


def run(layers, payload, level):
    for layer in layers:
        payload = run_layer(layer, payload, level)
    return payload.hidden


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pack", [PACK, TEXT_PACK], ids=["mixed", "text only"])
@pytest.mark.parametrize("config", [{}, {"tied": True, "text_options": DYNAMIC}], ids=["plain", "tied, dynamic"])
def test_layers_and_loss_ask_the_device_for_nothing(config, pack, level):
    layers = [layer.to("meta") for layer in build_layers(load_model(tiny_config(**config)), dtype=torch.bfloat16)]
    queue = WeightGradients()
    for layer in layers:
        defer_linears(layer, queue)
    run(layers, on_meta(pack).with_integers(meta_targets(pack["labels"])), level).backward()
    queue.run(0)
    trained = [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad.shape == parameter.shape for parameter in trained)


def test_what_is_not_noted_is_asked_for():
    layers = [layer.to("meta") for layer in build_layers(load_model(tiny_config()), dtype=torch.bfloat16)]
    with pytest.raises(RuntimeError, match="meta"):
        run(layers, on_meta(PACK, noted=False), "none")
