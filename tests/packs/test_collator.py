import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface

from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError, DataError
from omnibal.integrations.lengths import samples_to_check
from omnibal.packs.collator import FAMILIES, PackCollator, PaddedCollator, arguments_of, positions_of
from omnibal.packs.loading import PackItems
from omnibal.packs.losses import loss_per_target
from omnibal.packs.proof import check_packed, two_texts
from omnibal.vlm.attention import PACKED_ATTENTION
from tests.families.models import EXPERTS, small_config
from tests.integrations.items import Collate, collated_backward, config_of, items_of, items_of_kinds
from tests.vlm.families import plain_family_model


def collator_of(family, lengths=None):
    return PackCollator(Collate(family), positions_of(config_of(family)), lengths)


def drawn_of(family, samples, *, num_fillers=0):
    items = items_of(family)
    return PackItems(tuple(samples), tuple(items[sample] for sample in samples), num_fillers)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_has_the_gradients_and_logits_of_its_samples_alone(family):
    plain = plain_family_model(config_of(family))
    items = items_of(family)
    check_packed(plain, collator_of(family), items[:4])
    collated_backward(plain, items[:5], family)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    plain.zero_grad()
    pack = collator_of(family)(drawn_of(family, range(5)))
    labels = pack.pop("labels")
    loss_per_target(plain(**pack), labels).backward()
    for name, parameter in plain.named_parameters():
        if expected[name] is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


MIXED = ["video", "", "image+video", "video+image", "image", "video+video"]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kinds", [["video", "video+video"], MIXED], ids=["videos", "mixed"])
def test_packs_with_videos_have_the_gradients_and_logits_of_their_samples_alone(family, kinds):
    """Positions alone are transformers' own, counted from types of tokens and seconds of slices."""
    plain, items = plain_family_model(config_of(family)), items_of_kinds(family, kinds)
    collator = PackCollator(Collate(family), positions_of(config_of(family)), arguments=arguments_of(plain))
    check_packed(plain, collator, items)
    loss_alone = collated_backward(plain, items, family)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    plain.zero_grad()
    pack = collator(PackItems(tuple(range(len(items))), tuple(items)))
    labels = pack.pop("labels")
    loss = loss_per_target(plain(**pack), labels)
    loss.backward()
    torch.testing.assert_close(loss.detach(), loss_alone, rtol=1e-6, atol=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=2e-6)
    loads = collator.measure(items, range(len(items)))
    videos = [int(item["video_grid_thw"].prod(1).sum()) if "video_grid_thw" in item else 0 for item in items]
    images = [0 if item["pixel_values"] is None else len(item["pixel_values"]) for item in items]
    assert [(load[0], sum(load[3:])) for load in loads] == [(i + v, v) for i, v in zip(images, videos, strict=True)]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_filler_of_a_kind_adds_zeros_to_a_pack_with_the_other(kind):
    plain = plain_family_model(config_of("qwen3_vl"))
    other = {"image": "video", "video": "image"}[kind]
    items = items_of_kinds("qwen3_vl", [other, kind])
    collator = PackCollator(Collate("qwen3_vl"), positions_of(config_of("qwen3_vl")))
    gradients = []
    for samples in (items[:1], items):
        plain.zero_grad()
        pack = collator(PackItems(tuple(range(len(samples))), tuple(samples), len(samples) - 1))
        labels = pack.pop("labels")
        assert (labels != -100).sum() == 3
        loss_per_target(plain(**pack), labels).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in plain.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_videos_of_models_whose_positions_are_not_known_are_refused():
    config = config_of("glm4v")
    collator = PackCollator(Collate("glm4v"), positions_of(config))
    (item,) = items_of_kinds("qwen2_vl", ["video"])
    with pytest.raises(DataError, match=r"must leave out pixel_values_videos, video_grid_thw .*: packs hold videos of"):
        collator.sample(item)


