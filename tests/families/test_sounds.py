"""Layers of models that hear, as records: their parameters, and what their costs depend on."""

import pytest

from omnibal.advise.wait import phase_costs
from omnibal.cost import CostModel
from omnibal.device import Device
from omnibal.families import layer_records
from omnibal.families.base import vision_unit_of
from omnibal.integrations.trainer.steps import counted_profile
from omnibal.profile.counted import analytic_profile
from tests.integrations.sounds import SOUND_MODELS, sound_config
from tests.vlm.families import plain_family_model

DEVICE = Device.named("A100-80GB")


def numbers(parameters):
    return sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("model_type", SOUND_MODELS)
def test_parameters_are_those_of_transformers(model_type):
    model = plain_family_model(sound_config(model_type))
    records, tower = layer_records(model.config.to_dict()), model.model.audio_tower
    assert sum(record.sizes["parameters"] for record in records) == numbers(model.parameters())
    sound = [record for record in records if record.module == "sound"]
    assert sum(record.sizes["parameters"] for record in sound) == numbers(tower.parameters())
    # The forward pass leaves out the thinker's embeddings of brackets.
    unused = 0 if model_type == "qwen2_audio" else tower.audio_bos_eos_token.weight.numel()
    trained = numbers(p for p in model.parameters() if p.requires_grad) - unused
    assert sum(record.trainable_parameters(()) for record in records) == trained
    tower.requires_grad_(False)
    assert counted_profile(model, None).frozen_parts == tuple(sorted({record.kind for record in sound}))


@pytest.mark.parametrize("model_type", SOUND_MODELS)
def test_ties_are_transformers(model_type):
    for tied in (False, True):
        config = sound_config(model_type)
        config.tie_word_embeddings = tied
        model = plain_family_model(config)
        is_tied = model.lm_head.weight is model.get_input_embeddings().weight
        keys = {record.name for record in layer_records(config.to_dict()) if record.tied_key is not None}
        assert keys == ({"text_embedding", "head"} if is_tied else set())


def test_sounds_cost_by_windows_alone_and_by_positions_beside_images():
    alone, beside = (
        analytic_profile(layer_records(sound_config(model_type).to_dict()), DEVICE) for model_type in SOUND_MODELS
    )
    assert (vision_unit_of(alone.layers), vision_unit_of(beside.layers)) == ("windows", "patches")
    heard, of_both = phase_costs(alone)["sound forward"], phase_costs(beside)
    assert heard.vision_units > 0 == heard.sound_units
    assert of_both["sound forward"].vision_units == of_both["vision forward"].sound_units == 0
    # One position: four products with matrices of 16 x 16, two of 16 x 24, in two blocks; scores with ten positions.
    operations = 2 * (2 * (4 * 16 * 16 + 2 * 16 * 24) + 2.16 * 4 * 16 * 10)
    operations += 2 * (6 * 8 + 3 * 16) * 16 + 16 * 24  # both convolutions; the projector, for two positions at a time
    rate = DEVICE.flops_per_second * DEVICE.fraction
    # Elements of both sides of the products, two layer norms and two sums, the activation, attention.
    elements = 2 * (4 * (16 + 16) + 2 * (16 + 24) + 2 * (2 + 3) * 16 + 2 * 24 + 42 * 16)
    seconds = operations / rate + 2 * elements / DEVICE.memory_bytes_per_second
    assert of_both["sound forward"].sound_units == pytest.approx(seconds)


@pytest.mark.parametrize("frozen", [("sound",), ("vision", "projector")])
def test_encoders_end_their_backward_passes_each_by_itself(frozen):
    records = layer_records(sound_config("qwen2_5_omni_thinker").to_dict())
    costs = phase_costs(analytic_profile(records, DEVICE, frozen=frozen))
    assert [phase for phase, cost in costs.items() if cost == CostModel()] == [f"{frozen[0]} backward"]
