import json

import pytest
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor

from omnibal.advise.models import MODELS, Model, complete, read_model
from omnibal.device import DEVICES
from omnibal.errors import ConfigError
from omnibal.families import layer_records
from omnibal.profile.counted import analytic_profile


def parameters(model):
    tied = {record.tied_key: record.sizes["parameters"] for record in model.records if record.tied_key}
    return sum(record.sizes["parameters"] for record in model.records if not record.tied_key) + sum(tied.values())


@pytest.mark.parametrize(
    ("name", "billions"),
    # as the models' pages on huggingface.co state them
    [("Qwen2-VL-2B", 2.21), ("Qwen2.5-VL-3B", 3.75), ("Qwen2.5-VL-7B", 8.29), ("Qwen2.5-VL-32B", 33.5),
     ("Qwen2.5-VL-72B", 73.4), ("Qwen3-VL-4B", 4.44), ("Qwen3-VL-8B", 8.77), ("InternVL3-8B", 7.94),
     ("InternVL3-38B", 38.4), ("InternVL3-78B", 78.4), ("InternVL3.5-8B", 8.53), ("LLaVA-1.5-7B", 7.06),
     ("LLaVA-v1.6-mistral-7B", 7.57), ("LLaVA-OneVision-Qwen2-7B", 8.03), ("Qwen3-VL-30B-A3B", 31.1),
     ("Qwen3-VL-235B-A22B", 236), ("InternVL3.5-30B-A3B", 30.8), ("InternVL3.5-241B-A28B", 240.7)],
)  # fmt: skip
def test_known_models_have_as_many_parameters_as_published(name, billions):
    assert parameters(Model.known(name)) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    # as the pages of Qwen3-30B-A3B and Qwen3-235B-A22B state them; 3.35 stands there as 3.3
    [("Qwen3-VL-30B-A3B", 30.5, 3.35), ("InternVL3.5-30B-A3B", 30.5, 3.35), ("Qwen3-VL-235B-A22B", 235, 22),
     ("InternVL3.5-241B-A28B", 235, 22)],
)  # fmt: skip
def test_mixtures_multiply_the_active_parameters_of_all_that_they_have(name, total, active):
    records = [record for record in Model.known(name).records if record.module == "language"]
    assert sum(record.sizes["parameters"] for record in records) / 1e9 == pytest.approx(total, rel=0.002)
    layers = analytic_profile(records, DEVICES["H100-80GB"]).layers
    multiplied = sum(layer.weight_seconds.llm_tokens for layer in layers) * 0.69 * 989e12 / 2
    ends = 2 * records[-1].sizes["parameters"]  # embedding and head
    assert (multiplied + ends) / 1e9 == pytest.approx(active, rel=0.01)
    assert sum(layer.parameter_bytes for layer in layers) == 2 * sum(record.sizes["parameters"] for record in records)


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_has_layers_and_a_rule_for_images(name):
    model = Model.known(name)
    modules = {record.module for record in model.records}
    if model.name == "Qwen2-Audio-7B":
        assert modules == {"sound", "projector", "language"}
        return
    assert modules - {"sound"} == {"vision", "projector", "language"}
    assert ("sound" in modules) == (model.name == "Qwen2.5-Omni-7B")
    (load,) = model.image_rule()([(1000, 700)])
    assert load.vision_units > 0
    assert load.llm_tokens > 0