def test_internvl_with_experts_packs():
    """InternVL3.5-30B-A3B: each token's experts are its own, whoever shares the pack."""
    config = small_config("internvl", text={"model_type": "qwen3_moe", "num_hidden_layers": 2} | EXPERTS)
    plain, items = plain_family_model(config), items_of("internvl")
    assert any("experts" in name for name, _ in plain.named_parameters())
    check_packed(plain, collator_of("internvl"), items[:4])
    collated_backward(plain, items[:5], "internvl")
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    plain.zero_grad()
    pack = collator_of("internvl")(drawn_of("internvl", range(5)))
    labels = pack.pop("labels")
    loss_per_target(plain(**pack), labels).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(plain.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-5)


def test_a_filler_adds_zeros():
    plain = plain_family_model(config_of("internvl"))
    pack = collator_of("internvl")(drawn_of("internvl", [0], num_fillers=1))
    labels = pack.pop("labels")
    loss = loss_per_target(plain(**pack), labels, num_items_in_batch=torch.tensor(9))
    loss.backward()
    gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    assert loss == 0
    assert len(gradients) > 20
    assert not any(gradient.any() for gradient in gradients)


def test_a_model_whose_samples_see_each_other_is_refused():
    class Counting(torch.nn.Module):
        """Counts positions through the row, so that attention is not told samples apart."""

        def __init__(self):
            super().__init__()
            self.model = plain_family_model(config_of("internvl"))

        def forward(self, **inputs):
            return self.model(**inputs | {"position_ids": None})

    with pytest.raises(
        ConfigError,
        match=r"the logits that they get alone, got .* through model\.model\.language_model\.layers\.0\.self_attn",
    ):
        check_packed(Counting(), collator_of("internvl"), items_of("internvl")[:3])


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_by_bounds_takes_the_place_of_a_mask(family):
    plain = plain_family_model(config_of(family))
    check_packed(plain, collator_of(family), items_of(family)[:3])
    sees_whole = family in ("gemma3", "gemma4")
    assert plain.config.get_text_config()._attn_implementation == ("sdpa" if sees_whole else PACKED_ATTENTION)
    encoder = getattr(plain.config, "vision_config", None) or plain.config.audio_config
    assert encoder._attn_implementation == "sdpa"


def test_a_torch_without_the_kernel_for_packs_attends_as_before(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    plain = plain_family_model(config_of("internvl"))
    check_packed(plain, collator_of("internvl"), items_of("internvl")[:3])
    assert plain.config.get_text_config()._attn_implementation == "sdpa"


def test_attention_that_bounds_do_not_serve_stays_as_it_was(monkeypatch):
    def refuses(*given, **options):
        raise ConfigError("attention must be plain")

    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED_ATTENTION, refuses)
    plain = plain_family_model(config_of("internvl"))
    check_packed(plain, collator_of("internvl"), items_of("internvl")[:3])
    assert plain.config.get_text_config()._attn_implementation == "sdpa"


def test_the_check_leaves_every_part_of_the_model_in_its_mode():
    plain = plain_family_model(config_of("internvl"))
    for training, of_vision in [(True, False), (False, False), (True, True)]:
        plain.train(training).model.vision_tower.train(of_vision)
        before = [module.training for module in plain.modules()]
        check_packed(plain, collator_of("internvl"), items_of("internvl")[:2])
        assert [module.training for module in plain.modules()] == before


