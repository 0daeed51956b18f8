"""Tensor ranks, which share each layer of a stage: dropout, exports, plans, resumed runs, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import InternVLForConditionalGeneration
from typer.testing import CliRunner

from omnibal.cli.main import app
from omnibal.cluster import Encoder
from omnibal.engine.checkpoint import export, read_manifest
from omnibal.engine.resolve import check_run
from omnibal.errors import ConfigError
from omnibal.vlm import load_model
from omnibal.vlm.tensor import part_of
from tests.engine.cases import run_of
from tests.engine.demo import demo_config
from tests.engine.launch import launch
from tests.engine.small import (
    Case,
    plain_results,
    save_small_model,
    small_samples,
)
from tests.vlm.tensor import slices_of

pytestmark = pytest.mark.distributed

ONE = [[[0, 1], [2], [4, 7], [3, 5, 6]]]
MIXED = ("full", "none", "selective")
EXACT = {"rtol": 2e-4, "atol": 2e-6}


def pair(boundaries, packs, **more):
    return Case(boundaries, packs, **{"num_tensor": 2} | more)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of small models; ``heads`` has as many heads in its ViT as it has of queries, 4."""
    dropout = {"hidden_dropout_prob": 0.2}
    options = {"": {}, "tied": {"tied": True}, "heads": {"num_attention_heads": 4}, "dropout": dropout}
    folders = {}
    for name, own in options.items():
        folders[name] = tmp_path_factory.mktemp(name or "model")
        save_small_model(folders[name], **own)
    return folders


def assert_parts(found, whole, folder, num_tensor, rank, case, **near):
    """Compare a tensor rank's gradients or weights with its parts of the whole ones."""
    slices = slices_of(load_model(folder), num_tensor, rank)
    for name, value in found.items():
        expected = part_of(whole[name], slices[name]) if name in slices else whole[name]
        torch.testing.assert_close(
            value.view_as(expected),
            expected,
            **near,
            msg=lambda said, name=name: f"{name} differs in {case}: {said}",
        )


def test_two_tensor_ranks_drop_what_one_rank_drops(models):
    """Of what is whole on all ranks: of heads and of an adapter's input each rank has others, and drops others."""
    case = pair((0, 10), ONE, model=str(models["dropout"]), recompute=MIXED, zero_stage=1, steps=2)
    alone, plain = replace(case, num_tensor=1), replace(case, num_tensor=1, model=str(models[""]))
    ((whole, without),) = launch(1, "tests.engine.cases:several_steps", [alone, plain])
    assert whole["losses"] != pytest.approx(without["losses"], rel=1e-3)
    for rank, (found,) in enumerate(launch(2, "tests.engine.cases:several_steps", [case])):
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert_parts(found["weights"], whole["weights"], case.model, 2, rank, "dropout", **EXACT)


def test_before_the_first_step_an_export_is_the_model(models, tmp_path):
    """Bit by bit; and an evaluation says of it what plain transformers says."""
    names = ("", "tied")
    cases = [pair((0, 10), ONE, model=str(models[name]), steps=0) for name in names]
    by_rank = launch(2, "tests.engine.cases:evaluated_and_saved", cases, str(tmp_path))
    for number, name in enumerate(names):
        export(tmp_path / str(number) / "end", tmp_path / f"exported{number}")
        exported, original = (
            load_file(folder / "model.safetensors") for folder in (tmp_path / f"exported{number}", models[name])
        )
        assert exported.keys() == original.keys()
        assert all(torch.equal(weight, original[path]) for path, weight in exported.items())
        plain = InternVLForConditionalGeneration.from_pretrained(models[name])
        loss, accuracy = plain_results(plain, small_samples())
        for result in by_rank:
            found = result[number]["evaluation"]
            assert (found.loss, found.accuracy, found.samples) == (pytest.approx(loss, rel=1e-5), accuracy, 8)
        assert read_manifest(tmp_path / str(number) / "end")["num_tensor"] == 2
    layer = next((tmp_path / "0" / "end").glob("layer_02-model_01-*"))
    layer.unlink()
    with pytest.raises(ConfigError, match=f"{layer.name}"):
        export(tmp_path / "0" / "end", tmp_path / "no")


def test_a_run_is_planned_trained_resumed_and_exported(tmp_path):
    config = demo_config(tmp_path)
    run = config["omnibal"]["run"]
    run.update(max_steps=4, save_every=2, keep=2, evaluate_every=0)
    config["omnibal"] |= {
        "pipeline": {"num_stages": 2, "num_tensor": 2},
        "packing": {"samples_per_step": 12},
        "cluster": "4xA100-80GB",
    }
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(config))
    planned = CliRunner().invoke(app, ["plan", str(file), "--write"])
    assert planned.exit_code == 0, planned.output
    exported = None
    for rank, (begun, resumed) in enumerate(launch(4, "tests.engine.going_on:begun_and_resumed", str(file))):
        assert begun["layout"] == "2 stages × 1 replica × 2 tensor ranks"
        assert resumed["loss"] == begun["loss"]
        exported = exported or load_file(Path(run["output"]) / "model" / "model.safetensors")
        slices = slices_of(load_model(config["omnibal"]["model"]["path"]), 2, rank % 2)
        for name, weight in resumed["weights"].items():
            assert torch.equal(weight, begun["weights"][name]), name
            assert torch.equal(weight, part_of(exported[name], slices[name]) if name in slices else exported[name])


REFUSED = {
    "num_tensor must be at most the 2 heads of vision_block.0, got 4": {"num_tensor": 4},
    "omnibal.pipeline.encoder must be left out where tensor ranks share layers, got 1 stage × 1 replica": {
        "encoder": Encoder(1, 1)
    },
    "zero_optimization.contiguous_gradients must be left out where tensor": {
        "extra": {"zero_optimization": {"stage": 1, "contiguous_gradients": True}}
    },
    "zero_optimization.offload_optimizer must be left out where tensor ranks share layers": {
        "extra": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_tensor_ranks_cannot_run_is_refused(message, models):
    resolved, plan = run_of(pair((0, 4, 10), ONE, model=str(models[""]), **REFUSED[message]), num_replicas=1)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        check_run(resolved, plan.partition)


def test_families_that_say_no_cuts_are_refused(models):
    resolved, plan = run_of(pair((0, 4, 10), ONE, model=str(models[""])), num_replicas=1)
    check_run(resolved, plan.partition)
    resolved.vlm.family = replace(resolved.vlm.family, cuts={})
    with pytest.raises(ConfigError, match="num_tensor must be 1 for the family of internvl, which does not say how"):
        check_run(resolved, plan.partition)