@pytest.mark.parametrize(
    ("name", "vision", "text"),
    # what the published files say
    [
        ("Qwen2-VL-7B", {}, None),
        ("Qwen2.5-VL-7B", {"hidden_size": 1280, "out_hidden_size": 3584}, None),
        ("Qwen3-VL-8B", None, None),
        ("Qwen3-VL-30B-A3B", None, None),
        ("InternVL3.5-30B-A3B", None, None),
        ("LLaVA-1.5-7B", None, {"model_type": "llama", "vocab_size": 32064}),
        ("LLaVA-v1.6-mistral-7B", None, {"model_type": "mistral", "vocab_size": 32064}),
        ("LLaVA-OneVision-Qwen2-7B", None, None),
        ("InternVL3-8B", None, None),
    ],
)
@pytest.mark.parametrize("is_flat", [False, True])
def test_what_a_config_leaves_out_is_what_transformers_fills_in(tmp_path, name, vision, text, is_flat):
    config, _ = MODELS[name]
    said = {**config, "text_config": text or config["text_config"]}
    said["vision_config"] = config["vision_config"] if vision is None else vision
    if is_flat:  # the language model's sizes at the top, as in the first folders of Qwen-VL
        if not name.startswith(("Qwen2", "Qwen2.5")):
            return
        said = {**said.pop("text_config"), **said}
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert layer_records(theirs) == layer_records(complete(said)) == Model.known(name).records


def test_pixels_of_a_preprocessor_may_stand_at_the_top():
    config, _ = MODELS["Qwen2.5-VL-7B"]
    small = Model.of("mine", config, {"max_pixels": 56 * 56 * 4, "min_pixels": 3136})
    assert small.image_rule()([(1000, 1000)])[0].vision_units == 64
    assert Model.known("Qwen2.5-VL-7B").image_rule(56 * 56 * 4)([(1000, 1000)])[0].vision_units == 64


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen3-VL-8B"])
@pytest.mark.parametrize(
    "preprocessor",
    [
        {},
        {"max_pixels": 200_704},
        {"size": {"shortest_edge": 3136, "longest_edge": 200_704}},
        {"size": {"longest_edge": 9999}, "max_pixels": 200_704, "min_pixels": 3136},
        {"size": {"longest_edge": 500_000}, "min_pixels": 3136},
        {"size": {"max_pixels": 5, "shortest_edge": 3136}, "max_pixels": 200_704},
        {"size": None},
        {"size": {"max_pixels": 200_704}},
        {"size": {"min_pixels": 3136, "max_pixels": 200_704}},
        {"size": {"longest_edge": 200_704}},
        {"size": {"height": 448, "width": 448}},
        {"size": 448},
    ],
    ids=str,
)
def test_a_processors_file_is_read_or_refused_as_transformers_does(tmp_path, name, preprocessor):
    config, _ = MODELS[name]
    patch = {"patch_size": 16 if "Qwen3" in name else 14, "merge_size": 2, "temporal_patch_size": 2}
    written = {"image_processor_type": "Qwen2VLImageProcessor", **patch, **preprocessor}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    (tmp_path / "config.json").write_text(json.dumps(config))
    picture = Image.new("RGB", (2000, 1500))
    try:
        grid = AutoImageProcessor.from_pretrained(tmp_path)(picture, return_tensors="pt")["image_grid_thw"]
    except ValueError:
        with pytest.raises(ConfigError, match="size of the processor must have shortest_edge and longest_edge, got"):
            read_model(str(tmp_path)).image_rule()
        return
    model = read_model(str(tmp_path))
    assert model.image_rule()([picture.size])[0].vision_units == int(grid.prod())
    assert model.image_limit[1] == "pixels" and model.has_own_images


def test_a_limit_of_the_other_kind_is_refused():
    with pytest.raises(
        ConfigError, match=r"max_image must be at least 3,136 pixels for Qwen2.5-VL-7B, .*, got 12; tiles"
    ):
        Model.known("Qwen2.5-VL-7B").image_rule(12)
    with pytest.raises(ConfigError, match="max_tiles must be at most 1024, got 1003520"):
        Model.known("InternVL3-8B").image_rule(1_003_520)


def test_a_name_that_is_not_known_gets_the_nearest_one():
    with pytest.raises(ConfigError, match=r"got 'Qwen2.5-VL-8B'; did you mean Qwen2.5-VL-7B\? of another model give"):
        Model.known("Qwen2.5-VL-8B")
    with pytest.raises(
        ConfigError, match=r"max_image must be left out for LLaVA-1\.5-7B, which has no such limit, got 9"
    ):
        Model.known("llava-1.5-7b-hf").image_rule(9)