def test_other_samples_than_planned_are_named():
    items = items_of("internvl")
    measured = collator_of("internvl").measure(items, range(len(items)))
    vision_units, llm_tokens, target_tokens = zip(*measured, strict=True)
    assert (vision_units[1], llm_tokens[1], target_tokens[1]) == (0, 5, 2)
    lengths = SampleLengths(vision_units, llm_tokens)
    assert collator_of("internvl", lengths)(drawn_of("internvl", [0, 1]))["input_ids"].shape[1] == sum(llm_tokens[:2])
    replaced = PackItems((1,), (items[4],))
    with pytest.raises(DataError, match=r"sample 1 must have the planned .*, \(0, 5\), got \(0, 12, 6\)"):
        collator_of("internvl", lengths)(replaced)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("internvl", {"labels": None}, r"must give labels, got only input_ids, .*; labels are input_ids, with -100"),
        ("internvl", {"input_ids": None}, "must give input_ids, got only labels"),
        ("internvl", {"position_ids": torch.ones(1, 3)}, r"must leave out position_ids .*: packs count positions them"),
        (
            "qwen2_5_vl",
            {"video_grid_thw": torch.ones(1, 3), "inputs_embeds": torch.ones(1)},
            "must leave out inputs_embeds to train on packs, got",
        ),
        (
            "qwen2_5_vl",
            {"mm_token_type_ids": None},
            r'must give mm_token_type_ids beside images, .* in plain training too: .* batch\["mm_token_type_ids"\] = ',
        ),
    ],
)
def test_what_a_collator_gives_too_much_or_too_little_is_named(family, change, message):
    model = plain_family_model(config_of(family))

    def collate(items):
        return Collate(family)(items) | change

    collator = PackCollator(collate, positions_of(model.config), arguments=arguments_of(model))
    with pytest.raises(DataError, match=f"data_collator {message}"):
        collator(drawn_of(family, [0]))
    if change.keys() != {"position_ids"} and None in change.values():
        with pytest.raises(DataError, match=f"data_collator {message}"):
            PaddedCollator(collate, arguments=arguments_of(model))(drawn_of(family, [0]))


def test_texts_need_no_types_of_tokens_and_notes_of_the_dataset_are_dropped():
    model = plain_family_model(config_of("qwen2_5_vl"))

    def collate(items):
        notes = {"id": ["a"], "source": "web", "index": torch.tensor([3]), "seconds": torch.ones(1)}
        return {name: value for name, value in Collate("qwen2_5_vl")(items).items() if "mm_" not in name} | notes

    collator = PackCollator(collate, positions_of(model.config), arguments=arguments_of(model))
    text = next(item for item in items_of("qwen2_5_vl") if item["pixel_values"] is None)
    pack = collator(PackItems((0,), (text,)))
    assert pack.keys() == {"input_ids", "labels", "position_ids", "use_cache"}
    unknown_model = PackCollator(collate, positions_of(model.config))
    with pytest.raises(DataError, match="must leave out index, seconds to train on packs, got input_ids"):
        unknown_model(PackItems((0,), (text,)))


def test_arguments_are_those_of_the_model_below_adapters():
    model = plain_family_model(config_of("internvl"))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert arguments_of(adapted) == arguments_of(model) >= {"input_ids", "pixel_values", "labels"}
    assert arguments_of(torch.nn.Linear(1, 1)) is None


def test_families_that_nobody_has_shown_to_pack_must_prove_to(monkeypatch):
    lengths = SampleLengths(np.array([0, 4, 1, 9, 0, 30]), np.array([5, 20, 15, 40, 9, 99]))
    assert samples_to_check(lengths, is_known=True) == [2, 0]
    assert samples_to_check(lengths, is_known=False) == [2, 0, 1]
    with pytest.raises(ConfigError, match=r"through .* \(GemmaAttention, attention\): .* padded=True"):
        check_packed(plain_family_model(config_of("paligemma")), collator_of("paligemma"), items_of("paligemma")[:3])
    with pytest.raises(
        ConfigError, match=r"model_type must be one of internvl, .* got 'paligemma'; packs of a dataset"
    ):
        two_texts(config_of("paligemma"))


def test_no_rank_waits_for_an_expert():
    """ZeRO 3 gathers weights module by module: all experts of a layer are one, whichever of them get tokens."""
    layers = plain_family_model(config_of("qwen3_vl_moe")).model.language_model.layers
    for experts in (layer.mlp.experts for layer in layers):
        assert not [part for part in experts.modules() if part is not experts and [*part.parameters()]]
