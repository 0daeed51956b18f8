"""What DeepSpeed holds under each optimizer, against what a plan counts on."""

import pytest

from omnibal.cluster import Layout
from omnibal.device import DEVICES
from omnibal.memory.footprint import TrainingState
from omnibal.profile.counted import analytic_profile
from omnibal.vlm import load_model
from tests.engine.launch import launch
from tests.engine.small import Case, save_small_model

pytestmark = pytest.mark.distributed

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
BF16 = {"bf16": {"enabled": True}}
WITHOUT_SUMS = BF16 | {"data_types": {"grad_accum_dtype": "bf16"}}
MODES = [  # dtype, ZeRO stage, float32 sums, ds_config
    ("float32", 0, False, {}),
    ("float32", 1, False, {}),
    ("bfloat16", 0, False, BF16),
    ("bfloat16", 1, False, WITHOUT_SUMS),
    ("bfloat16", 1, None, BF16),
]
SHAPES = [  # boundaries, packs of each replica
    ((0, 4, 10), [[[0, 1], [2]]]),
    ((0, 10), [[[0, 1], [2]], [[3], [4, 5]]]),
]


def test_state_and_update_are_as_predicted(tmp_path):
    save_small_model(tmp_path)
    records = load_model(tmp_path).records
    cases = [
        Case(boundaries, packs, model=str(tmp_path), recompute=("full",), zero_stage=zero_stage, extra=ADAM | extra)
        for boundaries, packs in SHAPES
        for _, zero_stage, _, extra in MODES
    ]
    results = launch(2, "tests.engine.states:held_and_updated", cases)
    expected = [(len(packs), boundaries, mode) for boundaries, packs in SHAPES for mode in MODES]
    for rank in results:
        for found, (num_replicas, boundaries, (dtype, zero_stage, sums, _)) in zip(rank, expected, strict=True):
            layout = Layout(num_replicas=num_replicas, zero_stage=zero_stage, precision=dtype, accumulate_float32=sums)
            state = TrainingState(analytic_profile(records, DEVICES["A100-80GB"], dtype=dtype), layout)
            stage = tuple(boundaries[found["stage"] : found["stage"] + 2])
            case = (dtype, zero_stage, sums, num_replicas)
            gone = state.parameters[stage]  # between steps, the parameters' own gradients: they are all trained
            between = state.whole[stage] - gone
            assert found["held"] == pytest.approx(between, rel=0.01), case
            peak, update = max(found["update_peaks"]), state.update[stage]
            if (dtype, zero_stage, num_replicas) == ("float32", 0, 1):  # no gradient is on its way; AdamW's temporaries
                assert peak < state.whole[stage] + 0.5 * update, case
            elif num_replicas > 1:  # gradients leave from where they are, if they are not as small as here
                assert state.whole[stage] < peak < 1.05 * (state.whole[stage] + update), case
            else:
                assert peak == pytest.approx(state.whole[stage] + update, rel=0.05), case
            assert found["peak"] >= max(found["update_peaks"]) * 0.99, case
