"""Weights of every family: all layouts of names load, layers read what is theirs, and exports load in transformers."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from omnibal.advise.models import read_model
from omnibal.errors import ConfigError
from omnibal.integrations.trainer.steps import counted_profile
from omnibal.passes import StorageMeter
from omnibal.vlm import load_model, load_records
from omnibal.vlm.weights import Stored, load_layer, other_names, save_model, spare_weights
from tests.families.models import EXPERTS, small_config
from tests.vlm.families import (
    TRAINED,
    family_samples,
    layers_of,
    pack_of,
    plain_backward,
    plain_family_model,
    tied_config,
)
from tests.vlm.models import disk_state, run_layers

LLAVA = tuple(family for family in TRAINED if family.startswith("llava"))
TOWER = "model.vision_tower."


def publish(folder, model, plain):
    """With the names of published folders, and with the buffers that older ones hold."""
    names = {model.disk_name(name): tensor for name, tensor in plain.state_dict().items()}
    tied = {} if model.records[-1].tied_key is None else dict.fromkeys(model.tied_names)
    kept = {name: tensor.clone() for name, tensor in names.items() if name not in tied}
    if "llava" in model.config.model_type:
        kept["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(10)[None]
    save_file(kept, folder / "model.safetensors")


def as_in_memory(folder, model, plain):
    """With the names of the state_dict."""
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items() if name != "lm_head.weight"}
    head = {} if model.records[-1].tied_key else {"lm_head.weight": plain.state_dict()["lm_head.weight"]}
    save_file(state | head, folder / "model.safetensors")


def as_in_between(folder, model, plain):
    """As transformers 4.52 wrote LLaVA's kin: the state_dict's names, with a module more around the ViT."""
    as_in_memory(folder, model, plain)
    state = load_file(folder / "model.safetensors")
    between = {name.replace(TOWER, f"{TOWER}vision_model."): tensor for name, tensor in state.items()}
    save_file(between, folder / "model.safetensors")


LAYOUTS = {"as saved": None, "published": publish, "in memory": as_in_memory, "4.52": as_in_between}


OF_FAMILIES = [(family, layout) for family in TRAINED for layout in LAYOUTS if layout != "4.52" or family in LLAVA]


@pytest.mark.parametrize(("family", "layout"), OF_FAMILIES)
def test_all_layouts_of_names_load(tmp_path, family, layout):
    config = tied_config(family) if layout == "as saved" else small_config(family)
    plain, samples = plain_family_model(config), family_samples(family)[:2]
    plain.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    if LAYOUTS[layout] is not None:
        LAYOUTS[layout](tmp_path, model, plain)
    layers = layers_of(model, tmp_path)
    _, logits = plain_backward(plain, samples)
    with torch.no_grad():
        assert_close(run_layers(layers, pack_of(model, samples))[0], torch.cat(logits), rtol=1e-4, atol=2e-5)
    state = {model.disk_name(name): tensor for name, tensor in plain.state_dict().items()}
    spare = spare_weights(model, tmp_path)
    assert spare.keys() == set(model.spare_names)
    assert all(torch.equal(tensor, state[name]) for name, tensor in spare.items())
    # transformers saves what it has loaded under the names that it came with; so do exports
    AutoModelForImageTextToText.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    distinct = {id(layer): layer for layer in reversed(layers)}
    state_of = {index: layer.state_dict() for index, layer in enumerate(layers) if distinct[id(layer)] is layer}
    save_model(model, state_of.get, tmp_path / "ours", spare=spare, names=other_names(model, tmp_path))
    ours, theirs = (load_file(tmp_path / writer / "model.safetensors") for writer in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("family", TRAINED)
def test_layers_read_their_own_tensors_alone(tmp_path, family, monkeypatch):
    plain_family_model(small_config(family)).save_pretrained(tmp_path)
    model, read, read_one = load_model(tmp_path), [], Stored.read

    def noted(stored, own):
        read.append(model.disk_name(stored.name))
        return read_one(stored, own)

    monkeypatch.setattr(Stored, "read", noted)
    for index in range(len(model.records)):
        read.clear()
        load_layer(model, index, model.build_layer(index, seed=None), tmp_path)
        assert sorted(read) == sorted(model.weight_names(index).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", TRAINED)
def test_loading_a_stage_takes_its_weights_and_one_tensor_more(tmp_path, family, dtype):
    plain_family_model(small_config(family)).save_pretrained(tmp_path, max_shard_size="100KB")
    model = load_model(tmp_path)
    first, last = len(model.records) // 2, len(model.records)
    with StorageMeter() as meter:
        layers = [model.build_layer(index, seed=None, dtype=dtype) for index in range(first, last)]
        for index, layer in zip(range(first, last), layers, strict=True):
            load_layer(model, index, layer, tmp_path)
    tensors = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    own = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    largest = max(tensor.numel() * 4 for tensor in tensors)  # as it is on disk
    assert own < meter.peak_bytes <= 1.01 * (own + largest)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", TRAINED)
def test_what_is_written_loads_in_transformers_and_parts_behind_the_features_stay(tmp_path, family, tied):
    config = tied_config(family) if tied else small_config(family)
    plain = plain_family_model(config)
    plain.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    layers, spare = layers_of(model, tmp_path), spare_weights(model, tmp_path)
    with torch.no_grad():
        for layer in {id(layer): layer for layer in layers}.values():
            for parameter in layer.parameters():
                parameter.mul_(1.05)  # as if trained
    save_model(model, lambda index: layers[index].state_dict(), tmp_path / "out", spare=spare)
    theirs, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    before, after = (
        {model.disk_name(name): value for name, value in whole.state_dict().items()} for whole in (plain, theirs)
    )
    assert all(torch.equal(after[name], before[name]) for name in model.spare_names)
    for name, value in disk_state(model, layers).items():
        assert torch.equal(after[name], value), name
    samples = family_samples(family)[:2]
    with torch.no_grad():
        logits = run_layers(layers, pack_of(model, samples))[0]
    assert_close(logits, torch.cat(plain_backward(theirs, samples)[1]), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("where", ["top", "text", "both"])
@pytest.mark.parametrize("family", TRAINED)
def test_a_head_of_its_own_stays_wherever_the_configuration_ties_it(tmp_path, family, where):
    plain_family_model(small_config(family)).save_pretrained(
        tmp_path, max_shard_size="100KB" if where == "both" else "1GB"
    )
    small_config(family, text_tied=where != "top", tie_word_embeddings=where != "text").save_pretrained(tmp_path)
    theirs, samples = AutoModelForImageTextToText.from_pretrained(tmp_path), family_samples(family)[:2]
    assert theirs.lm_head.weight is not theirs.get_input_embeddings().weight
    expected = torch.cat(plain_backward(theirs, samples)[1])
    for model, source in ((load_model(tmp_path), tmp_path), (load_model(theirs), theirs.state_dict())):
        assert not model.tied_names
        assert not model.config.tie_word_embeddings and not model.config.text_config.tie_word_embeddings
        with torch.no_grad():
            logits = run_layers(layers_of(model, source), pack_of(model, samples))[0]
        assert_close(logits, expected, rtol=1e-4, atol=5e-5)
    profile = counted_profile(theirs, None)
    ends = load_model(tmp_path).records, load_records(tmp_path), read_model(str(tmp_path)).records, profile.layers
    assert [layers[-1].tied_key for layers in ends] == [None] * 4


def test_a_model_in_memory_whose_head_is_its_embedding_is_tied_whatever_its_configuration_says():
    plain = plain_family_model(small_config("internvl"))
    plain.lm_head.weight = plain.get_input_embeddings().weight
    assert load_model(plain).records[-1].tied_key == counted_profile(plain, None).layers[-1].tied_key == "embedding"


@pytest.mark.parametrize(("factor", "key"), [(2, None), (1, "embedding")])
def test_models_that_are_only_planned_have_the_head_of_their_folder_too(tmp_path, factor, key):
    small_config("qwen3_vl_moe", text_tied=True, tie_word_embeddings=True).save_pretrained(tmp_path)
    weight = torch.randn(4, 3, dtype=torch.bfloat16)
    ends = {"model.language_model.embed_tokens.weight": weight, "lm_head.weight": factor * weight}
    save_file(ends, tmp_path / "model.safetensors")
    assert load_records(tmp_path)[-1].tied_key == read_model(str(tmp_path)).records[-1].tied_key == key


@pytest.mark.parametrize("family", LLAVA)
def test_only_what_lies_behind_the_features_is_spare(family):
    model = load_model(small_config(family))
    last = {"encoder.layers.3"} if family != "llava_onevision" else set()
    behind = tuple(f"vision_tower.vision_model.{part}." for part in {"post_layernorm", *last})
    assert model.spare_names and all(name.startswith(behind) for name in model.spare_names)
    assert len(model.spare_names) == (2 if family == "llava_onevision" else 18)
    drawn = spare_weights(model, None)
    assert drawn.keys() == set(model.spare_names)
    assert not any(value.any() for value in drawn.values())


@pytest.mark.parametrize("family", LLAVA)
def test_a_spare_tensor_of_another_shape_is_named(tmp_path, family):
    plain_family_model(small_config(family)).save_pretrained(tmp_path)
    file, model = tmp_path / "model.safetensors", load_model(tmp_path)
    state = load_file(file)
    name = next(name for name in state if "post_layernorm.bias" in name)
    save_file(state | {name: torch.ones(3)}, file)
    with pytest.raises(ConfigError, match=rf"{name} must have shape \(32,\), got \(3,\)"):
        spare_weights(model, tmp_path)


@pytest.mark.parametrize("family", TRAINED)
def test_initial_weights_are_drawn_alike_and_are_all_there(family):
    model = load_model(small_config(family))
    for index in range(len(model.records)):
        first, again = (model.build_layer(index, seed=7).state_dict() for _ in range(2))
        assert all(value.isfinite().all() and torch.equal(value, again[name]) for name, value in first.items())
        empty = model.build_layer(index, seed=None)
        assert all(value.isnan().all() for value in empty.state_dict().values())
        for (name, buffer), (_, expected) in zip(
            empty.named_buffers(), model.build_layer(index, seed=7).named_buffers(), strict=True
        ):
            assert torch.equal(buffer, expected), name


def test_an_embedding_at_the_end_of_rows_is_drawn_as_transformers_draws_it():
    config = small_config("llava_next", text={"hidden_size": 2048, "head_dim": 512})
    model = load_model(config)
    names = [record.name for record in model.records]
    newline = model.build_layer(names.index("projector"), seed=0).newline
    assert newline.std().item() == pytest.approx(2048**-0.5, rel=0.1)


@pytest.mark.parametrize("family", [family for family in TRAINED if not family.startswith("qwen")])
def test_a_mixture_of_experts_is_refused_by_name(family):
    with pytest.raises(ConfigError, match=r"text_config.model_type must be one of llama, mistral.*got 'qwen3_moe'"):
        load_model(small_config(family, text={"model_type": "qwen3_moe"}))


def test_a_mixture_of_experts_is_planned_for_and_not_trained(tmp_path):
    for family, text, message in (
        (
            "internvl",
            {"model_type": "qwen3_moe"} | EXPERTS,
            "text_config.model_type must be one of .* to be trained in",
        ),
        ("qwen3_vl_moe", {}, "model_type must be of a family with layers to be trained, got 'qwen3_vl_moe'"),
    ):
        config = small_config(family, text=text)
        config.save_pretrained(tmp_path)
        blocks = [record for record in load_records(tmp_path) if record.kind == "decoder_block"]
        assert [block.sizes["experts"] for block in blocks] == [4] * len(blocks)
        with pytest.raises(ConfigError, match=message):
            load_model(tmp_path)
