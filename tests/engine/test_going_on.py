"""A run survives a step that is not finite, ends if none is, and goes on from a checkpoint of its own kind only."""

from functools import partial
from math import isnan

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from transformers import InternVLForConditionalGeneration

from omnibal.config.section import RunSection
from omnibal.engine.checkpoint import export, latest_checkpoint
from omnibal.engine.resolve import UserOptimizer, resolve
from omnibal.errors import ConfigError
from omnibal.train import _check_checkpoints
from omnibal.workspace import Workspace
from tests.engine.cases import SmallDataset, changed, settings
from tests.engine.launch import launch
from tests.engine.small import save_small_model, small_config

BFLOAT16 = {"bf16": {"enabled": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder)
    return folder


@pytest.fixture(scope="module")
def seen(model, tmp_path_factory):
    """What each of two processes saw, and the folder that they wrote to."""
    precisions = [
        settings(model, num_stages=num_stages, zero_stage=zero_stage, extra=extra)
        for num_stages, zero_stage, extra in ((2, 0, {}), (1, 0, {}), (2, 0, BFLOAT16), (1, 1, BFLOAT16))
    ]
    unsaved = changed(precisions[2], "pipeline", partition=[0, 4, 10])
    saved = settings(model, num_stages=2, extra=BFLOAT16)
    others = [
        changed(saved, "model", frozen=["patch_embedding"]),
        saved | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True},
        {key: value for key, value in saved.items() if key != "scheduler"},
        changed(saved, "optimizer", weight_decay="matrices"),
        saved | {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
    ]
    folder = tmp_path_factory.mktemp("written")
    whole = settings(model, num_stages=2)
    return launch(2, "tests.engine.going_on:all_at_once", precisions, unsaved, saved, others, whole, folder), folder


@pytest.mark.distributed
def test_one_step_that_is_not_finite_is_left_out(seen):
    by_rank, _ = seen
    for result in by_rank:
        for run in result["poisoned"]:
            skipped, steps, scheduled = run["steps"]
            assert [isnan(loss) for loss in run["losses"]].count(True) == skipped == 1
            assert scheduled == steps - 1 > 0
            assert run["samples"] == len(SmallDataset())
            assert run["finite"]


@pytest.mark.distributed
def test_a_run_without_finite_gradients_ends_on_all_ranks(seen):
    by_rank, _ = seen
    for result in by_rank:
        for run in result["poisoned"]:
            assert run["error"].startswith("loss and gradients must be finite, got others in each of the last 5 steps")
            assert run["failed"] == 5
            assert run["kept"]


@pytest.mark.distributed
def test_what_cannot_go_on_from_a_checkpoint_is_named(seen):
    by_rank, _ = seen
    for result in by_rank:
        for message, key, saved, own in zip(
            result["refused"],
            ("frozen", "optimizer", "scheduler", "parameter_groups", "zero_optimization.round_robin_gradients"),
            ("[]", "AdamW", "WarmupCosineLR", "None", "None"),
            ("['patch_embedding']", "SGD", "None", "weight decay of matrices", "True"),
            strict=True,
        ):
            assert f": {key} must be that of the checkpoint " in message
            assert f"({saved}) to resume, got {own}; " in message


@pytest.mark.distributed
def test_settings_of_the_run_that_goes_on_hold_and_are_said(seen):
    by_rank, _ = seen
    assert by_rank[0]["renewed"][1]["scheduled"] > 0  # the other one is still at the beginning of its warmup
    for rank, result in enumerate(by_rank):
        for run in result["renewed"]:
            assert run["decay"] == {0.4}
            assert run["clipping"] == {0.25}
            assert run["rates"] == {run["scheduled"]}
            assert run["scheduled"] <= 0.003
            assert run["went_on"]
            if rank == 0:
                (told,) = run["told"]
                assert "with other settings: " in told
                for change in (
                    "gradient_accumulation_steps 1 (was 2)",
                    "optimizer.params.lr 0.003 (was 0.01)",
                    "optimizer.params.weight_decay 0.4 (was left out)",
                    "gradient_clipping 0.25 (was ",
                    "omnibal.run.epochs 5 (was 4)",
                ):
                    assert change in told


@pytest.mark.distributed
def test_weights_alone_go_on_under_another_optimizer(seen):
    by_rank, _ = seen
    for result in by_rank:
        initial, loaded, trained = result["weights"]
        assert loaded == 0
        assert trained < initial / 4


@pytest.mark.distributed
def test_the_model_is_exported_as_hugging_face_reads_it(seen):
    by_rank, folder = seen
    export(latest_checkpoint(folder / "checkpoints"), folder / "model")
    tensors = load_file(folder / "model" / "model.safetensors")
    weights = {name: weight for result in by_rank for name, weight in result["model"].items()}
    assert tensors.keys() == weights.keys()
    assert all(
        tensor.dtype == torch.bfloat16 and torch.equal(tensor, weights[name]) for name, tensor in tensors.items()
    )
    loaded, info = InternVLForConditionalGeneration.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.bfloat16


@pytest.mark.distributed
def test_a_run_with_everything_of_its_own_is_that_of_its_ds_config(seen):
    by_rank, _ = seen
    for result in by_rank:
        whole = result["whole"]
        steps, own_steps, evaluated = whole["steps"]
        assert steps == own_steps > 6
        assert evaluated == sorted({*range(3, steps + 1, 3), steps})
        assert whole["seen"]
        assert whole["logged"] == steps + len(evaluated)
        assert whole["mixed"] == (3, 3)
        assert [[asked for asked, _ in step.values()] for step in whole["shares"]] == [[0.25, 0.75]] * 3
        assert all(sum(held for _, held in step.values()) == pytest.approx(1) for step in whole["shares"])
        weights, own = whole["weights"]
        exported = load_file(whole["model"] / "model.safetensors")
        for name, weight in weights.items():
            assert torch.equal(weight, own[name])
            assert torch.equal(weight, exported[name])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"optimizer": SGD([torch.zeros(1, requires_grad=True)])},
            "optimizer must be a callable, got an instance of SGD",
        ),
        (
            {"lr_scheduler": 3},
            "lr_scheduler must be a callable, got an instance of int; its optimizer is yet to be made",
        ),
        ({"optimizer": SGD}, "optimizer must be given once, got one beside the ds_config's optimizer; leave one out"),
        ({"lr_scheduler": len}, "lr_scheduler must be given once, got one beside the ds_config's scheduler"),
    ],
)
def test_what_is_made_already_or_named_twice_is_refused(own, message):
    with pytest.raises(ConfigError, match=message):
        UserOptimizer(**own).check({"optimizer": {}, "scheduler": {}})


