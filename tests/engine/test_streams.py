"""Streams in the pipeline: all stages train on the same packs, resumed runs see the same samples, nothing hangs."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from omnibal.demo import vocabulary, write_model_folder
from omnibal.formats.conversations import open_dataset
from tests.engine.cases import SGD, changed, settings
from tests.engine.demo import demo_config
from tests.engine.launch import launch
from tests.engine.small import SHAPES, plain_gradients, plain_training, save_small_model, small_samples
from tests.engine.streaming import LAST_STEP, SAVED_AT
from tests.engine.test_families import ADAM, CLIPPING
from tests.families.models import save_folder
from tests.families.videos import make_clip
from tests.vlm.families import plain_steps

pytestmark = [pytest.mark.distributed, pytest.mark.cluster(2, together=True)]
SOURCES = {"shapes": 0.4, "scenes": 0.2, "pairs": 0.2, "stories": 0.2}
MIXTURE = {"stateful": 0.5, "indexed": 0.2, "stateless": 0.3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder)
    return folder


def config_of(model, num_stages, layout):
    config = changed(settings(model, num_stages=num_stages), "pipeline", **layout)
    config = changed(config, "packing", method="balanced", vision_units=4, llm_tokens=48)
    config = changed(config, "data", mixture=MIXTURE)
    return changed(config, "run", max_steps=LAST_STEP)


@pytest.fixture(scope="module")
def by_rank(model, tmp_path_factory):
    """Two stages and two replicas; one encoder and three LLMs."""
    configs = [config_of(model, 2, layout) for layout in ({}, {"encoder": {"num_replicas": 1}})]
    plain = changed(settings(model, num_stages=2), "packing", method="balanced", vision_units=9, llm_tokens=99)
    plain = {key: value for key, value in plain.items() if key != "scheduler"}
    plain = changed(plain, "run", max_steps=3) | {"optimizer": SGD, "zero_allow_untested_optimizer": True}
    plain |= {"zero_optimization": {"stage": 0}, "gradient_clipping": 0.0}
    streamed = demo_config(tmp_path_factory.mktemp("demo"))
    streamed = changed(streamed, "data", streaming=True, workers=1, mixture=SOURCES, broken="skip")
    for source in SOURCES:  # a broken line for each replica
        lines = Path(streamed["omnibal"]["data"]["train"]).parent / "train" / f"{source}.jsonl"
        lines.write_text("{broken\n" * 2 + lines.read_text())
    streamed = changed(streamed, "run", max_steps=2, epochs=1, save_every=0, evaluate_every=0)
    streamed = changed(streamed, "pipeline", num_stages=2)
    folder = tmp_path_factory.mktemp("checkpoints")
    return launch(4, "tests.engine.streaming:everything", configs, plain, str(folder), streamed)


def check_resumed(run):
    whole, again = run["whole"], run["again"]
    assert whole["losses"][SAVED_AT:] == again["losses"]
    assert whole["samples"][SAVED_AT:] == again["samples"]
    assert whole["seen"][len(whole["seen"]) * SAVED_AT // LAST_STEP :] == again["seen"]
    assert whole["weights"].keys() == again["weights"].keys()
    assert all(torch.equal(weight, again["weights"][name]) for name, weight in whole["weights"].items())
    assert "seed must be that of the state of the streams, 0, got 7; every rank goes on" in run["other"]


def test_a_resumed_run_trains_on_the_samples_that_would_have_followed_bit_for_bit(by_rank):
    for results in by_rank:
        for run in results["resumed"]:
            check_resumed(run)


@pytest.mark.slow
def test_a_spread_encoder_and_tensor_ranks_go_on_alike(model, tmp_path):
    configs = [config_of(model, 1, {"encoder": "spread"}), config_of(model, 2, {"num_tensor": 2})]
    runs = [*zip(*launch(4, "tests.engine.streaming:all_resumed", configs, str(tmp_path)), strict=True)]
    for run in itertools.chain.from_iterable(runs):
        check_resumed(run)
    for of_ranks in runs:
        check_shares([run["whole"]["shares"] for run in of_ranks])
    shared = [run["whole"]["seen"] for run in runs[1]]  # by two tensor ranks of each stage
    assert shared[0] == shared[1] != shared[2] == shared[3]


def test_stages_see_the_same_packs_and_replicas_their_own(by_rank):
    first, second, last, last_of_second = (results["resumed"][0]["whole"]["seen"] for results in by_rank)
    labels = -100
    for ids, seen in ((first, last), (second, last_of_second)):
        assert len(ids) == len(seen) == 2 * LAST_STEP
        for (tokens,), (targets,) in zip(ids, seen, strict=True):
            assert all(target in (labels, token) for token, target in zip(tokens, targets, strict=True))
            assert any(target != labels for target in targets)
    assert not {str(pack) for pack in first} & {str(pack) for pack in second}


def test_replicas_of_the_llm_get_the_labels_of_the_packs_that_their_encoder_draws(by_rank):
    drawn, *trained = (results["resumed"][1]["whole"]["seen"] for results in by_rank)
    assert len(drawn) == 2 * 3 * LAST_STEP
    for replica, seen in enumerate(trained):
        own = drawn[replica::3]
        assert len(own) == len(seen)
        for (tokens,), (targets,) in zip(own, seen, strict=True):
            assert len(tokens) == len(targets)
            assert all(target in (-100, token) for token, target in zip(tokens, targets, strict=True))


def check_shares(of_ranks):
    assert all(shares == of_ranks[0] for shares in of_ranks)
    assert [[asked for asked, _ in step.values()] for step in of_ranks[0]] == [[0.5, 0.2, 0.3]] * LAST_STEP
    held = np.array([[given for _, given in step.values()] for step in of_ranks[0]])
    assert held.sum(axis=1) == pytest.approx(np.ones(LAST_STEP))
    assert held.mean(axis=0) == pytest.approx([0.5, 0.2, 0.3], abs=0.1)


def test_shares_are_those_that_were_asked_for_and_known_on_all_ranks(by_rank):
    for number in (0, 1):
        check_shares([results["resumed"][number]["whole"]["shares"] for results in by_rank])


def test_a_stream_over_samples_trains_as_plain_transformers_on_them(by_rank, model):
    loss, gradients = plain_gradients(model, small_samples())
    losses, *_ = plain_training(
        model,
        small_samples(),
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        clipping=float("inf"),
        steps=3,
    )
    found = {}
    for results in by_rank:
        run = results["plain"]
        assert run["losses"][0] == pytest.approx(loss, rel=1e-5)
        assert run["losses"] == pytest.approx(losses, rel=1e-4)
        assert run["epochs"] == 2  # a step holds all samples, which then come again
        assert run["samples"] == 3 * len(SHAPES)
        assert "rank 0, stage 0: omnibal.run.max_steps must be all steps of a run" in run["beyond"]
        found |= run["gradients"]
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


def test_streams_that_cannot_work_are_refused_in_a_line(by_rank):
    expected = {
        "epochs": "omnibal.run.max_steps must say how long to train on a stream, got none; without lengths",
        "limits": "omnibal.packing must give vision_units and llm_tokens for a stream, .* got 4 and None",
        "method": "omnibal.packing.method must be 'balanced' for a stream, got 'isf'",
        "repeat": "omnibal.data.mixture must be shares by source for streams, got 'repeat_time'",
        "name": "must name .*sources of the data, got .*; did you mean .*stateful",
        "several": "mixture must say what share each source gets, got none for a, b",
        "shards": "source 'data' must have a shard for each of 2 replicas, got 1; each would read all of them",
    }
    for results in by_rank:
        assert results["refused"].keys() == expected.keys()
        for name, message in expected.items():
            assert re.search(message, results["refused"][name]), (name, results["refused"][name])


def test_sources_that_fail_end_all_ranks_and_are_named(by_rank):
    expected = {
        "empty": "rank 0: source 'data' must yield samples in every pass, got none",
        "gone": "rank 1: source 'data': shard 7 is gone",
        "bad": "source 'data', sample 0: a sample must have as many labels as input_ids",
        "long": "source 'data', sample 0 must be within the limits of 4 vision units and 48 LLM tokens, got .*; over",
        "all": "limits must allow a sample of the sources, got none; source 'data', sample 0 must be within the limits",
        "stuck": "source 'data' must bring samples, got none for .* s on rank 1",
    }
    for results in by_rank:
        assert results["failed"].keys() == expected.keys()
        for name, message in expected.items():
            assert re.search(message, results["failed"][name] or "accepted"), (name, results["failed"][name])


def test_json_lines_are_trained_as_they_are_read(by_rank):
    for results in by_rank:
        steps, samples, records = results["streamed"]
        assert steps == len(records) == 2
        assert samples == sum(record["samples"] for record in records) > 0
        for record in records:  # what the report draws
            assert {name: asked for name, (asked, _) in record["shares"].items()} == pytest.approx(SOURCES)
            assert sum(held for _, held in record["shares"].values()) == pytest.approx(1)
        left_out = sum(record["left_out"] for record in records)  # in each pass over a source
        assert left_out > 0 == left_out % (2 * len(SOURCES))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_json_lines_with_videos_train_as_plain_transformers(family, tmp_path):
    """A step holds all samples of the lines: videos of two containers, an image, a list of frames, texts."""
    write_model_folder(tmp_path / "demo", vocabulary())
    save_folder(family, tmp_path / "model", tmp_path / "demo", weights=True)
    make_clip(tmp_path / "a.mp4", 40, 30, 41, 10)
    make_clip(tmp_path / "b.webm", 36, 48, 17, 25)
    for name, size in {"c.png": (50, 40), "1.jpg": (32, 32), "2.jpg": (32, 32), "3.jpg": (32, 32)}.items():
        Image.linear_gradient("L").resize(size).convert("RGB").save(tmp_path / name)
    asked = [
        ({"video": ["a.mp4", "b.webm"], "image": "c.png"}, "<video>\nWhat is <image> ?<video>", "the ball"),
        ({"video": "b.webm"}, "<video>\nWhat is it ?", "one hat"),
        ({"videos": [["1.jpg", "2.jpg", "3.jpg"]]}, "<video> What colour?", "red"),
        ({}, "What colour?", "red"),
    ]
    lines = [
        {**files, "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for files, question, answer in asked
    ]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    dataset = open_dataset(tmp_path / "data.jsonl", tmp_path / "model")
    samples = [dataset[number] for number in range(len(dataset))]
    for sample in samples:
        ids = sample["input_ids"][None]
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        kinds = (ids == config["image_token_id"]).long() + 2 * (ids == config["video_token_id"]).long()
        sample |= {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    config = changed(settings(tmp_path / "model", num_stages=2), "packing", method="balanced")
    config = changed(config, "packing", vision_units=2000, llm_tokens=1000)
    config = {key: value for key, value in config.items() if key != "scheduler"}
    config = changed(config, "data", train=str(tmp_path / "data.jsonl"), streaming=True, workers=0)
    config = changed(config, "run", max_steps=3, epochs=1, output=str(tmp_path / "run"))
    config |= {"optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}}, "gradient_clipping": CLIPPING}
    losses, _, weights = plain_steps(tmp_path / "model", [samples] * 3, clipping=CLIPPING, **ADAM)
    found = {}
    for result in launch(2, "tests.engine.streaming:streamed_weights", config):
        assert result["losses"] == pytest.approx(losses, rel=1e-4)
        found |= result["weights"]
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=2e-5, msg=name)
