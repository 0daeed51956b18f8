"""The packed pipeline computes what plain transformers computes, whatever the cut."""

import pytest
import torch

from tests.engine.launch import launch
from tests.engine.small import Case, plain_gradients, save_small_model, small_samples

pytestmark = pytest.mark.distributed

# Two-image samples, text-only samples, a pack without an image, an empty pack, packs of one sample.
ONE_REPLICA = [[[0, 1], [2], [4, 7], [3, 5, 6]]]
TWO_REPLICAS = [[[0, 1], [4, 7]], [[3, 5, 6], [2]]]
WITH_EMPTY = [[[0, 1, 2, 3, 4], [5, 6, 7], []]]
CUTS = {
    1: [((0, 10), ONE_REPLICA), ((0, 10), WITH_EMPTY)],
    2: [((0, 4, 10), ONE_REPLICA), ((0, 7, 10), WITH_EMPTY), ((0, 10), TWO_REPLICAS)],
    3: [((0, 2, 5, 10), ONE_REPLICA), ((0, 5, 6, 10), WITH_EMPTY)],
    4: [((0, 1, 4, 6, 10), ONE_REPLICA), ((0, 6, 10), TWO_REPLICAS), ((0, 3, 10), TWO_REPLICAS)],
}
# What keeps a part of each gradient on every replica, and how exact its gradients are.
KEPT_IN_PARTS = [
    ({"zero_stage": 1}, {"rtol": 2e-4, "atol": 2e-6}),
    ({"zero_stage": 1, "extra": {"bf16": {"enabled": True}}}, {"rtol": 0.1, "atol": 0.01}),
    ({"zero_stage": 1, "extra": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}},
     {"rtol": 0.1, "atol": 0.01}),
]  # fmt: skip
MIXED = ("full", "none", "selective")
WAYS = [(("none",), "1f1b"), (MIXED, "1f1b"), (MIXED, "zero-bubble")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder, loss and gradients of plain transformers, for an untied and a tied model."""
    found = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp(f"tied{tied}")
        save_small_model(folder, tied=tied)
        found[tied] = (str(folder), *plain_gradients(folder, small_samples()))
    return found


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_one_step_equals_plain_transformers(num_processes, models):
    cases = [
        (Case(boundaries, packs, folder, recompute, schedule=schedule), tied, {"rtol": 2e-4, "atol": 2e-6})
        for boundaries, packs in CUTS[num_processes]
        for tied, (folder, _, _) in models.items()
        for recompute, schedule in WAYS
    ]
    if num_processes == 2:
        cases += [(Case((0, 10), TWO_REPLICAS, models[False][0], **kept), False, near) for kept, near in KEPT_IN_PARTS]
    by_rank = launch(num_processes, "tests.engine.cases:one_step", [case for case, _, _ in cases])
    for number, (case, tied, near) in enumerate(cases):
        _, loss, gradients = models[tied]
        results = [result[number] for result in by_rank]
        assert {result["samples"] for result in results} == {8}
        assert [result["loss"] for result in results] == pytest.approx([loss] * num_processes, rel=near["rtol"] / 20)
        assert set().union(*(result["gradients"] for result in results)) == set(gradients)
        for result in results:
            for name, gradient in result["gradients"].items():
                torch.testing.assert_close(gradient, gradients[name], **near, msg=f"{name} differs in {case}")
