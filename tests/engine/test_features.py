"""Features cross cuts with their gradients, whoever makes and reads them, and over stages that train nothing."""

import pytest
import torch

from tests.engine.launch import launch
from tests.engine.small import Case, save_small_model

pytestmark = pytest.mark.distributed

PACKS = [[0, 1], [2], [4, 7], [3, 5, 6]]  # the third one has no image
VISION = ("patch_embedding", "vision_block")
WAYS = ((("none",), "1f1b"), (("full", "none", "selective"), "zero-bubble"))


@pytest.mark.parametrize("frozen", [(), VISION])
def test_gradients_do_not_depend_on_where_a_feature_is_cut(frozen, tmp_path):
    save_small_model(tmp_path)
    options = {"model": str(tmp_path), "frozen": frozen}
    whole, shallow = (Case((0, 10), [PACKS[:2], PACKS[2:]], deep=deep, **options) for deep in (True, False))
    cases = [
        Case((0, cut, 10), [PACKS], recompute=recompute, schedule=schedule, deep=True, **options)
        for number, cut in enumerate((2, 3, 4, 6, 7, 8))
        for recompute, schedule in [WAYS[(number + bool(frozen)) % 2]]
    ]
    by_rank = launch(2, "tests.engine.cases:one_step", [whole, shallow, *cases])
    (expected, *_), (without, *_), *found = zip(*by_rank, strict=True)
    assert without["loss"] != pytest.approx(expected["loss"], rel=1e-3), "the feature must matter"
    for case, results in zip(cases, found, strict=True):
        gradients = {name: gradient for result in results for name, gradient in result["gradients"].items()}
        assert gradients.keys() == expected["gradients"].keys()
        assert [result["loss"] for result in results] == pytest.approx([expected["loss"]] * 2, rel=1e-5)
        for name, gradient in gradients.items():
            near = {"rtol": 2e-4, "atol": 2e-6, "msg": f"{name} in {case}"}
            torch.testing.assert_close(gradient, expected["gradients"][name], **near)
