"""Counted costs that are wrong are put right by timed passes, also where all packs are alike."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal.advise.models import Model, adapted_profile
from omnibal.advise.wait import phase_costs
from omnibal.cost import CostModel, Load
from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.profile.calibration import STEPS, WARM_UP, Calibration, TimedPass, calibrate, sizes_of
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import every_layer

DEVICE = Device.named("A100-80GB")
COUNTED = analytic_profile(Model.known("Qwen2.5-VL-7B").records, DEVICE)
LAYERS = len(COUNTED.layers)
FIRST_LANGUAGE = next(number for number, layer in enumerate(COUNTED.layers) if layer.module == "language")
PARTS = ((0, FIRST_LANGUAGE), (FIRST_LANGUAGE, LAYERS))
STAGES = ((0, FIRST_LANGUAGE + 4), (FIRST_LANGUAGE + 4, LAYERS))
FULL = every_layer("full", LAYERS)
NAMES = ("forward_seconds", "backward_seconds", "weight_seconds")


def wrong_by(vision, *, squared=1.0, language=1.6):
    """The costs that a device really has."""

    def scaled(layer):
        factor = language if layer.module == "language" else vision * language

        def of(cost):
            return replace(factor * cost, vision_squared=squared * factor * cost.vision_squared)

        times = {name: of(getattr(layer, name)) for name in NAMES}
        again = {level: of(cost) for level, cost in layer.recompute_seconds.items()}
        return replace(layer, **times, recompute_seconds=again)

    return replace(COUNTED, layers=tuple(map(scaled, COUNTED.layers)))


def packs_alike(rng):
    """Micro-batches of a balanced epoch: within a few percent of each other."""
    units, tokens = rng.normal(8000, 80, 60).round(), rng.normal(6000, 60, 60).round()
    return Load(units, tokens, tokens * rng.normal(900, 30, 60), units * rng.normal(2500, 60, 60))


def packs_unlike(rng):
    units, tokens = rng.integers(500, 16000, 60), rng.integers(500, 8000, 60)
    return Load(units, tokens, tokens * rng.integers(200, 2000, 60), units * rng.integers(300, 6000, 60))


def timed(truth, loads, parts, rng, noise=0.04):
    """Passes as a busy machine takes them: noisy, and one in twenty five times as long."""
    phases = phase_costs(truth, recompute="full")
    passes = []
    for load, sizes in zip(loads, sizes_of(loads), strict=True):
        for layers in parts:
            part = replace(truth, layers=truth.layers[slice(*layers)])
            own = phase_costs(part, recompute="full") if parts != PARTS else phases
            for is_backward in (False, True):
                wanted = "vision" if layers == PARTS[0] else "language"
                seconds = sum(
                    float(cost(load))
                    for phase, cost in own.items()
                    if phase.endswith("backward") == is_backward and (parts != PARTS or phase.startswith(wanted))
                )
                seconds *= rng.lognormal(0, noise) * (5 if rng.random() < 0.05 else 1)
                passes.append(TimedPass(layers, is_backward, sizes, seconds))
    return passes


def test_a_frozen_vit_beside_a_trained_encoder_of_sound_has_no_backward_pass():
    records = Model.known("Qwen2.5-Omni-7B").records
    counted = analytic_profile(records, DEVICE, frozen=["vision", "projector"])
    sizes = sizes_of(Load([8000], [6000], [6e6], sound_units=[1500]))[0]
    passes = [TimedPass((0, len(counted.layers)), backward, sizes, 2.0) for backward in (False, True)]
    found = calibrate(counted, passes, every_layer("none", len(counted.layers)), device="a device")
    costs = phase_costs(found.apply(counted))
    assert costs["vision backward"] == CostModel()
    whole = sum(float(cost(Load(*sizes))) for phase, cost in costs.items() if phase.endswith("backward"))
    assert whole == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("parts", [PARTS, STAGES], ids=["trainer", "pipeline"])
@pytest.mark.parametrize("packs", [packs_alike, packs_unlike])
@pytest.mark.parametrize("vision", [0.5, 2.0])
def test_a_guess_that_is_wrong_twofold_is_put_right(vision, packs, parts):
    rng = np.random.default_rng(3)
    truth, loads = wrong_by(vision), packs(rng)
    found = calibrate(COUNTED, timed(truth, loads, parts, rng), FULL, device="a device")
    assert found.counted_for == "A100-80GB"
    assert found.passes == 240
    assert found.error < 0.06
    assert found.vision / found.language == pytest.approx(vision, rel=0.05)
    corrected = found.apply(COUNTED)
    assert corrected.device == "a device"
    now, right = (phase_costs(profile, recompute="full") for profile in (corrected, truth))
    for phase, cost in right.items():
        seconds, expected = float(now[phase](loads).mean()), float(cost(loads).mean())
        assert seconds == pytest.approx(expected, rel=0.08), phase


def test_a_part_that_nobody_timed_follows_the_others():
    rng = np.random.default_rng(6)
    passes = [each for each in timed(wrong_by(1.0), packs_alike(rng), PARTS, rng) if not each.is_backward]
    found = calibrate(COUNTED, passes, FULL, device="x")
    assert found.factors["vision backward"] == pytest.approx(1.6, rel=0.1)
    assert calibrate(COUNTED, [each._replace(seconds=0.0) for each in passes], FULL, device="x") is None


def test_packs_of_texts_alone_say_of_the_vit_what_they_say_of_all():
    rng = np.random.default_rng(6)
    packs = packs_unlike(rng)
    texts = Load(np.zeros(len(packs.llm_tokens)), packs.llm_tokens, packs.llm_tokens_squared)
    found = calibrate(COUNTED, timed(wrong_by(1.0), texts, PARTS, rng), FULL, device="x")
    assert found.vision == pytest.approx(found.language, rel=0.2)


def test_a_calibration_is_read_back_for_the_same_model_only(tmp_path):
    rng = np.random.default_rng(7)
    found = calibrate(COUNTED, timed(wrong_by(2.0), packs_alike(rng), PARTS, rng), FULL, device="x")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + found.line(step=20) + '{"step": 21, "calibration": {"ver')
    assert Calibration.load(path) == found
    adapted = adapted_profile(Model.known("Qwen2.5-VL-7B").records, DEVICE, rank=4)
    assert found.apply(adapted).device == "x"  # the same layers, whatever is trained of them
    with pytest.raises(ConfigError, match="measured costs must be of the model's layers, got those of another model"):
        found.apply(analytic_profile(Model.known("Qwen2.5-VL-3B").records, DEVICE))
    with pytest.raises(ConfigError, match="costs must be counted for A100-80GB to be corrected, got H100-80GB"):
        found.apply(replace(COUNTED, device="H100-80GB"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\n', f"must hold measured costs, got none; a run writes them after {STEPS} steps"),
        ('{"calibration": {"version": 2}}\n', "calibration must have the key 'device', got none"),
        ('"calibration"\n', "must hold JSON lines with a calibration, got"),
    ],
)
def test_a_file_without_measured_costs_is_refused(tmp_path, text, message):
    assert WARM_UP < STEPS
    with pytest.raises(ConfigError, match=r"measured costs must be in a readable file, got .*none\.jsonl"):
        Calibration.load(tmp_path / "none.jsonl")
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Calibration.load(path)
