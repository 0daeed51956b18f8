import json
import warnings

import numpy as np
import pytest
import torch

from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES
from omnibal.families import layer_records
from omnibal.passes import MeasurementWarning
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from omnibal.vlm import load_model
from omnibal.vlm import measure as measure_module
from tests.cli.conftest import cluster_of
from tests.engine.small import small_config
from tests.families.models import SEEING
from tests.families.models import small_config as families_config
from tests.pipeline.profiles import fixed_profile

KINDS = ["patch_embedding", "vision_block", "projector", "text_embedding", "decoder_block", "final_norm", "head"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small_config().save_pretrained(folder)
    return folder


def test_costs_are_counted_for_a_device_that_is_not_there(omnibal, model, tmp_path):
    out = tmp_path / "new" / "profile.json"
    record = json.loads(omnibal("profile", model, out, "--cluster", "a100", "--json").stdout)
    expected = analytic_profile(load_model(model).records, DEVICES["A100-80GB"])
    assert ModelProfile.load(out) == expected
    assert record["hash"] == expected.content_hash
    assert (record["device"], record["dtype"]) == ("A100-80GB", "bfloat16")
    assert [row["kind"] for row in record["kinds"]] == KINDS
    assert [row["layers"] for row in record["kinds"]] == [1, 3, 1, 1, 2, 1, 1]
    assert sum(row["share"] for row in record["kinds"]) == pytest.approx(1)
    pack = Load(2304 // 4, 4096, 4096**2)
    assert [row["forward_seconds"] for row in record["kinds"]][1] == expected.layers[1].forward_seconds(pack)
    assert record["pack"] == {"vision units": 2304 // 4, "LLM tokens": 4096}


@pytest.mark.parametrize("model_type", SEEING)
def test_costs_of_every_family_are_counted(omnibal, model_type, tmp_path):
    config = families_config(model_type)
    config.save_pretrained(tmp_path)
    omnibal("profile", tmp_path, tmp_path / "p.json", "--cluster", "a100")
    profile = ModelProfile.load(tmp_path / "p.json")
    assert [layer.name for layer in profile.layers] == [record.name for record in layer_records(config.to_dict())]
    assert all(layer.forward_seconds(Load(64, 99, 99**2, 64**2)) > 0 for layer in profile.layers)


@pytest.mark.parametrize(
    ("model_type", "units"), [("internvl", 2304 // 4), ("llava", 2304 // 9), ("qwen2_vl", 4 * 2304)]
)
def test_a_pack_of_the_usual_size_is_shown(omnibal, model_type, units, tmp_path):
    """Of 4096 tokens, 2304 are images': 9 tiles of 256 tokens, or what a family has in their place."""
    families_config(model_type).save_pretrained(tmp_path)
    record = json.loads(omnibal("profile", tmp_path, tmp_path / "p.json", "--cluster", "a100", "--json").stdout)
    assert record["pack"] == {"vision units": units, "LLM tokens": 4096}
    block = next(layer for layer in ModelProfile.load(tmp_path / "p.json").layers if layer.kind == "vision_block")
    shown = next(row for row in record["kinds"] if row["kind"] == "vision_block")
    assert shown["forward_seconds"] == block.forward_seconds(Load(units, 4096, 4096**2, units**2))


def test_the_table_has_a_row_for_each_kind(omnibal, model, tmp_path):
    text = omnibal(
        "profile", model, tmp_path / "p.json", "--cluster", "H100", "--limits", "3,99",
    ).stdout  # fmt: skip
    assert "H100-80GB (bfloat16), a pack of 3 tiles and 99 LLM tokens" in text
    assert all(kind[:11] in text for kind in KINDS)


def test_costs_are_measured_here(omnibal, model, tmp_path):
    options = ("--measure", "--limits", "2,24")
    record = json.loads(omnibal("profile", model, tmp_path / "p.json", *options, "--json").stdout)
    profile = ModelProfile.load(tmp_path / "p.json")
    profile.check_matches(records=load_model(model).records, dtype="bfloat16")
    assert "torch" in profile.versions
    assert [row["kind"] for row in record["kinds"]] == KINDS
    assert all(row["forward_seconds"] > 0 for row in record["kinds"])
    assert isinstance(record["warnings"], list)


def test_doubtful_measurements_are_said(omnibal, model, tmp_path, monkeypatch):
    def doubtful(*arguments, **options):
        warnings.warn("repeated passes differ by 40%", MeasurementWarning, stacklevel=2)
        return fixed_profile(np.ones(3))

    monkeypatch.setattr(measure_module, "measure_profile", doubtful)
    text = omnibal("profile", model, tmp_path / "p.json", "--measure").stdout
    assert "warning: repeated passes differ by 40%" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "costs must be counted for a --cluster or come from --measure, got neither"),
        (("--cluster", "a100", "--measure"), "for a --cluster or come from --measure, got both"),
        (("--cluster", "tpu"), "device must begin like one of A100-40GB, A100-80GB, H100-80GB,"),
        (("--cluster", cluster_of(1)), "flops_per_second"),
    ],
)
def test_wrong_options_are_refused(omnibal, model, tmp_path, options, message):
    result = omnibal("profile", model, tmp_path / "p.json", *options, exit_code=2)
    assert message in result.stderr
    assert not (tmp_path / "p.json").exists()


def test_a_place_that_cannot_be_written_is_named(omnibal, model, tmp_path):
    result = omnibal("profile", model, tmp_path, "--cluster", "a100", exit_code=2)
    assert f"out must be a file, got the folder {tmp_path}" in result.stderr
    result = omnibal("profile", model, "/proc/none/profile.json", "--cluster", "a100", exit_code=2)
    assert "/proc/none must be a path to read or write, got: No such file or directory" in result.stderr


def test_a_wrong_model_is_named(omnibal, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "internvl", "vision_config": {"hidden_size": -1}}')
    result = omnibal("profile", tmp_path, tmp_path / "p.json", "--cluster", "a100", exit_code=2)
    assert f"{tmp_path / 'config.json'}: hidden_size must be at least 1, got -1" in result.stderr


def test_a_folder_without_a_model_is_refused(omnibal, tmp_path):
    result = omnibal("profile", tmp_path, tmp_path / "p.json", "--cluster", "a100", exit_code=2)
    assert "source must be a ds_config or a Hugging Face model folder, got" in result.stderr


def test_a_ds_config_says_model_device_precision_and_frozen_layers(omnibal, ds_config, tmp_path):
    frozen = {"frozen": ["vision_block"]}
    config = ds_config(model=frozen, pipeline={"num_tensor": 2}, cluster="2x8xh100")
    text = omnibal("profile", config).stdout
    assert "2 x H100-80GB (float32), a pack of" in text and text.count("(frozen)") == 1
    config = ds_config(deepspeed={"bf16": {"enabled": True}}, model=frozen, cluster="2x8xh100")
    record = json.loads(omnibal("profile", config, "--json").stdout)
    assert record["profile"] == str(tmp_path / "run" / "profile.json")
    made = ModelProfile.load(tmp_path / "run" / "profile.json")
    assert (made.device, made.dtype, made.frozen_parts) == ("H100-80GB", "bfloat16", ("vision_block",))


def test_a_ds_configs_layers_are_measured_at_its_limits(omnibal, ds_config, tmp_path, monkeypatch):
    seen = []

    def measure(model, limits, **options):
        degree = options["num_tensor"]
        seen.append((limits, options["dtype"], options["frozen"], degree))
        return analytic_profile(model.records, DEVICES["A100-80GB"], dtype="float32", tensor_parallel=degree)

    monkeypatch.setattr(measure_module, "measure_profile", measure)
    omnibal("profile", ds_config(), "--measure")
    omnibal("profile", ds_config(), "--measure", "--limits", "3,99")
    omnibal("profile", ds_config(pipeline={"num_tensor": 2}), "--measure")
    limits = PackLimits(12, 256)
    assert seen == [
        (most, torch.float32, [], degree) for most, degree in ((limits, 1), (PackLimits(3, 99), 1), (limits, 2))
    ]
    assert ModelProfile.load(tmp_path / "run" / "profile.json").num_tensor == 2
