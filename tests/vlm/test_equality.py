"""The layers of every family that can be trained are plain transformers on each sample alone."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from omnibal.families.base import check_frozen
from omnibal.loss import targets_of
from omnibal.passes import kept_bytes
from omnibal.profile.records import LEVELS
from omnibal.vlm import Payload, load_model
from omnibal.vlm.payload import run_layer
from tests.families.models import small_config
from tests.integrations.items import items_of_kinds
from tests.vlm.families import (
    TRAINED,
    family_samples,
    layers_of,
    named_on_disk,
    pack_of,
    plain_backward,
    plain_family_model,
    tied_config,
)
from tests.vlm.models import disk_state, pack_loss, run_layers

PACKS = {"mixed": [0, 1, 2, 3, 4, 5, 6], "text only": [1, 4], "one image": [6], "two images": [5]}
CASES = {
    **{
        f"{family} {pack} {'tied' if tied else 'untied'}": (
            tied_config(family) if tied else small_config(family),
            pack,
        )
        for family in TRAINED
        for pack, tied in [(pack, pack == "mixed") for pack in PACKS] + [("mixed", False)]
    },
    **{
        f"{family} with {text}": (small_config(family, text={"model_type": text}), "mixed")
        for family in TRAINED
        if not family.startswith("qwen")
        for text in ("llama", "mistral", "qwen2", "qwen3")
    },
}


def mean_loss(layers, pack, level="none"):
    return pack_loss(layers, pack, level) / (pack["labels"] != -100).sum()


def family_of_config(config, chosen):
    """A model, its layers, a pack, and what plain transformers makes of the samples, with its parameters."""
    samples = [family_samples(config.model_type)[index] for index in PACKS[chosen]]
    model, plain = load_model(config), plain_family_model(config)
    layers = layers_of(model, plain.state_dict())
    loss, logits = plain_backward(plain, samples)
    return model, layers, pack_of(model, samples), loss, logits, named_on_disk(model, plain)


def check_gradient(ours, theirs, name):
    if theirs is None:  # plain transformers never ran the ViT
        assert ours.count_nonzero() == 0, name
    else:
        assert_close(ours, theirs, rtol=1e-3, atol=2e-6, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize(("config", "chosen"), CASES.values(), ids=CASES)
def test_packs_give_logits_loss_and_gradients_of_plain_transformers(config, chosen):
    model, layers, pack, loss, expected, theirs = family_of_config(config, chosen)
    with torch.no_grad():
        assert_close(run_layers(layers, pack)[0], torch.cat(expected), rtol=1e-4, atol=2e-5)
    ours = mean_loss(layers, pack)
    assert ours.item() == pytest.approx(loss, rel=1e-5)
    ours.backward()
    gradients = disk_state(model, layers, gradients=True)
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        check_gradient(gradient, theirs[name].grad, name)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kinds", [["video", "video+video"], ["video+image", "", "image+video", "image"]])
def test_packs_with_videos_give_logits_loss_and_gradients_of_plain_transformers(family, kinds):
    """Images and videos are one sequence for the ViT here, and two calls there."""
    config, samples = small_config(family), items_of_kinds(family, kinds)
    model, plain = load_model(config), plain_family_model(config)
    layers, pack = layers_of(model, plain.state_dict()), pack_of(model, samples)
    loss, logits = plain_backward(plain, samples)
    with torch.no_grad():
        assert_close(run_layers(layers, pack)[0], torch.cat(logits), rtol=1e-4, atol=2e-5)
    ours = mean_loss(layers, pack)
    assert ours.item() == pytest.approx(loss, rel=1e-6)
    ours.backward()
    theirs = named_on_disk(model, plain)
    for name, gradient in disk_state(model, layers, gradients=True).items():
        check_gradient(gradient, theirs[name].grad, name)


def freeze(model, layers, frozen):
    for index, layer in enumerate(layers):
        names = model.weight_names(index)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not model.records[index].freezes(names[name], frozen))
            parameter.grad = None


@pytest.mark.parametrize("family", TRAINED)
def test_a_frozen_front_keeps_nothing_and_sends_no_gradient(family):
    config = small_config(family)
    model, samples = load_model(config), family_samples(family)
    layers = layers_of(model, plain_family_model(config).state_dict())
    given = Payload.of_pack(pack_of(model, [samples[index] for index in PACKS["mixed"]]))
    with torch.no_grad():  # tables of positions are made once for a pack, and kept with it
        layers[0](given)
    for frozen, keeps in ((("vision",), False), ((), True)):
        freeze(model, layers, frozen)
        for level in LEVELS:
            payload, kept = given, []
            for layer, record in zip(layers, model.records, strict=True):
                if record.module != "vision":
                    break
                free = [*layer.parameters(), *layer.buffers(), *floats(payload), *payload.integers.values()]
                made = []
                kept.append(kept_bytes(partial(forward, layer, payload, level, made), free=free))
                payload = made[0]
            assert keeps or not any(kept), kept
            assert any(kept) or not keeps or level == "full"  # full keeps inputs, which are handed on anyway
            assert any(tensor.requires_grad for tensor in floats(payload)) == keeps


def forward(layer, payload, level, made):
    made.append(run_layer(layer, payload, level))
    return floats(made[0])


def floats(payload):
    return [payload.hidden, *payload.features.values()]


@pytest.mark.parametrize("family", TRAINED)
def test_levels_and_frozen_layers_leave_the_other_gradients_as_they_are(family):
    model, layers, pack, _, _, theirs = family_of_config(small_config(family), "mixed")
    for frozen in ((), ("vision",), ("language",), ("*.[02].*", "*.bias", "*norm*", "projector")):
        check_frozen(model.records, frozen)
        for level in LEVELS:
            freeze(model, layers, frozen)
            mean_loss(layers, pack, level).backward()
            for index, layer in enumerate(layers):
                names = model.weight_names(index)
                for name, parameter in layer.named_parameters():
                    if model.records[index].freezes(names[name], frozen):
                        assert parameter.grad is None
                    else:
                        check_gradient(parameter.grad, theirs[names[name]].grad, names[name])


@pytest.mark.parametrize("family", TRAINED)
def test_cuts_send_what_later_layers_read_and_give_it_gradients(family):
    model, layers, pack, _, _, _ = family_of_config(small_config(family), "mixed")
    expected = run_layers(layers, pack)
    pack_loss(layers, pack).backward()
    whole = {name: gradient.clone() for name, gradient in disk_state(model, layers, gradients=True).items()}
    for layer in layers:
        layer.zero_grad()
    sent, stages = Payload.of_pack(pack), []
    for boundary, layer in enumerate(layers):
        layout = model.sent_tensors(boundary)
        received = [t.detach().requires_grad_(t.is_floating_point()) for t in layout.flatten(sent)]
        given = layout.build(received)
        if layer is layers[-1]:
            assert torch.equal(layer(given).hidden, expected)
            given = given.with_integers(targets_of(pack["labels"]))
        sent = layer(given)
        assert all(tensor.is_contiguous() for tensor in model.sent_tensors(boundary + 1).flatten(sent))
        stages.append((received, model.sent_tensors(boundary + 1).floats(sent)))
    gradients = [torch.ones(())]
    for received, outputs in reversed(stages):
        torch.autograd.backward(outputs, gradients)
        gradients = [tensor.grad for tensor in received if tensor.is_floating_point()]
        assert all(gradient is not None for gradient in gradients)
    for name, gradient in disk_state(model, layers, gradients=True).items():
        assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6, msg=name)
