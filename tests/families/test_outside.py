"""A family from outside, as docs/models.md shows it, is as good as omnibal's own."""

import json

import pytest
import torch
from torch.testing import assert_close

from omnibal.config import read_config
from omnibal.errors import ConfigError
from omnibal.families import FAMILIES, family_of
from omnibal.vlm import load_model, load_records
from tests.families.models import image_processor, small_config
from tests.families.outside import MODULE, findable, registered
from tests.vlm.families import family_samples, layers_of, named_on_disk, pack_of, plain_backward, plain_family_model
from tests.vlm.models import disk_state, pack_loss, run_layers


@pytest.fixture
def family():
    with registered():
        yield FAMILIES["deepseek_vl"]


def test_a_ds_config_names_the_module_that_registers_it(tmp_path):
    small_config("deepseek_vl").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"got 'deepseek_vl'; .* names a module that registers"):
        load_records(tmp_path)
    with findable():
        read_config({"omnibal": {"model": {"path": str(tmp_path), "family": MODULE}}})
        assert load_records(tmp_path) == FAMILIES["deepseek_vl"].layer_records(small_config("deepseek_vl").to_dict())
        read_config({"omnibal": {"model": {"family": MODULE}}})  # once more is no second family
    with pytest.raises(
        ConfigError, match=r"omnibal.model.family must be a module .* got 'deepseek_vl': .*No module .*PYTHONPATH"
    ):
        read_config({"omnibal": {"model": {"family": MODULE}}})


def test_what_images_bring_is_what_its_processor_makes(family):
    config, processor = small_config("deepseek_vl").to_dict(), image_processor("deepseek_vl")
    _, rule = family.images(config, processor.to_dict())
    pixels = processor([[torch.zeros(3, 40, 23).numpy()]], return_tensors="pt")["pixel_values"]
    (load,) = rule([(23, 40)])
    assert (load.vision_units, load.llm_tokens) == (len(pixels), 3 * 3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4, 5, 6], [1, 4]], ids=["images", "text only"])
def test_its_layers_give_gradients_of_plain_transformers(family, tied, chosen):
    config = small_config("deepseek_vl", text_tied=tied, tie_word_embeddings=tied)
    samples = [family_samples("deepseek_vl")[index] for index in chosen]
    model, plain = load_model(config), plain_family_model(config)
    layers = layers_of(model, plain.state_dict())
    for index, record in enumerate(model.records):
        built = [parameter.numel() for parameter in layers[index].parameters()]
        assert record.sizes["parameters"] == sum(built), record.name
    loss, logits = plain_backward(plain, samples)
    pack = pack_of(model, samples)
    assert_close(run_layers(layers, pack)[0], torch.cat(logits), rtol=1e-4, atol=2e-5)
    ours = pack_loss(layers, pack) / (pack["labels"] != -100).sum()
    assert ours.item() == pytest.approx(loss, rel=1e-5)
    ours.backward()
    theirs = named_on_disk(model, plain)
    for name, gradient in disk_state(model, layers, gradients=True).items():
        expected = torch.zeros_like(gradient) if theirs[name].grad is None else theirs[name].grad
        assert_close(gradient, expected, rtol=1e-3, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("model_type", "reason"), [("gemma3", "see each other"), ("smolvlm", "rows and columns")])
def test_families_that_do_not_fit_are_refused_with_the_reason(model_type, reason, tmp_path):
    with pytest.raises(ConfigError, match=f"got '{model_type}'; .*{reason}"):
        family_of({"model_type": model_type})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json: .* got '{model_type}'; .*{reason}"):
        load_model(tmp_path)
