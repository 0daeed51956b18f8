"""omnibal check-packing says whether a folder's model packs, and through what it leaks."""

import json

import pytest

from tests.families import models


@pytest.mark.parametrize(("family", "kind"), [("qwen3_vl", None), ("lfm2_vl", "convolution")])
def test_a_folder_without_weights_is_checked(omnibal, tmp_path, family, kind):
    models.small_config(family).save_pretrained(tmp_path)
    result = omnibal("check-packing", tmp_path, "--json", exit_code=int(kind is not None))
    found = json.loads(result.stdout)
    assert {leak["kind"] for leak in found["leaks"]} == {kind} - {None}
    assert found["is_exact"] == (kind is None)


def test_wrong_arguments_are_refused(refusal, tmp_path):
    assert "folder must be" in refusal("check-packing", tmp_path)
    models.small_config("qwen3_vl").save_pretrained(tmp_path)
    line = refusal("check-packing", tmp_path, "--device", "cuda:99")
    assert line.startswith("device must be one that torch can use here, got 'cuda:99'")
