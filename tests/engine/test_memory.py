"""What DeepSpeed holds under each optimizer, against what a plan counts on."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal.cluster import Encoder, Layout
from omnibal.cost import Load
from omnibal.device import DEVICES
from omnibal.memory.footprint import TrainingState
from omnibal.profile.counted import analytic_profile
from omnibal.vlm import load_model
from tests.engine.cases import run_of
from tests.engine.launch import launch
from tests.engine.small import Case, save_small_model, small_samples

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


BIG = [3] * 8 + [2] * 4  # samples of three tiles
SPREAD = [  # boundaries, packs, ds_config, what is frozen
    ((0, 7, 10), [[BIG, BIG]], {}, ()),
    ((0, 10), [[BIG, BIG], [BIG, BIG]], BF16, ()),
    ((0, 10), [[BIG, BIG], [BIG, BIG]], {}, ("vision",)),
]


def check_spread(results, cases, records):
    """State, and peaks where the encoder keeps what it needs or recomputes it."""
    samples = [small_samples()[number] for number in BIG]
    tokens = np.array([len(sample["input_ids"]) for sample in samples])
    load = Load(sum(len(sample["pixel_values"]) for sample in samples), tokens.sum(), (tokens**2).sum())
    for rank in results:
        peaks, predicted = [], []
        for found, case in zip(rank, cases, strict=True):
            resolved, plan = run_of(case, num_replicas=len(case.packs))
            precision, frozen = resolved.layout.precision, list(case.frozen)
            profile = analytic_profile(records, DEVICES["A100-80GB"], dtype=precision, frozen=frozen)
            plan = replace(plan, recompute=profile.levels_like(plan.recompute))
            memory = plan.memory(profile, load)[found["stage"]]
            # Between steps the parameters' own gradients are gone, but not the float32 sums, twice as large.
            sums = memory.gradients * 2 / 3 if precision == "bfloat16" else 0
            assert found["held"] == pytest.approx(memory.parameters + memory.optimizer + sums, rel=0.01), case
            peaks.append(found["peak"])
            predicted.append(memory.total - memory.overhead)
            assert 0.97 * found["peak"] < predicted[-1] < 1.25 * found["peak"], case
        for kept in range(0, 4, 2):  # what the encoder's level decides
            assert predicted[kept] - predicted[kept + 1] == pytest.approx(peaks[kept] - peaks[kept + 1], rel=0.1)


def test_state_and_update_are_as_predicted(tmp_path):
    save_small_model(tmp_path)
    records = load_model(tmp_path).records
    spread = [
        Case(
            boundaries, packs, str(tmp_path), (level,) * 5 + ("full",) * 5, zero_stage=1, extra=ADAM | extra,
            frozen=frozen, encoder=Encoder.on_all(2),
        )
        for boundaries, packs, extra, frozen in SPREAD
        for level in (("none",) if frozen else ("none", "full"))
    ]  # fmt: skip
    cases = [
        Case(boundaries, packs, model=str(tmp_path), recompute=("full",), zero_stage=zero_stage, extra=ADAM | extra)
        for boundaries, packs in SHAPES
        for _, zero_stage, _, extra in MODES
    ]
    found = launch(2, "tests.engine.states:held_and_updated", cases + spread)
    results = [rank[: len(cases)] for rank in found]
    check_spread([rank[len(cases) :] for rank in found], spread, records)
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
