"""Files of tensors are read as data: what they name is not run."""

import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from omnibal.errors import ConfigError
from omnibal.vlm.weights import check_data, load_data


class Payload:
    """Its unpickling would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Shell:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return __import__("os").system, (f"touch {self.path}",)


@pytest.mark.parametrize("payload", [Payload, Shell])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_does_not_run(tmp_path, payload, zipped):
    path, ran = tmp_path / "state.pt", tmp_path / "ran"
    torch.save({"weights": torch.ones(3), "more": [payload(ran)]}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ConfigError, match=r"state.pt must hold data only, got: .*(getattr|posix.system)"):
        load_data(path)
    if zipped:
        with pytest.raises(ConfigError, match=r"state.pt must hold data only, got .*(getattr|posix.system)"):
            check_data(path)
    assert not ran.exists()


def test_objects_are_made_of_classes_that_are_named(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"a": OwnState(3)}, path)
    with pytest.raises(
        ConfigError, match=r"got: .*OwnState.*; torch.serialization.add_safe_globals\(\[...\]\) names a"
    ):
        load_data(path)
    check_data(path, OwnState)
    assert load_data(path, OwnState)["a"].value == 3


class OwnState:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "content",
    [
        {"epoch": 1, "place": (2, None, "x", 1.5, True, b"raw"), "seen": {3}},
        OrderedDict(a=1),
        random.getstate(),
        np.random.default_rng(0).bit_generator.state,
        [np.int64(5), np.float32(1.5), np.bool_(True)],
    ],
)
def test_data_is_read_as_it_was(tmp_path, content):
    torch.save(content, tmp_path / "state.pt")
    check_data(tmp_path / "state.pt")
    assert load_data(tmp_path / "state.pt") == content


@pytest.mark.parametrize("kind", ["int64", "uint8", "float16", "float64", "bool", "U3"])
def test_arrays_are_data(tmp_path, kind):
    array = np.array([1, 0, 1]).astype(kind)
    torch.save({"array": array}, tmp_path / "state.pt")
    assert np.array_equal(load_data(tmp_path / "state.pt")["array"], array)
