"""Predicted bytes against those of real layers: whole stages of a tiny model, at every level and mixed."""

from functools import cache, partial
from itertools import cycle, islice

import pytest
import torch

from omnibal.cluster import Layout
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES
from omnibal.loss import targets_of
from omnibal.memory.footprint import Footprint
from omnibal.passes import kept_bytes
from omnibal.pipeline.schedule import one_f_one_b
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LEVELS
from omnibal.vlm import load_model
from omnibal.vlm.measure import measure_profile
from omnibal.vlm.payload import Payload, run_layer
from tests.families.models import small_config
from tests.vlm.families import family_samples, layers_of, pack_of, plain_family_model
from tests.vlm.models import build_layers, make_pack, make_sample, tiny_config

LIMITS = PackLimits(6, 60)
SAMPLES = [make_sample(1, tiles=(2, 1)), make_sample(2, question=9), make_sample(3, tiles=(1,), question=7)]


@cache
def measured():
    model = load_model(tiny_config())
    return model, measure_profile(model, LIMITS)


def load_of(pack):
    lengths = pack["cu_seq_lens"].diff()
    targets = len(targets_of(pack["labels"])["targets"])
    return Load(len(pack["pixel_values"]), int(lengths.sum()), int((lengths.long() ** 2).sum()), target_tokens=targets)


def run_stage(layers, levels, payload):
    for layer, level in zip(layers, levels, strict=True):
        payload = run_layer(layer, payload, level)
    return payload.hidden


@pytest.mark.parametrize("stop", [3, 5, 8, 12])
def test_features_that_pass_recomputed_layers_are_kept_once(stop):
    config = small_config("qwen3_vl")
    model = load_model(config)
    profile = analytic_profile(model.records, DEVICES["H100-80GB"], dtype="float32")
    assert [record.kind for record in model.records[:stop]].count("deepstack_block") > 0
    layers = layers_of(model, plain_family_model(config).state_dict())
    pack = pack_of(model, family_samples("qwen3_vl"))
    payload = Payload.of_pack(pack).with_integers(targets_of(pack["labels"]))
    with torch.no_grad():  # tables of positions are made once for a pack, and kept with it
        run_stage(layers, ["none"] * len(layers), payload)
    free = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    free += payload.integers.values()
    found = kept_bytes(partial(run_stage, layers[:stop], ["full"] * stop, payload), free=free)
    footprint = Footprint(profile, load_of(pack), one_f_one_b(1, 1), Layout(precision="float32"))
    predicted = footprint.kept_bytes[:stop, LEVELS.index("full")].sum()
    assert predicted == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("mix", [*LEVELS, "mixed"])
@pytest.mark.parametrize("stage", [(0, 2), (1, 5), (2, 6), (5, 7), (4, 9), (0, 9)])
def test_kept_bytes_of_a_stage_are_predicted_within_a_per_cent(stage, mix):
    model, profile = measured()
    a, b = stage
    pack = make_pack(SAMPLES)
    footprint = Footprint(profile, load_of(pack), one_f_one_b(1, 1), Layout(precision="float32"))
    levels = list(islice(cycle(LEVELS if mix == "mixed" else [mix]), b - a))
    layers = build_layers(model)
    payload = Payload.of_pack(pack).with_integers(targets_of(pack["labels"]))
    for layer in layers[:a]:
        payload = layer(payload)
    payload = payload.replace(hidden=payload.hidden.detach().requires_grad_(a > 0))
    free = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    found = kept_bytes(partial(run_stage, layers[a:b], levels, payload), free=[*free, *payload.integers.values()])
    predicted = footprint.kept_bytes[range(a, b), [LEVELS.index(level) for level in levels]].sum()
    assert predicted == pytest.approx(found, rel=0.01)
