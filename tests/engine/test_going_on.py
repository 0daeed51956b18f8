"""A run survives a step that is not finite, ends if none is, and goes on from a checkpoint of its own kind only."""

from math import isnan

import pytest
import torch
from safetensors.torch import load_file
from transformers import InternVLForConditionalGeneration

from omnibal.engine.initialize import _read, initialize
from omnibal.errors import ConfigError
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
    ]
    folder = tmp_path_factory.mktemp("written")
    return launch(2, "tests.engine.going_on:all_at_once", precisions, unsaved, saved, others, folder), folder


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
            ("frozen", "optimizer", "scheduler"),
            ("[]", "AdamW", "WarmupCosineLR"),
            ("['patch_embedding']", "SGD", "None"),
            strict=True,
        ):
            assert f": {key} must be that of the checkpoint " in message
            assert f"({saved}) to resume, got {own}; " in message


@pytest.mark.distributed
def test_weights_alone_go_on_under_another_optimizer(seen):
    by_rank, _ = seen
    for result in by_rank:
        initial, loaded, trained = result["weights"]
        assert loaded == 0
        assert trained < initial / 4


@pytest.mark.distributed
def test_the_model_is_saved_as_hugging_face_reads_it(seen):
    by_rank, folder = seen
    tensors = load_file(folder / "model" / "model.safetensors")
    weights = {name: weight for result in by_rank for name, weight in result["model"].items()}
    assert tensors.keys() == weights.keys()
    assert all(
        tensor.dtype == torch.bfloat16 and torch.equal(tensor, weights[name]) for name, tensor in tensors.items()
    )
    loaded, info = InternVLForConditionalGeneration.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("optimizer", "name it under 'optimizer' of the ds_config"),
        ("lr_scheduler", "name it under 'scheduler' of the ds_config"),
        ("data_set", "leave it out"),
    ],
)
def test_what_initialize_does_not_take_is_refused(argument, remedy):
    with pytest.raises(ConfigError, match=f"must be config, model and dataset, got {argument}; {remedy}"):
        initialize(config={}, **{argument: object()})


def test_an_instance_as_model_is_refused(model):
    instance = InternVLForConditionalGeneration(small_config())
    with pytest.raises(ConfigError, match="got an instance of InternVLForConditionalGeneration; save it with"):
        _read(settings(model, num_stages=1), instance, 1)
