import pytest
import torch

from omnibal.engine.checkpoint import _layer_state
from omnibal.errors import ConfigError


def test_what_is_no_checkpoint_is_named(omnibal, tmp_path):
    result = omnibal("export", tmp_path, tmp_path / "model", exit_code=2)
    assert f"checkpoint must be a folder that omnibal wrote completely, got {tmp_path}" in result.stderr
    assert not (tmp_path / "model").exists()


def test_a_folder_whose_newest_checkpoint_is_gone_is_named(omnibal, tmp_path):
    (tmp_path / "latest").write_text("global_step7")
    result = omnibal("export", tmp_path, tmp_path / "model", exit_code=2)
    assert str(tmp_path / "global_step7") in result.stderr


def test_a_layers_file_that_is_not_whole_is_named(tmp_path):
    file = tmp_path / "layer_02-model_states.pt"
    torch.save({"weight": torch.ones(1000)}, file)
    whole = file.read_bytes()
    assert _layer_state(tmp_path, 2)["weight"].sum() == 1000
    for content in (b"", whole[:500], bytes(range(128, 256))):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"layer_02-model_states\.pt must be a whole file of a layer"):
            _layer_state(tmp_path, 2)
    torch.save([1, 2], file)
    with pytest.raises(ConfigError, match=r"must hold a layer.s weights by name, got list"):
        _layer_state(tmp_path, 2)
