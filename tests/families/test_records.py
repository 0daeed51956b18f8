"""Every family's layers as records, against transformers' own modules on no device."""

import re
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from omnibal.errors import ConfigError
from omnibal.families import FAMILIES, family_of, layer_records, register
from tests.families.models import SEEING, small_config


def model_of(config):
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def parameters_of(model):
    """Numbers of parameters by the record that they belong to; None for those that are not computed."""
    found = Counter()
    rules = [
        (r"vision_tower\.(embeddings|pre_layrnorm)|visual\.(patch_embed|pos_embed)", "patch_embedding"),
        (r"(?:vision_tower\.encoder\.layers?|visual\.blocks)\.(\d+)", "vision_block.{}"),
        (r"visual\.deepstack_merger_list\.(\d+)", "deepstack.{}"),
        (r"multi_modal_projector|image_newline|visual\.merger", "projector"),
        (r"language_model\.layers\.(\d+)", "decoder_block.{}"),
        (r"language_model\.embed_tokens", "text_embedding"),
        (r"language_model\.norm", "final_norm"),
        (r"lm_head", "head"),
    ]
    for name, parameter in model.named_parameters():
        matches = ((re.search(rule, name), record) for rule, record in rules)
        match, record = next(((m, r) for m, r in matches if m), (None, None))
        found[record.format(*match.groups()) if match else None] += parameter.numel()
    return found


@pytest.mark.parametrize("model_type", SEEING)
def test_records_count_the_parameters_of_transformers_modules(model_type):
    config = small_config(model_type)
    records, expected = layer_records(config.to_dict()), parameters_of(model_of(config))
    for depth, block in enumerate(sorted(getattr(config.vision_config, "deepstack_visual_indexes", ()))):
        expected[f"vision_block.{block}"] += expected.pop(f"deepstack.{depth}")
    found = {record.name: record.sizes["parameters"] for record in records}
    not_computed = {name for name in expected if name not in found}
    assert found == {name: number for name, number in expected.items() if name in found}
    assert not_computed == {
        "llava": {"vision_block.3", None},  # the hidden state before the last block is read
        "llava_next": {"vision_block.3", None},
        "llava_onevision": {None},  # the norm behind the last block
    }.get(model_type, set())


@pytest.mark.parametrize("model_type", SEEING)
@pytest.mark.parametrize("text_tied", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_ties_are_transformers(model_type, text_tied, tied):
    config = small_config(model_type, text_tied=text_tied, tie_word_embeddings=tied)
    model = model_of(config)
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    keys = {record.name for record in layer_records(config.to_dict()) if record.tied_key is not None}
    assert keys == ({"text_embedding", "head"} if is_tied else set())


def test_blocks_of_other_kinds():
    def kinds(model_type):
        return [record.kind for record in layer_records(small_config(model_type).to_dict())]

    windows = ["window_block", "vision_block"] * 2
    assert kinds("qwen2_5_vl")[1:5] == windows
    assert kinds("qwen3_vl")[1:5] == ["deepstack_block", "vision_block"] * 2
    assert kinds("qwen2_vl")[1:5] == ["vision_block"] * 4


def test_deep_features_travel_to_the_decoder_layers_that_read_them():
    records = layer_records(small_config("qwen3_vl").to_dict())
    carried = {record.name: record.sizes["carried"] for record in records}
    assert list(carried.values()) == [0, 1, 1, 2, 2, 2, 2, 1, 0, 0, 0, 0]
    assert carried["projector"] == carried["text_embedding"] == 2
    assert carried["decoder_block.0"] == 1


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("llava", {"vision_feature_layer": [-2, -1]}, "vision_feature_layer must be one of the 5 hidden states"),
        ("llava", {"vision_feature_layer": 5}, "vision_feature_layer must be .* got 5"),
        ("llava", {"vision_config": {"model_type": "vit"}}, "vision_config.model_type must be clip_vision_model or"),
        ("qwen3_vl", {"text_config": {"model_type": "gemma3"}}, "text_config.model_type must be one of"),
    ],
)
def test_what_no_layer_serves_is_refused(model_type, change, message):
    config = small_config(model_type).to_dict()
    nested = {key: config[key] | value for key, value in change.items() if isinstance(value, dict)}
    with pytest.raises(ConfigError, match=message):
        layer_records(config | change | nested)


def test_a_family_is_registered_once():
    with pytest.raises(ConfigError, match="model_types of a family must be its own, got 'internvl'"):
        register(FAMILIES["internvl"])
    with pytest.raises(
        ConfigError, match=r"model_type must be one of internvl, llava.*got 'blip'; .* registers another"
    ):
        family_of({"model_type": "blip"})


@pytest.mark.parametrize("model_type", SEEING)
def test_published_names_are_those_that_transformers_reads(model_type, tmp_path):
    """Folders that transformers itself writes may have other names; it reads both."""
    config = small_config(model_type)
    model = AutoModelForImageTextToText.from_config(config)
    prefixes = FAMILIES[model_type].disk_prefixes

    def on_disk(name):
        known = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        return name if known is None else prefixes[known] + name.removeprefix(known)

    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file({on_disk(name): weight for name, weight in weights.items()}, tmp_path / "model.safetensors")
    loaded, found = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]] == []
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.state_dict().items())