def test_a_schedule_has_the_steps_of_the_run_where_it_asks_for_them():
    asks, told, neither = (lambda optimizer, total_steps=None: total_steps), partial(OneCycleLR, total_steps=3), StepLR
    assert UserOptimizer(lr_scheduler=asks).over(7).lr_scheduler(None) == 7
    assert UserOptimizer(lr_scheduler=told).over(7).lr_scheduler is told
    assert UserOptimizer(lr_scheduler=neither).over(7).lr_scheduler is neither


def test_a_model_in_memory_must_be_what_is_trained(model):
    instance, config = InternVLForConditionalGeneration(small_config()), settings(model, num_stages=1)
    assert resolve(Workspace.read(config), instance, 1).weights_folder is None
    with pytest.raises(ConfigError, match="weights must be 'load' with a model that has weights, got 'random'"):
        resolve(Workspace.read(changed(config, "model", weights="random")), instance, 1)
    with pytest.raises(ConfigError, match="model or configuration, got an instance of Linear"):
        resolve(Workspace.read(config), torch.nn.Linear(1, 1), 1)
    instance.model.vision_tower.embeddings.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"parameters of model must be trained but .* got model\.vision_tower"):
        resolve(Workspace.read(config), instance, 1)
    assert resolve(Workspace.read(changed(config, "model", frozen=["patch_embedding"])), instance, 1)


def test_a_run_that_was_killed_in_its_first_save_begins_anew(tmp_path):
    run = RunSection(output=str(tmp_path))
    checkpoints = run.files.checkpoints
    (checkpoints / "global_step1.unfinished").mkdir(parents=True)
    (checkpoints / "zero_to_fp32.py").touch()  # which DeepSpeed writes first
    _check_checkpoints(run, None, resume=False, restart=False)
    with pytest.raises(ConfigError, match="must hold checkpoints to go on from"):
        _check_checkpoints(run, None, resume=True, restart=False)
    (checkpoints / "global_step1").mkdir()
    with pytest.raises(ConfigError, match="must be a folder without checkpoints"):
        _check_checkpoints(run, None, resume=False, restart=False)
