import json
from dataclasses import replace

import pytest

from omnibal.cost import CostModel
from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord
from omnibal.profile.records import ModelProfile
from tests.pipeline.profiles import layer, profile


@pytest.fixture
def small():
    vision = [
        layer(f"vision_block.{i}", kind="vision_block", module="vision", output=8.0, sizes={"hidden": 4})
        for i in range(2)
    ]
    frozen = layer("projector", kind="projector", module="projector", weight=0.0, trainable=False, spread=0.03)
    ends = [layer("text_embedding", tied_key="embedding"), layer("head", tied_key="embedding", parameter_bytes=12)]
    return profile([*vision, frozen, *ends])


def test_a_profile_survives_saving(small, tmp_path):
    small.save(tmp_path / "profile.json")
    loaded = ModelProfile.load(tmp_path / "profile.json")
    assert loaded == small
    assert loaded.content_hash == small.content_hash


def test_equal_neighbours_are_written_once(small, tmp_path):
    small.save(tmp_path / "profile.json")
    groups = json.loads((tmp_path / "profile.json").read_text())["layers"]
    names = [["vision_block.0", "vision_block.1"], ["projector"], ["text_embedding"], ["head"]]
    assert [group["names"] for group in groups] == names


def test_recompute_costs_another_forward_pass_unless_said_otherwise():
    saved = {level: CostModel() for level in ("none", "selective", "full")}
    cost = layer(forward=3.0, saved_bytes=saved, recompute_seconds={"selective": CostModel(fixed=1)})
    assert {level: model.fixed for level, model in cost.recompute_seconds.items()} == {
        "none": 0.0, "selective": 1.0, "full": 3.0,
    }  # fmt: skip


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(version=0), "must be of version 7, got 0; make it again"),
        (lambda c: c.update(device="other"), "must have the hash [0-9a-f]{16} it was saved with"),
        (
            lambda c: c["layers"][0]["forward_seconds"].update(fixed=-1.0),
            r"profile.layers.0.forward_seconds: .*fixed must be finite and not negative, got -1",
        ),
        (
            lambda c: c["layers"][0]["saved_bytes"]["none"].update(fixed=float("nan")),
            r"profile.layers.0.saved_bytes.none: .* got nan",
        ),
        (lambda c: c["layers"][1].update(spread=float("inf")), "spread of layer projector must be finite"),
        (lambda c: c["layers"][0]["forward_seconds"].update(tokens=1), "tokens must be a known key.*'llm_tokens'"),
        (lambda c: c["layers"][0].pop("kind"), "must have the key 'kind'"),
        (lambda c: c["layers"][0]["saved_bytes"].pop("full"), "must have the level 'full', got none"),
        (lambda c: c.update(layers=[]), "must have a layer"),
        (lambda c: c.update(tensor_parallel={"vision": 0, "language": 1}), "tensor_parallel must be positive, got"),
        (lambda c: c.update(layers=3), "profile.layers must be a valid array, got 3"),
        (lambda c: c["layers"][0].update(parameter_bytes=1.5), "parameter_bytes must be a valid integer, got 1.5"),
        (lambda c: c.update(divice="other"), "profile.divice must be a known key, got 'divice'; did you mean 'device'"),
    ],
)
def test_a_damaged_file_is_refused(small, tmp_path, edit, message):
    path = tmp_path / "profile.json"
    small.save(path)
    change(path, edit)
    with pytest.raises(ConfigError, match=message) as error:
        ModelProfile.load(path)
    assert str(path) in str(error.value)


