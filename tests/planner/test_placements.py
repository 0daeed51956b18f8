"""Every placement of the encoder, against the simulators that it is made of, and against each other."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal.advise.models import Model
from omnibal.cluster import Cluster, Encoder, Layout, Links
from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import one_f_one_b, zero_bubble
from omnibal.pipeline.simulate import simulate_step
from omnibal.pipeline.times import IMAGES, split_profile
from omnibal.plan import Plan
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.planner.search import placed_step, predict
from omnibal.planner.step_model import StepCosts
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LayerCost, ModelProfile

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


def placed(profile, packing, layout, asked, schedule, level="none"):
    return placed_step(StepCosts(profile, packing, layout, asked), schedule, level)


def spread(layout):
    return replace(layout, encoder=Encoder(0, layout.num_devices, 1, "spread"))


def test_a_profile_is_split_before_the_language_model():
    encoder, language = split_profile(PROFILE)
    assert len(encoder.layers) == encoder_layers(PROFILE.layers)
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
    found = placed(profile, packing, spread(layout), request(free), "1f1b", "none")
    whole = simulate_step(
        profile, Partition((0, len(profile.layers))), packing.steps[0], Links(np.inf), recompute=found.plan.recompute
    )
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)


def test_a_spread_encoder_without_work_leaves_the_llms_pipeline():
    idle = analytic_profile(RECORDS, CLUSTER.device, frozen=["vision", "projector"])
    text, layout = even(2, 8, units=0), Layout(4, 2)
    alone = placed(split_profile(idle)[1], text, layout, request(), "1f1b")
    found = placed(idle, text, spread(layout), request(), "1f1b", "none")
    border = encoder_layers(idle.layers)
    assert found.plan.partition.boundaries == (
        0,
        *(border + boundary for boundary in alone.plan.partition.boundaries[1:]),
    )
    assert found.plan.recompute[border:] == alone.plan.recompute
    # The numbers of tokens, which a pipeline passes on beside hidden states, are counted as features.
    assert found.step_seconds == pytest.approx(alone.step_seconds, rel=1e-5)


def test_units_of_equal_replicas_are_the_pipeline_with_the_same_cut():
    layout = Layout(4, 2, encoder=Encoder(1, 2))
    units = placed(PROFILE, even(2, 8), layout, request(), "1f1b")
    assert units.plan.partition.boundaries[1] == encoder_layers(PROFILE.layers)
    pipeline = simulate_step(
        PROFILE, units.plan.partition, even(2, 8).steps[0], CLUSTER.links_of(Layout(4, 2)),
        recompute=units.plan.recompute, mode="overlap",
    )  # fmt: skip
    assert units.step_seconds == pytest.approx(pipeline.step_seconds, rel=1e-9)


def test_an_encoder_on_all_devices_works_faster_than_on_one_stage():
    heavy = even(2, 16, units=40, tokens=2000)
    found = placed(PROFILE, heavy, spread(Layout(4, 2)), request(), "1f1b", "full")
    alone = placed(PROFILE, heavy, Layout(4, 2, encoder=Encoder(1, 2)), request(), "1f1b")
    assert found.step_seconds < 0.7 * alone.step_seconds
    assert len(found.plan.partition.boundaries) == 5 and len(found.plan.recompute) == len(PROFILE.layers)


def test_an_encoder_that_keeps_its_activations_holds_more_and_takes_less():
    packing = even(4, 4, units=16)
    kept, again = (
        placed(PROFILE, packing, spread(Layout(2, 4)), request(), "1f1b", level) for level in ("none", "full")
    )
    assert kept.step_seconds < again.step_seconds and kept.peak_bytes > again.peak_bytes
    assert kept.recompute_seconds < again.recompute_seconds


def test_the_pipeline_is_what_the_planner_proposes():
    found = placed(PROFILE, even(2, 8), Layout(4, 2), request(), "zero-bubble")
    plan_step = simulate_step(
        PROFILE, found.plan.partition, even(2, 8).steps[0], CLUSTER.links_of(Layout(4, 2)),
        recompute=found.plan.recompute, schedule=zero_bubble(4, 8),
    )  # fmt: skip
    assert found.step_seconds == pytest.approx(plan_step.step_seconds)


def test_what_does_not_fit_says_what_is_missing():
    small = replace(CLUSTER, memory_bytes=6e9)
    for layout in (Layout(8, 1), Layout(8, 1, encoder=Encoder(1, 1))):
        with pytest.raises(InfeasibleError) as refusal:
            placed(PROFILE, even(1, 8), layout, request(small), "1f1b")
        assert 0 < refusal.value.missing_bytes < 20e9
    with pytest.raises(InfeasibleError) as refusal:
        placed(PROFILE, even(1, 8, units=100), spread(Layout(8, 1)), request(small), "1f1b", "none")
    assert refusal.value.missing_bytes > 0


# A model whose step can be computed by hand: an encoder of a layer, an LLM of two, on 2 stages × 2 replicas with 3
# micro-batches of 2 images each. A link takes 2 bytes a second between stages, 4 between replicas.
HAND = Cluster(
    1, 4, CLUSTER.device, memory_bytes=10**6, overhead_bytes=7, links=Links(2, reduce_bandwidth_bytes_per_second=4)
)


def hand_layer(name, module, seconds, *, kept, output=None, gradient=0, trained=True):
    return LayerCost(
        name, "block", module=module, forward_seconds=seconds, backward_seconds=seconds,
        weight_seconds=seconds if trained else CostModel(), output_bytes=output or CostModel(),
        saved_bytes={"none": kept, "full": 0.1 * kept}, trainable=trained, parameter_bytes=32,
        gradient_bytes=gradient * trained, optimizer_bytes=4 * gradient * trained, optimizer_seconds=4.0 * trained,
    )  # fmt: skip


def by_hand(level, *, trained=True, cluster=HAND, steps=(2,)):
    """The step by hand, the encoder working a second forward on each image."""
    image, fixed = CostModel(vision_units=1), CostModel(fixed=3)
    layers = [
        hand_layer("vision", "vision", image, kept=1000 * image, output=4 * image, gradient=8, trained=trained),
        *(hand_layer(f"block.{i}", "language", fixed, kept=CostModel(fixed=50), gradient=4) for i in range(2)),
    ]
    profile = ModelProfile(tuple(layers), device="test", dtype="float32")
    loads = tuple((Load.stack([Load(units, 10)] * 3),) * 2 for units in steps)
    packing = Packing(PackLimits(max(steps), 10), 3, 6.0, loads, Load(max(steps), 10))
    layout = Layout(2, 2, precision="float32", encoder=Encoder(0, 4, 1, "spread"))
    asked = PlanRequest(cluster=cluster, global_batch=6, head_room=0.0)
    return profile, placed(profile, packing, layout, asked, "1f1b", level)


# LLM: (3 + 2 - 1) times 3 s forward and 6 s back, and half of an optimizer's 4 s. Weights (4 bytes at 4 a second) come
# while images are encoded, and gradients are summed while the encoder runs backward.
HAND_LLM = 4 * 9 + 2
# Encoder, 12 images on 4 devices: forward, both parts of the backward pass, the sum of gradients (8 bytes at 4 a
# second), a quarter of an optimizer's 4 s. Weights come while pixels are on their way.
HAND_ENCODER = 3 + 2 * 3 + 2 + 1
# Pixels and features of a replica's 6 images, 100 and 4 bytes each, of which a quarter stays, at 2 bytes a second.
HAND_PIXELS, HAND_FEATURES = 6 * 100 * 3 / 4 / 2, 6 * 4 * 3 / 4 / 2


@pytest.mark.parametrize(
    ("level", "trained", "seconds"),
    [
        ("none", True, HAND_LLM + HAND_ENCODER + HAND_PIXELS + 2 * HAND_FEATURES),
        ("full", True, HAND_LLM + HAND_ENCODER + 3 + HAND_PIXELS + 2 * HAND_FEATURES),  # three images forward once more
        # Forward only, and no gradient of a feature; the sum of the LLM's hides behind nothing.
        ("none", False, HAND_LLM + 1 + 3 + HAND_PIXELS + HAND_FEATURES),
    ],
)
def test_the_seconds_of_a_spread_step_by_hand(level, trained, seconds):
    _, found = by_hand(level, trained=trained)
    assert found.plan.partition.boundaries == (0, 2, 3)
    assert found.step_seconds == pytest.approx(seconds, rel=1e-9)
    assert found.recompute_seconds == pytest.approx(12 if level == "full" else 0, rel=1e-9)


@pytest.mark.parametrize(("level", "trained"), [("none", True), ("full", True), ("none", False)])
def test_the_memory_of_a_spread_step_by_hand(level, trained):
    profile, found = by_hand(level, trained=trained)
    # Weights, a gradient, a quarter of 32 bytes of state and of ZeRO's copy of the weights; pixels are taken to be as
    # large as what full recomputation keeps; three images are kept.
    state = 32 + (8 + (32 + 8) // 4) * trained
    kept = {"none": 3000, "full": 300}[level] * trained
    beside = state + kept + 300
    # Three micro-batches of 2 images, and gradients of theirs; the LLM's buffers hold two inputs of 5 bytes of them.
    features = (1 + trained) * 3 * 8 - 2 * 5
    language = split_profile(profile)[1]
    stages = Footprint(language, Load(2, 10), one_f_one_b(2, 3), Layout(2, 2, precision="float32"), 7).stages(
        Partition((0, 1, 2)), found.plan.recompute[1:]
    )
    first = beside + features + stages[0].total
    # Before and behind the pipeline a device holds the LLM's state, and what the encoder's passes take beside.
    transient = {"none": 1000, "full": 2700 + 1000}[level]
    second = beside + features + 32 + 4 + (16 + 4) // 2 + 7 + transient
    # As pixels are on their way, those of 6 images twice, to be sent, and the 3 that come.
    third = state + 32 + 4 + (16 + 4) // 2 + 7 + 2 * 600 + 300
    assert found.peak_bytes == max(first, second, third)


@pytest.mark.parametrize("profile", [PROFILE, FROZEN], ids=["trained", "frozen"])
def test_a_plan_of_a_spread_encoder_takes_and_holds_what_was_placed(profile, tmp_path):
    packing, layout = even(4, 4, units=16), spread(Layout(2, 4))
    found = placed(profile, packing, layout, request(), "zero-bubble", "none")
    plan = Plan(
        packing.limits, 4, found.plan.partition, found.plan.recompute, schedule="zero-bubble", layout=layout,
        cluster=CLUSTER,
    )  # fmt: skip
    plan = replace(plan, predicted=predict(profile, plan, packing))
    assert plan.predicted.step_seconds == pytest.approx(found.step_seconds, rel=1e-5)
    assert max(stage.memory.total for stage in plan.predicted.stages) == found.peak_bytes
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    # A mean micro-batch of a stage has its share of the step's images.
    step = plan.simulate(profile, packing.steps[0])
    busy = [4 * (stage.forward_seconds + stage.backward_seconds) for stage in plan.predicted.stages]
    assert busy == pytest.approx(step.replicas[0].busy_seconds, rel=0.02)
    images = [each.operation.name for each in step.replicas[0].events if each.micro_batch == IMAGES]
    assert images == ["F", "BW"] * 2  # the projector of a frozen ViT is trained
    assert step.replicas[0].bubble_ratio == pytest.approx(step.bubble_ratio)
    with pytest.raises(ConfigError, match="first stage of the partition must end in the language model"):
        replace(plan, partition=Partition((0, 3, len(profile.layers)))).simulate(profile, packing.steps[0])


def test_memory_of_a_spread_encoder_is_that_of_the_largest_step():
    small, large, both = (by_hand("none", steps=steps)[1].peak_bytes for steps in ((2,), (6,), (2, 6)))
    assert small < large == both


def test_a_spread_encoder_that_recomputes_needs_room_beside_the_llms_state():
    peak = by_hand("full")[1].peak_bytes
    assert by_hand("full", cluster=replace(HAND, memory_bytes=peak))[1].peak_bytes == peak
    with pytest.raises(InfeasibleError, match="the spread encoder must fit beside the LLM's state") as refusal:
        by_hand("full", cluster=replace(HAND, memory_bytes=peak - 5))
    assert refusal.value.missing_bytes == 5
