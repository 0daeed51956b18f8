import json
from dataclasses import replace

import numpy as np
import pytest

from omnibal.advise.measuring import MeasuredLengths, measure
from omnibal.advise.models import Model, read_model
from omnibal.advise.paste import lines_to_paste
from omnibal.advise.present import Present, read_today
from omnibal.advise.question import Question
from omnibal.cluster import Cluster
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.step_size import KEPT
from omnibal.errors import ConfigError, DataError
from omnibal.profile.calibration import Calibration, TimedPass, calibrate, sizes_of
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import every_layer
from tools.synthetic import tiled_lengths

EIGHT = Cluster.parse("8xA100-80GB")
PRESENT = Present(sharding="zero3", batch=4)
NAME = "InternVL3-8B"
COUNTED = analytic_profile(Model.known(NAME).records, EIGHT.device)


@pytest.fixture
def lists(tmp_path):
    """Two lists of lengths."""
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path, tiles in zip(paths, (1, 5), strict=True):
        path.write_text(json.dumps([{"vit_num": tiles, "token_num": 256 * tiles + 90}] * 40))
    return paths


def test_it_is_asked_and_answered_in_python(lists):
    question = Question.read(lists, EIGHT, PRESENT, model=NAME)
    assert question.measured.said == "80 samples, lengths known"
    assert (question.recipe.batch, question.recipe.micro_batches, question.scenario.samples_per_step) == (4, 8, 256)
    assert question.answer().whole.factor > 1.3
    assert question.model_path == "FOLDER"  # lengths are measured with a model's own files


def test_measured_costs_take_the_place_of_counted_ones(lists):
    layers = tuple(replace(layer, forward_seconds=layer.forward_seconds * 2) for layer in COUNTED.layers)
    slow = replace(COUNTED, layers=layers, device="NVIDIA A100-SXM4-80GB", versions={"torch": "2"})
    counted, measured = (Question.read(lists, EIGHT, PRESENT, model=NAME, costs=costs) for costs in (None, slow))
    seconds = [asked.scenario.estimate(asked.recipe).sample_seconds.mean() for asked in (counted, measured)]
    assert seconds[1] > 1.2 * seconds[0]


def test_a_run_corrects_counted_costs(lists, tmp_path):
    first = next(number for number, layer in enumerate(COUNTED.layers) if layer.module == "language")
    parts, load = ((0, first), (first, len(COUNTED.layers))), Load(9, 4096, 4096**2)
    passes = [
        TimedPass(
            part, False, sizes_of(load[None])[0], factor * sum(float(layer.forward_seconds(load)) for layer in layers)
        )
        for part, factor in zip(parts, (2, 1), strict=True)
        for layers in [COUNTED.layers[slice(*part)]]
    ]
    found = calibrate(COUNTED, passes, every_layer("none", len(COUNTED.layers)), device="NVIDIA A100-SXM4-80GB")
    (tmp_path / "metrics.jsonl").write_text(found.line(step=20))
    calibration = Calibration.load(tmp_path / "metrics.jsonl")
    measured = Question.read(lists, EIGHT, PRESENT, model=NAME, costs=calibration)
    vision, language = (
        measured.costs.layers[layer].forward_seconds(load) / COUNTED.layers[layer].forward_seconds(load)
        for layer in (1, first + 1)
    )
    assert (vision, language) == (pytest.approx(2, rel=0.1), pytest.approx(1, rel=0.1))
    with pytest.raises(ConfigError, match="profile must be of H100-80GB, got one of NVIDIA A100-SXM4-80GB"):
        Question.read(lists, Cluster.parse("8xH100-80GB"), PRESENT, model=NAME, costs=calibration)
    with pytest.raises(ConfigError, match="got those of another model"):
        Question.read(lists, EIGHT, PRESENT, model="InternVL3-2B", costs=calibration)


@pytest.mark.parametrize(
    ("costs", "present", "message"),
    [
        (replace(COUNTED, device="H100-80GB"), PRESENT, "profile must be of A100-80GB, got one of H100-80GB"),
        (COUNTED, replace(PRESENT, frozen=("vision",)), "profile must fit this run, got frozen parts"),
        (COUNTED, replace(PRESENT, lora=16), "profile must be of adapters where LoRA is trained, got one without"),
    ],
)
def test_costs_of_something_else_are_refused(lists, costs, present, message):
    with pytest.raises(ConfigError, match=message):
        Question.read(lists, EIGHT, present, model=NAME, costs=costs)


def test_a_mixture_draws_from_several_lists_by_their_names(lists, tmp_path):
    today = tmp_path / "ds_config.json"

    def measured(mixture):
        section = {"data": {"mixture": mixture}}
        today.write_text(json.dumps({"zero_optimization": {"stage": 3}, "omnibal": section}))
        return Question.read(lists, EIGHT, read_today(str(today)), model=NAME).measured

    found = measured({"one": 0.25, "two": 0.75})
    assert found.said == "80 samples, lengths known; drawn with the mixture's first shares"
    assert (found.lengths.vision_units == 5).mean() == pytest.approx(0.75, abs=0.02)
    with pytest.raises(ConfigError, match=r"mixture must name sources of the data, got 'tow'; did you mean 'two'\?"):
        measured({"one": 1, "tow": 1})