def test_a_file_has_a_degree_for_each_module(small, tmp_path):
    path = tmp_path / "profile.json"
    shared = replace(small, tensor_parallel=2)
    shared.save(path)
    written = json.loads(path.read_text())
    assert (written["version"], written["tensor_parallel"]) == (7, {"vision": 2, "language": 2})
    path.write_text(json.dumps({**written, "hash": "4df6b6f9b8d7a2c1"}))
    with pytest.raises(ConfigError, match="hash 4df6b6f9b8d7a2c1 it was saved with, got changed content"):
        ModelProfile.load(path)
    apart = replace(small, tensor_parallel={"vision": 1, "language": 4})
    apart.save(path)
    assert ModelProfile.load(path) == apart != shared
    with pytest.raises(ConfigError, match=r"must be one number for vision and language here, got {'vision': 1, "):
        _ = apart.num_tensor
    with pytest.raises(ConfigError, match=r"tensor_parallel {'vision': 1, 'language': 4} where the run has 2"):
        apart.check_matches(tensor_parallel=2)
    apart.check_matches(tensor_parallel={"language": 4, "vision": 1})


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="profile must be a readable file"):
        ModelProfile.load(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"profile must be JSON, got .*broken.json, line 1"):
        ModelProfile.load(tmp_path / "broken.json")


def test_every_change_changes_the_hash(small):
    changed = [
        replace(small, device="b"),
        replace(small, dtype="b"),
        replace(small, tensor_parallel=2),
        replace(small, versions={}),
        replace(small, layers=small.layers[1:]),
        replace(small, layers=(replace(small.layers[0], optimizer_bytes=1), *small.layers[1:])),
    ]
    assert len({small.content_hash, *(other.content_hash for other in changed)}) == 7


def test_a_model_that_costs_nothing_is_refused_single_zeros_are_not():
    nothing = layer("a", forward=0.0)
    with pytest.raises(ConfigError, match="must cost some time"):
        profile([nothing])
    profile([nothing, layer("b")])


def test_names_must_differ():
    with pytest.raises(ConfigError, match="different names, got 'a' twice"):
        profile([layer("a"), layer("b"), layer("a")])


@pytest.mark.parametrize("value", [-1, float("nan")])
def test_impossible_numbers_are_refused(value):
    with pytest.raises(ConfigError, match=r"optimizer_bytes of layer block.0 must be finite and not negative"):
        layer(optimizer_bytes=value)


def test_recompute_levels_need_their_bytes():
    with pytest.raises(ConfigError, match="must have levels of saved_bytes, got 'half'"):
        layer(recompute_seconds={"half": CostModel()})


RECORDS = (
    LayerRecord("vision_block.0", "vision_block", {"hidden": 4}, module="vision"),
    LayerRecord("vision_block.1", "vision_block", {"hidden": 4}, module="vision"),
    LayerRecord("projector", "projector", {}, module="projector"),
    LayerRecord("text_embedding", "block", {}, tied_key="embedding", module="language"),
    LayerRecord("head", "block", {}, tied_key="embedding", module="language"),
)


def test_a_fitting_profile_is_accepted(small):
    small.check_matches(records=RECORDS, device="test", dtype="float32", versions={"torch": "1.0", "other": "2"})
    small.check_matches()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"device": "H100"}, "device 'test' where the run has 'H100'"),
        ({"dtype": "bfloat16"}, "dtype 'float32' where the run has 'bfloat16'"),
        ({"tensor_parallel": 2}, "tensor_parallel 1 where the run has 2"),
        ({"versions": {"torch": "2.0"}}, "version of torch '1.0' where the run has '2.0'"),
        ({"device": "a", "dtype": "b"}, "device .*; dtype .*; make the profile again"),
        ({"records": RECORDS[1:]}, "5 layers where the model has 4"),
        ({"records": (RECORDS[1], *RECORDS[1:])}, "layer 'vision_block.0' where the run has 'vision_block.1'"),
        ({"records": (replace(RECORDS[0], sizes={"hidden": 8}), *RECORDS[1:])}, "sizes of vision_block.0 .*8"),
        ({"records": (replace(RECORDS[0], kind="x"), *RECORDS[1:])}, "kind of vision_block.0 'vision_block' .*'x'"),
        (
            {"records": (*RECORDS[:2], replace(RECORDS[2], module="vision"), *RECORDS[3:])},
            "module of projector 'projector' where the run has 'vision'",
        ),
        ({"records": (*RECORDS[:4], replace(RECORDS[4], tied_key=None))}, "tied_key of head 'embedding' .* None"),
    ],
)
def test_a_foreign_profile_is_refused_with_what_differs(small, run, message):
    with pytest.raises(ConfigError, match=message):
        small.check_matches(**run)
