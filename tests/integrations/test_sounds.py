"""Packs of models that hear: Qwen2-Audio, and Qwen2.5-Omni's thinker, which sees as well."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import Qwen2AudioForConditionalGeneration
from typer.testing import CliRunner

from omnibal.cli.main import app
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.demo import vocabulary, write_model_folder
from omnibal.errors import ConfigError, DataError
from omnibal.integrations.lengths import measured
from omnibal.packs.collator import PackCollator, PaddedCollator, arguments_of, positions_of
from omnibal.packs.loading import PackItems, PackSampler, PaddedSampler
from omnibal.packs.losses import loss_per_target
from tests.integrations.items import Collate, collated_backward, config_of, items_of
from tests.integrations.sounds import SOUND_MODELS, save_sound_folder, sound_item, sound_items_of_kinds
from tests.vlm.families import plain_family_model

OMNI = "qwen2_5_omni_thinker"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "data.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module", params=SOUND_MODELS)
def model(request):
    return plain_family_model(config_of(request.param))


def collator_of(model, lengths=None):
    collate = Collate(model.config.model_type)
    return PackCollator(collate, positions_of(model.config), lengths, arguments=arguments_of(model))


def test_packs_have_the_gradients_of_their_samples_alone_in_64_bits(model):
    """Sounds, sounds beside images, texts between; and a pack without any of them."""
    model.double()
    items = [
        {name: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for name, v in item.items()}
        for item in items_of(model.config.model_type)
    ]
    for chosen in ([0, 1, 2, 4, 7, 10], [1, 3, 6]):
        samples = [items[number] for number in chosen]
        expected_loss = collated_backward(model, samples, model.config.model_type)
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        pack = collator_of(model)(PackItems(tuple(chosen), tuple(samples)))
        labels = pack.pop("labels")
        loss = loss_per_target(model(**pack), labels)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected_loss, rtol=1e-6, atol=0)
        for name, gradient in expected.items():
            torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-6, atol=1e-9, msg=name)
        heard = [name for name in expected if "audio_tower" in name]
        assert bool(heard) == (0 in chosen)
        model.zero_grad()
    model.float()


def test_positions_are_those_of_transformers():
    model = plain_family_model(config_of(OMNI))
    collator = collator_of(model)
    for item in items_of(OMNI):
        batch = Collate(OMNI)([item])
        seconds = batch.get("feature_attention_mask")
        if item["pixel_values"] is None:  # transformers then counts a mask's ones alone
            expected = torch.arange(len(item["input_ids"])).expand(3, -1)
        else:
            expected = model.get_rope_index(
                item["input_ids"][None],
                image_grid_thw=item["image_grid_thw"],
                attention_mask=item["attention_mask"],
                audio_seqlens=None if seconds is None else seconds.sum(dim=1),
            )[0][:, 0].long()
        found = collator.positions(collator.sample(item))
        assert found[0].tolist() == list(range(len(item["input_ids"])))
        assert found[1:].tolist() == expected.tolist()


def test_sounds_are_counted_by_windows_alone_and_by_positions_beside_images(model):
    items = items_of(model.config.model_type)
    lengths = measured(collator_of(model), items)
    padded = PaddedCollator(Collate(model.config.model_type), arguments=arguments_of(model))
    if model.config.model_type == OMNI:
        assert lengths.sound_units.tolist() == [17, 0, 34, 0, 6, 11, 0, 25, 5, 0, 22]
        assert lengths.vision_units.tolist() == [16, 0, 0, 44, 24, 0, 0, 16, 0, 32, 0]
        assert lengths.kinds.tolist() == [5, 0, 4, 1, 5, 4, 0, 5, 4, 1, 4]
    else:
        assert lengths.vision_units.tolist() == [1, 0, 2, 0, 1, 1, 0, 1, 1, 0, 1]
        assert (lengths.sound_units, lengths.vision_unit) == (None, "windows")
    again = measured(padded, items)
    assert again.content_hash == lengths.content_hash
    assert again.vision_unit == lengths.vision_unit


def test_packs_without_a_sound_get_the_smallest_one_where_another_pack_hears():
    lengths = SampleLengths([4, 0, 0, 0, 0], [20, 20, 30, 21, 20], sound_units=[0, 9, 20, 5, 0])
    sampler = PackSampler(lengths, PackLimits(8, 30), num_replicas=5, rank=0)
    (packs,) = (sampler.packs_of_all_ranks(step) for step in range(sampler.num_steps))
    fillers = {tuple(pack): pack.fillers for pack in packs}
    assert fillers == {(0,): (1,), (1,): (0,), (2,): (0,), (3,): (0,), (4,): (0, 1)}
    loads = sampler.load(0)
    assert np.sort(loads.sound_units.ravel()).tolist() == [0, 0, 5, 9, 20]


def test_a_pack_that_should_hear_and_does_not_is_refused(model):
    kind = model.config.model_type
    items = items_of(kind)
    lengths = measured(collator_of(model), items)
    collator = collator_of(model, lengths)
    collator(PackItems((5,), (items[5],)))
    absorbing = PackCollator(
        Collate(kind), positions_of(model.config), lengths, absorb=True, arguments=arguments_of(model)
    )
    with (
        pytest.warns(UserWarning, match="sample 5 must have the planned"),
        pytest.raises(DataError, match=r"must have a sound among them, as planned, got none; .* this one's encoder"),
    ):
        absorbing(PackItems((5,), (items[1],)))


def test_limits_of_sound_are_refused_where_batches_are_padded():
    lengths = SampleLengths([0, 0], [20, 20], sound_units=[3, 4])
    with pytest.raises(ConfigError, match="limits of padded batches must have no sound_units, got 9"):
        PaddedSampler(lengths, PackLimits(1, 50, sound_units=9), num_replicas=1, rank=0)


def test_a_sound_without_its_mask_is_refused():
    model = plain_family_model(config_of(OMNI))
    (item,) = sound_items_of_kinds(["sound"])
    collator = collator_of(model)
    with pytest.raises(DataError, match="must give feature_attention_mask beside input_features"):
        collator.loads(collator.sample(item | {"feature_attention_mask": None}))


def test_a_sound_of_one_token_is_refused():
    """transformers takes a row without two neighbouring tokens of sound for one that is not expanded."""
    model = plain_family_model(config_of("qwen2_audio"))
    item = sound_item([5], [], 6, torch.Generator().manual_seed(1))
    collator = collator_of(model)
    with pytest.raises(DataError, match=r"sounds must have at least 7 frames \(0\.07 s\) for Qwen2-Audio, got 5"):
        collator.loads(collator.sample(item))


def test_the_documented_trainer_trains_on_annotations_with_sounds(tmp_path, monkeypatch, capsys):
    """docs/data.md, word by word."""
    write_model_folder(tmp_path / "demo", vocabulary())
    save_sound_folder("qwen2_audio", tmp_path / "model", tmp_path / "demo", weights=True)
    records = []
    for number, seconds in enumerate((0.3, 1.7, 0.9)):
        samples = 0.1 * np.random.default_rng(number).standard_normal(int(8_000 * seconds))
        soundfile.write(tmp_path / f"{number}.wav", samples, 8_000)
        records.append({"query": "<audio>\nWhat ?", "response": "a ball", "audio": f"{number}.wav"})
    records.append({"query": "What is this ?", "response": "a hat"})
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.chdir(tmp_path)
    lengths = CliRunner().invoke(app, ["lengths", "train.jsonl", "lengths", "--model", "model"])
    assert (lengths.exit_code, "windows" in lengths.output) == (0, True), lengths.output
    planned = CliRunner().invoke(app, ["profile", "model", "profile.json", "--cluster", "2xA100-80GB"])
    assert "must be one without sounds to be planned for" in planned.output.replace("\n", " ")
    (code,) = (block for block in BLOCK.findall(DOCUMENTED.read_text()) if "Qwen2Audio" in block)
    names = {}
    exec(code.replace("models/Qwen2-Audio-7B-Instruct", "model").replace('"out"', '"out", use_cpu=True'), names)
    assert names["trainer"].state.epoch == 3
    assert "4 samples in packs of at most" in capsys.readouterr().out
    weight = names["model"].model.audio_tower.layers[0].fc1.weight
    before = Qwen2AudioForConditionalGeneration.from_pretrained("model").model.audio_tower.layers[0].fc1.weight
    assert not torch.equal(weight, before)


def test_configurations_leave_those_of_other_models_alone():
    before = config_of("qwen3_vl").to_dict()
    config_of("qwen2_5_omni_thinker")
    assert config_of("qwen3_vl").to_dict() == before
