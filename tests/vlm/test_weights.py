"""Folders of weights, to and from plain transformers."""

import json
import random
import resource
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import InternVLForConditionalGeneration

from omnibal.errors import ConfigError, OmnibalError
from omnibal.vlm import load_model
from omnibal.vlm.weights import check_data, load_data, load_layer, save_model
from tests.vlm.models import build_layers, disk_state, make_pack, make_sample, plain_logits, run_layers, tiny_config

SAMPLE = make_sample(0, tiles=(1, 2))
SHARD_BYTES = 20_000


def plain(config, seed=0):
    torch.manual_seed(seed)
    return InternVLForConditionalGeneration(config)


def write_plain(folder, *, max_shard_size="5GB", **options):
    model = plain(tiny_config(**options))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def read_layers(model, folder):
    layers = build_layers(model, seed=None)
    for index, layer in enumerate(layers):
        load_layer(model, index, layer, folder)
    return layers


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_transformers_wrote_gives_its_logits(tmp_path, tied, max_shard_size):
    theirs = write_plain(tmp_path, tied=tied, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    layers = read_layers(load_model(tmp_path), tmp_path)
    assert_close(run_layers(layers, make_pack([SAMPLE]))[0], plain_logits(theirs, SAMPLE), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("max_shard_bytes", [10**9, SHARD_BYTES], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_we_wrote_transformers_reads(tmp_path, tied, max_shard_bytes):
    model = load_model(tiny_config(tied=tied))
    layers = build_layers(model)
    save_model(model, lambda index: layers[index].state_dict(), tmp_path, max_shard_bytes=max_shard_bytes)
    theirs, report = InternVLForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_close(run_layers(layers, make_pack([SAMPLE]))[0], plain_logits(theirs, SAMPLE), rtol=1e-6, atol=1e-6)
    again = read_layers(load_model(tmp_path), tmp_path)
    assert all(
        torch.equal(tensor, disk_state(model, again)[name]) for name, tensor in disk_state(model, layers).items()
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_files_are_as_transformers_would_write_them(tmp_path, tied):
    write_plain(tmp_path / "first", tied=tied)
    theirs = InternVLForConditionalGeneration.from_pretrained(tmp_path / "first")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    model = load_model(tmp_path / "first")
    layers = read_layers(model, tmp_path / "first")
    save_model(model, lambda index: layers[index].state_dict(), tmp_path / "ours", max_shard_bytes=SHARD_BYTES)
    indices = [json.loads((tmp_path / who / "model.safetensors.index.json").read_text()) for who in ("theirs", "ours")]
    assert indices[0]["weight_map"].keys() == indices[1]["weight_map"].keys()
    assert indices[0]["metadata"]["total_size"] == indices[1]["metadata"]["total_size"]
    configs = [json.loads((tmp_path / who / "config.json").read_text()) for who in ("theirs", "ours")]
    assert configs[0] == configs[1]
    shards = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert {file for file in indices[1]["weight_map"].values()} == set(shards)
    assert all((tmp_path / "ours" / shard).stat().st_size < SHARD_BYTES + 10_000 for shard in shards)


def test_a_full_disk_is_told(tmp_path):
    model = load_model(tiny_config())
    layers, limits = build_layers(model), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OmnibalError, match=r"shard0.partial must be written completely, got .*too large"):
            save_model(model, lambda index: layers[index].state_dict(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_second_save_leaves_nothing_of_the_first(tmp_path):
    model = load_model(tiny_config())
    for seed, max_shard_bytes in ((0, SHARD_BYTES), (1, 10**9), (2, SHARD_BYTES)):
        layers = build_layers(model, seed=seed)
        save_model(model, lambda index, now=layers: now[index].state_dict(), tmp_path, max_shard_bytes=max_shard_bytes)
        again = disk_state(model, read_layers(model, tmp_path))
        assert all(torch.equal(tensor, again[name]) for name, tensor in disk_state(model, layers).items())
        files = {path.name for path in tmp_path.iterdir()}
        single = {"config.json", "model.safetensors"}
        assert files == single if max_shard_bytes > SHARD_BYTES else not files & {"model.safetensors"}


def test_bfloat16_weights_say_so(tmp_path):
    write_plain(tmp_path, tied=True)
    model = load_model(tmp_path)
    layers = build_layers(model, dtype=torch.bfloat16)
    save_model(model, lambda index: layers[index].state_dict(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    theirs = InternVLForConditionalGeneration.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in theirs.parameters()} == {torch.bfloat16}


def test_each_state_is_asked_for_once_and_a_tied_head_not_at_all(tmp_path):
    model, asked = load_model(tiny_config(tied=True)), []

    def state_of(index):
        asked.append(index)
        return model.build_layer(index, seed=0).state_dict()

    save_model(model, state_of, tmp_path)
    assert asked == list(range(len(model.records) - 1))


def test_a_state_of_another_layer_is_refused(tmp_path):
    model = load_model(tiny_config())
    with pytest.raises(ConfigError, match="the state of patch_embedding must hold"):
        save_model(model, lambda index: model.build_layer(1, seed=0).state_dict(), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_names_as_in_memory_are_understood(tmp_path):
    theirs = write_plain(tmp_path)
    save_file({k: v.clone() for k, v in theirs.state_dict().items()}, tmp_path / "model.safetensors", {"format": "pt"})
    layers = read_layers(load_model(tmp_path), tmp_path)
    assert_close(run_layers(layers, make_pack([SAMPLE]))[0], plain_logits(theirs, SAMPLE), rtol=1e-6, atol=1e-6)


HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"


def test_a_tied_weight_may_be_stored_under_either_name_or_both(tmp_path):
    for change in (
        lambda weights: weights.update({HEAD: weights.pop(EMBEDDING)}),
        lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}),
    ):
        theirs = write_plain(tmp_path, tied=True)
        rewrite(tmp_path, change)
        model = load_model(tmp_path)
        layers = read_layers(model, tmp_path)
        assert model.records[-1].tied_key == "embedding"
        assert_close(run_layers(layers, make_pack([SAMPLE]))[0], plain_logits(theirs, SAMPLE), rtol=1e-6, atol=1e-6)


def test_ends_stored_apart_are_not_tied_whatever_the_configuration_says(tmp_path):
    write_plain(tmp_path, tied=True)
    rewrite(tmp_path, lambda weights: weights.update({HEAD: weights[EMBEDDING] * 2}))
    theirs = InternVLForConditionalGeneration.from_pretrained(tmp_path)
    model = load_model(tmp_path)
    layers = read_layers(model, tmp_path)
    assert model.records[-1].tied_key is None
    assert_close(run_layers(layers, make_pack([SAMPLE]))[0], plain_logits(theirs, SAMPLE), rtol=1e-6, atol=1e-6)
    assert not model.config.tie_word_embeddings


NORM = "language_model.model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(NORM), f"must hold the model's weights, all and no other, got no {NORM}"),
        (
            lambda weights: weights.update({"lora.A": torch.ones(2)}),
            "the model's weights, all and no other, got lora.A in model.saf",
        ),
        (
            lambda weights: weights.update({"lora.A": weights.pop(NORM)}),
            f"all and no other, got no {NORM} but lora.A in model.safetensors",
        ),
        (
            lambda weights: weights.update({NORM: torch.ones(31)}),
            rf"{NORM} must have shape \(32,\), got \(31,\) in .*model.safetensors",
        ),
        (
            lambda weights: weights.update({NORM: torch.ones(32, dtype=torch.int8)}),
            rf"{NORM} must be of float64, .* \(not quantised\), got int8 in .*model.safetensors",
        ),
        (
            lambda weights: weights[NORM].__setitem__(7, torch.nan),
            rf"{NORM} must hold finite numbers, got NaN or infinity in .*model.safetensors",
        ),
        (
            lambda weights: weights[NORM].__setitem__(7, -torch.inf),
            rf"{NORM} must hold finite numbers, got NaN or infinity in .*model.safetensors",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    write_plain(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        read_layers(load_model(tmp_path), tmp_path)


def test_a_wrong_folder_fails_alike_for_every_layer(tmp_path):
    write_plain(tmp_path)
    rewrite(tmp_path, lambda weights: weights.pop(NORM))
    model = load_model(tmp_path)
    for index in range(len(model.records)):
        with pytest.raises(ConfigError, match=f"got no {NORM}"):
            load_layer(model, index, model.build_layer(index, seed=None), tmp_path)


def test_old_rotary_buffers_are_passed_over(tmp_path):
    write_plain(tmp_path)
    buffer = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    model = load_model(tmp_path)
    plain = disk_state(model, read_layers(model, tmp_path))
    rewrite(tmp_path, lambda weights: weights.update({buffer: torch.ones(4)}))
    again = disk_state(model, read_layers(model, tmp_path))
    assert again.keys() == plain.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in plain.items())


def test_a_folder_without_weights_is_a_model_but_gives_none(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    model = load_model(tmp_path)
    with pytest.raises(ConfigError, match=r"must hold model.safetensors or .*, got neither; ask for random weights"):
        load_layer(model, 0, model.build_layer(0, seed=None), tmp_path)


@pytest.mark.parametrize(
    ("file", "remedy"),
    [("adapter_config.json", "`omnibal export --merged` adds them"), ("pytorch_model.bin", "save it anew with transf")],
)
def test_what_holds_weights_in_another_form_is_told_apart(tmp_path, file, remedy):
    tiny_config().save_pretrained(tmp_path)
    (tmp_path / file).write_text("{}")
    model = load_model(tiny_config())
    with pytest.raises(ConfigError, match=f"got neither; .*{remedy}"):
        load_layer(model, 0, model.build_layer(0, seed=None), tmp_path)


def test_a_model_in_memory_gives_its_weights():
    config = tiny_config()
    instance, model = plain(config), load_model(config)
    layer = model.build_layer(0, seed=None)
    load_layer(model, 0, layer, instance.state_dict())
    names = model.weight_names(0)
    state = {model.disk_name(name): tensor for name, tensor in instance.state_dict().items()}
    assert all(torch.equal(tensor, state[names[name]]) for name, tensor in layer.state_dict().items())
    with pytest.raises(ConfigError, match="must have values, got a tensor on the meta device in the model given"):
        load_layer(model, 0, layer, instance.to("meta").state_dict())
    with pytest.raises(ConfigError, match="the model given must hold the model's weights, all and no other, got no "):
        load_layer(model, 0, layer, {})


def test_a_missing_shard_is_named(tmp_path):
    write_plain(tmp_path, max_shard_size="20KB")
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(ConfigError, match="must name files that exist, got model-00002-of"):
        read_layers(load_model(tmp_path), tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", "[" * 100_000])
def test_a_broken_index_is_named(tmp_path, content):
    write_plain(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model.safetensors.index.json must be JSON with a weight_map, got"):
        read_layers(load_model(tmp_path), tmp_path)


def test_a_broken_file_is_named(tmp_path):
    write_plain(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="must be a whole safetensors file"):
        load_layer(model := load_model(tiny_config()), 0, model.build_layer(0, seed=None), tmp_path)


def test_folders_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="without config"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model's config.json must be JSON, got .*config.json, line 1"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}')
    with pytest.raises(ConfigError, match=r"model_type must be one of internvl, llava, .*got 'internvl_chat'"):
        load_model(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(ConfigError, match="without config"):
        load_model(tmp_path)


class Payload:
    """Its unpickling would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Shell:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return __import__("os").system, (f"touch {self.path}",)


@pytest.mark.parametrize("payload", [Payload, Shell])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_does_not_run(tmp_path, payload, zipped):
    path, ran = tmp_path / "state.pt", tmp_path / "ran"
    torch.save({"weights": torch.ones(3), "more": [payload(ran)]}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ConfigError, match=r"state.pt must hold data only, got: .*(getattr|posix.system)"):
        load_data(path)
    if zipped:
        with pytest.raises(ConfigError, match=r"state.pt must hold data only, got .*(getattr|posix.system)"):
            check_data(path)
    assert not ran.exists()


def test_objects_are_made_of_classes_that_are_named(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"a": OwnState(3)}, path)
    with pytest.raises(
        ConfigError, match=r"got: .*OwnState.*; torch.serialization.add_safe_globals\(\[...\]\) names a"
    ):
        load_data(path)
    check_data(path, OwnState)
    assert load_data(path, OwnState)["a"].value == 3


class OwnState:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "content",
    [
        {"epoch": 1, "place": (2, None, "x", 1.5, True, b"raw"), "seen": {3}},
        OrderedDict(a=1),
        random.getstate(),
        np.random.default_rng(0).bit_generator.state,
        [np.int64(5), np.float32(1.5), np.bool_(True)],
    ],
)
def test_data_is_read_as_it_was(tmp_path, content):
    torch.save(content, tmp_path / "state.pt")
    check_data(tmp_path / "state.pt")
    assert load_data(tmp_path / "state.pt") == content


@pytest.mark.parametrize("kind", ["int64", "uint8", "float16", "float64", "bool", "U3"])
def test_arrays_are_data(tmp_path, kind):
    array = np.array([1, 0, 1]).astype(kind)
    torch.save({"array": array}, tmp_path / "state.pt")
    assert np.array_equal(load_data(tmp_path / "state.pt")["array"], array)
