"""Every placement of the encoder, against the simulators that it is made of, and against each other."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal.advise.models import Model
from omnibal.cluster import Cluster, Encoder, Layout, Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.errors import InfeasibleError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import zero_bubble
from omnibal.pipeline.simulate import simulate_step
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.planner.placements import (
    encoder_layers,
    place_pipeline,
    place_spread,
    place_units,
    split_profile,
)
from omnibal.profile.counted import analytic_profile

CLUSTER = Cluster.parse("8xA100-80GB")
RECORDS = Model.known("InternVL3-2B").records
PROFILE = analytic_profile(RECORDS, CLUSTER.device)
FROZEN = analytic_profile(RECORDS, CLUSTER.device, frozen=["vision"])
ONLY_PROJECTOR = analytic_profile(RECORDS, CLUSTER.device, frozen=["vision", "language"])


def request(cluster=CLUSTER):
    return PlanRequest(cluster=cluster, global_batch=64, schedule="auto")


def even(replicas, micro_batches, units=8, tokens=4000):
    pack = Load(units, tokens, tokens**2 / 2, 0)
    step = tuple(Load.stack([pack] * micro_batches) for _ in range(replicas))
    return Packing(PackLimits(units, tokens), micro_batches, 64.0, (step,), pack)


def spread(layout):
    return replace(layout, encoder=Encoder(0, layout.num_devices, 1, "spread"))


def test_a_profile_is_split_before_the_language_model():
    encoder, language = split_profile(PROFILE)
    assert len(encoder.layers) == encoder_layers(PROFILE)
    assert {layer.module for layer in language.layers} == {"language"} != {layer.module for layer in encoder.layers}
    # Gradients for a trained encoder or projector pass all of the LLM, though it is frozen.
    assert split_profile(ONLY_PROJECTOR)[1].frozen_front == 0
    assert split_profile(FROZEN)[0].frozen_front == len(encoder.layers) - 1  # the projector is trained
    whole = analytic_profile(RECORDS, CLUSTER.device, frozen=["vision", "projector"])
    assert split_profile(whole)[1].layers == whole.layers[len(encoder.layers) :]


@pytest.mark.parametrize("profile", [PROFILE, FROZEN, ONLY_PROJECTOR], ids=["trained", "frozen", "projector"])
def test_a_spread_encoder_before_one_stage_is_data_parallelism(profile):
    free = replace(CLUSTER, links=Links(np.inf))
    layout, packing = Layout(1, 8), even(8, 2)
    found = place_spread(profile, packing, spread(layout), request(free), "1f1b", "none")
    whole = simulate_step(
        profile, Partition((0, len(profile.layers))), packing.steps[0], Links(np.inf), recompute=found.recompute
    )
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)


def test_units_of_equal_replicas_are_the_pipeline_with_the_same_cut():
    layout = Layout(4, 2, encoder=Encoder(1, 2))
    units = place_units(PROFILE, even(2, 8), layout, request(), "1f1b")
    assert units.boundaries[1] == encoder_layers(PROFILE)
    pipeline = simulate_step(
        PROFILE, Partition(units.boundaries), even(2, 8).steps[0], CLUSTER.links_of(Layout(4, 2)),
        recompute=units.recompute, mode="overlap",
    )  # fmt: skip
    assert units.step_seconds == pytest.approx(pipeline.step_seconds, rel=1e-9)


def test_an_encoder_on_all_devices_works_faster_than_on_one_stage():
    heavy = even(2, 16, units=40, tokens=2000)
    found = place_spread(PROFILE, heavy, spread(Layout(4, 2)), request(), "1f1b", "full")
    alone = place_units(PROFILE, heavy, Layout(4, 2, encoder=Encoder(1, 2)), request(), "1f1b")
    assert found.step_seconds < 0.7 * alone.step_seconds
    assert len(found.boundaries) == 5 and len(found.recompute) == len(PROFILE.layers)


def test_an_encoder_that_keeps_its_activations_holds_more_and_takes_less():
    packing = even(4, 4, units=16)
    kept, again = (
        place_spread(PROFILE, packing, spread(Layout(2, 4)), request(), "1f1b", level) for level in ("none", "full")
    )
    assert kept.step_seconds < again.step_seconds and kept.peak_bytes > again.peak_bytes
    assert kept.recompute_seconds < again.recompute_seconds


def test_the_pipeline_is_what_the_planner_proposes():
    found = place_pipeline(PROFILE, even(2, 8), Layout(4, 2), request(), "zero-bubble")
    plan_step = simulate_step(
        PROFILE, Partition(found.boundaries), even(2, 8).steps[0], CLUSTER.links_of(Layout(4, 2)),
        recompute=found.recompute, schedule=zero_bubble(4, 8),
    )  # fmt: skip
    assert found.step_seconds == pytest.approx(plan_step.step_seconds)


def test_what_does_not_fit_says_what_is_missing():
    small = replace(CLUSTER, memory_bytes=6e9)
    for place, layout in (
        (place_pipeline, Layout(8, 1)),
        (place_units, Layout(8, 1, encoder=Encoder(1, 1))),
    ):
        with pytest.raises(InfeasibleError) as refusal:
            place(PROFILE, even(1, 8), layout, request(small), "1f1b")
        assert 0 < refusal.value.missing_bytes < 20e9
    with pytest.raises(InfeasibleError) as refusal:
        place_spread(PROFILE, even(1, 8, units=100), spread(Layout(8, 1)), request(small), "1f1b", "none")
    assert refusal.value.missing_bytes > 0
