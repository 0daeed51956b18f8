"""Wrong input ends on all ranks, with a message that says what is wrong; nothing hangs."""

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from omnibal.data.limits import PackLimits
from omnibal.engine.resolve import resolve
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.workspace import Workspace
from tests.engine.cases import changed, settings
from tests.engine.launch import launch
from tests.engine.small import save_small_model, small_config

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder)
    return folder


def test_configurations_that_cannot_work(model, tmp_path):
    good = settings(model, num_stages=2)
    plan = tmp_path / "plan.json"
    Plan(PackLimits(4, 48), 7, Partition((0, 4, 10)), ("none",) * 10).save(plan)
    empty = tmp_path / "empty"
    empty.mkdir()
    misfit = shutil.copytree(model, tmp_path / "misfit")
    tensors = load_file(misfit / "model.safetensors")
    save_file(
        {name: tensor[:7] if "lm_head" in name else tensor for name, tensor in tensors.items()},
        misfit / "model.safetensors",
        metadata={"format": "pt"},
    )
    cases = [
        (good | {"zero_optimization": {"stage": 2}}, "zero_optimization.stage must be 0 or 1 with a pipeline, got 2"),
        (settings(model, num_stages=2, zero_stage=0) | {"gradient_clipping": 1.0}, "gradient_clipping must be 0"),
        (settings(model, num_stages=3), "num_stages must divide the 2 processes, got 3"),
        (changed(good, "pipeline", num_tensor=3), "processes must be a multiple of the 3 that share each layer, got 2"),
        (
            changed(good, "pipeline", num_tensor=2, num_stages=1)
            | {"zero_optimization": {"stage": 1, "contiguous_gradients": True}},
            "zero_optimization.contiguous_gradients must be left out where tensor ranks share layers",
        ),
        (changed(good, "pipeline", partition=[0, 4, 9]), "layers of the partition must be 10.*got 9"),
        (changed(good, "pipeline", partition=[0, 3, 5, 10]), "stages of the partition must be 2.*got 3"),
        (changed(good, "pipeline", partition=[0, 12, 10]), "boundaries must start at 0 and increase"),
        (changed(good, "pipeline", recompute=["full"]), "recompute must have a level for each of 10 layers, got 1"),
        (changed(good, "pipeline", plan=str(tmp_path / "none.json")), "plan must be a readable file"),
        (changed(good, "packing", llm_token=3), "did you mean 'llm_tokens'"),
        (changed(good, "packing", llm_tokens=10, oversized="error"), "DataError: rank 0.*samples must keep the limits"),
        (changed(good, "model", path=str(empty)), "without config.json"),
        ({key: value for key, value in good.items() if key != "optimizer"}, "optimizer must be given, got none; set"),
        (
            good | {"optimizer": {"type": "adamw_torch", "params": {"lr": 0.1}}},
            "ds_config must be one that DeepSpeed takes, got: AssertionError: adamw_torch is not a supported",
        ),
        (
            good | {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "beta": 1, "torch_adam": True}}},
            "optimizer of a ds_config must be one that .* unexpected keyword argument 'beta'",
        ),
        (
            good | {"scheduler": {"type": "cosine", "params": {}}},
            "scheduler of a ds_config must be one that DeepSpeed can make, got cosine with {}",
        ),
        (
            good | {"zero_optimization": {"stage": 1, "overlap_com": True}},
            "ds_config must be one that DeepSpeed takes, got: .*overlap_com",
        ),
        (changed(good, "model", path=None), "model must be given, got none"),
        (changed(good, "model", path=str(misfit)), "rank 1, stage 1.*lm_head.* must have shape"),
        (good, None),
    ]
    by_rank = launch(2, "tests.engine.cases:refusals", [config for config, _ in cases])
    for messages in by_rank:
        for (config, expected), message in zip(cases, messages, strict=True):
            if expected is None:
                assert message is None
            else:
                assert message, f"accepted: {config}"
                assert re.search(expected, message), message
    assert by_rank[0] == by_rank[1]


def test_a_configuration_has_no_weights_to_load(model):
    for path in (str(model), None):  # the folder of the section is not the model that is trained
        config = changed(settings(model, num_stages=1), "model", path=path)
        with pytest.raises(ConfigError, match="weights must be 'random' with a configuration as model, got 'load'"):
            resolve(Workspace.read(config), small_config(), 1)
    assert resolve(Workspace.read(changed(config, "model", weights="random")), small_config(), 1).folder is None


def test_a_sample_that_is_not_as_promised_stops_all_ranks(model):
    expected = {
        "unreadable": "rank 0, stage 0: image must be decodable, got picture.png (train.jsonl, line 14)",
        "short text": "rank 1, stage 1: sample 13 must have as many labels as input_ids, 14, got 13",
        "other text": "text(13) of the dataset must have the labels of [13], got others; "
        "the last stage would train on another sample than the first one reads",
        "short lengths": "rank 0: lengths() must have an entry for each of the dataset's 32 samples, got 31",
    }
    config = settings(model, num_stages=2)
    by_rank = launch(2, "tests.engine.cases:flawed_datasets", config, list(expected), 13)
    assert by_rank[0] == by_rank[1], "all ranks hear the same"
    said, longest_wait = by_rank[0]
    assert said == [f"DataError: {message}" for message in expected.values()]
    assert longest_wait >= 0.3, "the last stage, which reads no image, has waited with the first one"


def test_checkpoints_that_cannot_be_saved_or_loaded(model, tmp_path):
    config = changed(settings(model, num_stages=2), "pipeline", partition=[0, 5, 10])
    others = {
        "frozen": changed(config, "model", frozen=["vision_block"]),
        "optimizer": config
        | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True},
        "scheduler": {key: value for key, value in config.items() if key != "scheduler"},
    }
    folder = tmp_path / "checkpoints"
    by_rank = launch(2, "tests.engine.cases:checkpoint_troubles", config, others, str(folder))
    assert by_rank[0] == by_rank[1], "all ranks hear the same"
    said = by_rank[0]
    assert said["another tag"] == "ConfigError: tag must be the same on all ranks, got rank0, rank1"
    assert "ConfigError: rank 0, stage 0: tag must be a name for a folder" in said["no name"]
    assert said["full disk"].startswith("OmnibalError: rank 1, stage 1: checkpoint a must be written completely, got ")
    assert f"MiB are free in {folder}); older checkpoints are as they were" in said["full disk"]
    assert said["left"] == ["a"]
    assert "checkpoint a must be written completely, got " in said["vanished"]
    for key, got in (
        ("frozen", "['vision_block']"),
        ("optimizer", "SGD"),
        ("scheduler", "None"),
    ):
        assert f"stage 0: {key} must be that of the checkpoint {folder}/b" in said[key]
        assert f"got {got}" in said[key]
    assert "folder must hold checkpoints that omnibal wrote completely" in said["nothing"]
    assert re.search(r"rank 0, stage 0: .*_states.pt must hold data only, got builtins.getattr", said["objects"])
    assert re.search(r"rank 1, stage 1: checkpoint must be readable, got .*/b/.*getattr .*whole one is a", said["code"])
    assert not said["ran"]
    assert re.search(
        r"must be whole, got .*/b, where layer_.*-model_states.pt \(written by rank 1\) is not what was saved",
        said["damaged"],
    )
    assert re.search(
        r"where .*_optim_states.pt \(written by rank 1\) has 1000 bytes instead of \d{5,}", said["cut off"]
    )
    for key in ("damaged", "cut off"):
        assert said[key].endswith("; the newest whole one is a: name it to use it")
    assert said["went on"] == (1, True)