def test_wrong_names_are_refused(lists, tmp_path):
    with pytest.raises(ConfigError, match="model must be named, got none"):
        Question.read(lists, EIGHT, PRESENT)
    (tmp_path / "a.json").write_text('{"loss": 1}')
    with pytest.raises(ConfigError, match=r"config\.json with a model_type, got"):
        read_model(str(tmp_path / "a.json"))
    (tmp_path / "b.yaml").write_text("finetuning_type: full\ndeepspeed: examples/z3.json\n")
    with pytest.raises(
        ConfigError, match=r"deepspeed in .*b\.yaml must name a file .*, got 'examples/z3\.json'; copy it"
    ):
        read_today(str(tmp_path / "b.yaml"))
    with pytest.raises(ConfigError, match="today must be JSON or YAML, got"):
        read_today(__file__)
    with pytest.raises(DataError, match=r"data must be JSON lines, .* or a folder that datasets saved, .* got"):
        measure([tmp_path], read_model(NAME), PRESENT)
    (tmp_path / "a.tar").touch()
    with pytest.raises(DataError, match=r"data must be shards alone where there are some, got .*one\.json beside them"):
        measure([lists[0], tmp_path / "a.tar"], read_model(NAME), PRESENT)
    with pytest.raises(DataError, match="data must be lengths where there are several files, got"):
        measure([lists[0], tmp_path / "a.json"], read_model(NAME), PRESENT)


def test_hosts_make_large_images_smaller_before_they_are_cut(tmp_path):
    path = tmp_path / "train.jsonl"
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "This."}]
    path.write_text(json.dumps({"image": "a.png", "width": 3000, "height": 3000, "conversations": turns}))
    for name in (NAME, "Qwen2.5-VL-7B"):
        large, small = (
            measure([path], read_model(name), replace(PRESENT, max_pixels=most)).lengths.vision_units[0]
            for most in (None, 400 * 400)
        )
        assert large > 4 * small


def test_texts_alone_have_no_image_and_cut_samples_are_told(tmp_path):
    SampleLengths(np.zeros(10, dtype=int), np.arange(100, 1100, 100)).save(tmp_path)
    found = measure([tmp_path], read_model("Qwen2.5-VL-7B"), replace(PRESENT, cutoff=500))
    assert found.said == "10 samples, lengths known; 50.0% are cut at 500 tokens"
    assert found.lengths.llm_tokens.max() == 500


def test_answers_are_cut_first(tmp_path):
    SampleLengths([0] * 3, [400, 600, 900], target_tokens=[300, 300, 300]).save(tmp_path)
    found = measure([tmp_path], read_model("Qwen2.5-VL-7B"), replace(PRESENT, cutoff=500))
    assert found.lengths.target_tokens.tolist() == [300, 200, 0]


def test_costs_of_tensor_ranks_know_frozen_parts_and_adapters(lists):
    whole, frozen, adapted = (
        Question.read(lists, EIGHT, replace(PRESENT, **trained), model=NAME).tensor_profile(1, 2)
        for trained in ({}, {"frozen": ("vision",)}, {"lora": 16})
    )
    assert frozen.frozen_front > 0 == whole.frozen_front
    assert adapted.adapter_parameters and not whole.adapter_parameters
    assert adapted.tensor_parallel == whole.tensor_parallel == {"vision": 1, "language": 2}
    gradients = [sum(layer.gradient_bytes for layer in costs.layers) for costs in (adapted, whole)]
    assert gradients[0] < 0.05 * gradients[1]


def test_measured_costs_leave_tensor_ranks_out(lists):
    question = Question.read(lists, EIGHT, PRESENT, model=NAME, costs=COUNTED)
    with pytest.raises(ConfigError, match="counted of the model, got costs of one device"):
        question.tensor_profile(1, 2)


@pytest.mark.parametrize("tokens", [2048, 4096, 9000])
def test_random_packs_of_today_say_how_many_samples_a_step_has(tokens):
    # They are not full, so that as many tokens as they could hold would be more samples.
    lengths = tiled_lengths(3000, seed=1)
    present = Present("llama-factory", "zero3", 1, 8, batching="packed", cutoff=tokens)
    question = Question(MeasuredLengths(lengths, "all"), Model.known("InternVL3-1B"), EIGHT, present)
    advice = question.answer()
    assert advice.today.samples_per_step == pytest.approx(question.scenario.samples_per_step, rel=0.01)
    assert advice.after.samples_per_step == pytest.approx(advice.today.samples_per_step, rel=KEPT)
    assert advice.today.samples_per_step < 64 * tokens / lengths.llm_tokens.mean()


@pytest.mark.parametrize("accumulation", [1, 2, 3, 5])
def test_a_hosts_own_packs_have_todays_samples_a_step(accumulation):
    lengths = tiled_lengths(3000, seed=1)
    present = Present("llama-factory", "zero3", 2, accumulation, cutoff=4096)
    question = Question(MeasuredLengths(lengths, "all"), Model.known("InternVL3-1B"), EIGHT, present)
    advice = question.answer()
    assert advice.settled.samples_per_step == pytest.approx(16 * accumulation, rel=0.01)
    assert advice.after.samples_per_step == pytest.approx(16 * accumulation, rel=KEPT)
    if advice.settled.recipe.batching == "packed" and not advice.takes_packs:
        tokens = advice.settled.recipe.limits.llm_tokens
        lines = lines_to_paste(advice, present, EIGHT, None, data="d", model="m", kind="lengths")
        assert tokens >= lengths.llm_tokens.max() and f"cutoff_len: {tokens}" in "".join(lines)
