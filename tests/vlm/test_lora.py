"""Adapters in the layers are those that peft makes in the whole model."""

import pytest
import torch

from omnibal.config.section import LoraSection
from omnibal.errors import ConfigError
from omnibal.vlm import Payload, load_model
from omnibal.vlm.layers import is_adapter
from omnibal.vlm.lora import save_adapters
from tests.families.models import small_config
from tests.vlm.families import (
    TRAINED,
    family_samples,
    layers_of,
    pack_of,
    plain_backward,
    plain_family_model,
    tied_config,
)
from tests.vlm.lora import initial_adapters

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("family", TRAINED)
def test_adapters_give_the_logits_of_peft_on_the_whole_model(family, tmp_path):
    tied = TRAINED.index(family) % 2
    config = tied_config(family) if tied else small_config(family)
    saved = ["projector", "embed_tokens" if tied else "head"]
    settings = LoraSection(rank=3, alpha=5, targets=["q_proj", "down_proj", "vision"], modules_to_save=saved)
    model, plain = load_model(config, settings), plain_family_model(config)
    layers = layers_of(model, plain.state_dict())
    for parameter in {p for layer in layers for p in layer.parameters() if p.requires_grad}:
        torch.nn.init.normal_(parameter, std=0.1)
    save_adapters(model, lambda index: layers[index].state_dict(), tmp_path)
    samples = [family_samples(family)[index] for index in (0, 1, 5)]
    payload = Payload.of_pack(pack_of(model, samples))
    for layer in layers:
        payload = layer(payload)
    without = torch.cat(plain_backward(plain, samples)[1])
    expected = torch.cat(plain_backward(peft.PeftModel.from_pretrained(plain, tmp_path), samples)[1])
    assert not torch.allclose(without, expected, atol=1e-2)
    torch.testing.assert_close(payload.hidden[0], expected, rtol=1e-4, atol=2e-5)


def test_default_targets_are_peft_s_linear_layers_of_the_language_model():
    config = small_config("llava")
    model = load_model(config, LoraSection())
    assert (model.adapters.r, model.adapters.lora_alpha) == (16, 32)
    adapted = peft.get_peft_model(plain_family_model(config), peft.LoraConfig(target_modules="all-linear"))
    theirs = {name for name, _ in adapted.named_parameters() if "lora_A" in name and "language_model" in name}
    assert theirs == {f"base_model.model.{path}.lora_A.default.weight" for path in model.adapters.target_modules}
    trained = sum(record.trainable_parameters(()) for record in model.records)
    assert (
        trained
        == sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name and "language" in name) * 2
    )


def test_initial_adapters_depend_on_seed_and_place_alone():
    model = load_model(small_config("internvl"), LoraSection(rank=2, targets=["language", "vision"]))
    plain = load_model(small_config("internvl"))
    first, again, other = (initial_adapters(model, seed) for seed in (3, 3, 4))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert ("lora_B" in name) == torch.equal(weight, other[name]) == (not weight.any())
    of_layers = [weight for name, weight in first.items() if name.endswith("q_proj.lora_A.weight")]
    assert len({tuple(weight.flatten().tolist()) for weight in of_layers}) == len(of_layers)
    for index in range(len(model.records)):  # what is not an adapter begins as without
        ours, theirs = model.build_layer(index, seed=3), plain.build_layer(index, seed=3).state_dict()
        for name, weight in ours.state_dict().items():
            assert is_adapter(name) or torch.equal(weight, theirs[name.replace(".base_layer.", ".")]), name


@pytest.mark.parametrize(
    ("settings", "frozen", "message"),
    [
        ({"targets": ["q_pro"]}, (), r"lora\.targets must name linear .*, got 'q_pro'; did you mean 'q_proj'"),
        ({"targets": ["norm"]}, (), r"lora\.targets must name linear layers .*, got 'norm'"),
        ({"targets": ["zzz"]}, (), r"lora\.targets must name .*, got 'zzz'; known are vision, .*language, .*q_proj"),
        (
            {"modules_to_save": ["projectr"]},
            (),
            r"lora\.modules_to_save must name .*'projectr'; did you mean 'projector'",
        ),
        (
            {"targets": ["projector"], "modules_to_save": ["projector"]},
            (),
            r"lora\.targets must name a part that modules",
        ),
        ({}, ("language",), r"lora\.targets must name a part that is not frozen, got language with language frozen"),
        (
            {"modules_to_save": ["head"]},
            ("lm_head*", "head"),
            r"lora\.modules_to_save must name .* not frozen, got head",
        ),
    ],
)
def test_what_stands_for_nothing_is_one_line(settings, frozen, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(small_config("internvl"), LoraSection(**settings), frozen)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_common_name_of_blocks_means_all_of_them(family):
    def blocks_of(*targets):
        paths = load_model(small_config(family), LoraSection(targets=[*targets])).adapters.target_modules
        return {int(path.split(".blocks.")[1].split(".")[0]) for path in paths if ".blocks." in path}

    assert blocks_of("vision_block") == {0, 1, 2, 3}
    assert blocks_of("only:vision_block") == {1, 3}
    assert blocks_of("window_block" if family == "qwen2_5_vl" else "deepstack_block") == {0, 2}


def test_frozen_parts_get_no_adapters():
    frozen = ("vision", "*.layers.0.*")
    model = load_model(small_config("internvl"), LoraSection(targets=["q_proj"]), frozen)
    assert set(model.adapters.target_modules) == {f"model.language_model.layers.{n}.self_attn.q_proj" for n in (1, 2)}


def test_a_module_to_save_is_whole_or_its_parts_that_are_not_frozen():
    settings = LoraSection(modules_to_save=["projector"])
    whole, parts = (load_model(small_config("llava"), settings, frozen) for frozen in ((), ("*.linear_2.bias",)))
    assert whole.adapters.modules_to_save == ["model.multi_modal_projector"]
    assert parts.adapters.modules_to_save == ["model.multi_modal_projector.linear_1"]
