import pytest

from omnibal.errors import ConfigError
from omnibal.families import layer_records

VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": [28, 28],
    "patch_size": [7, 7],
}
TEXT = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
}

LAYER_NORMS = {"rms_norms": 0, "qk_norms": 0}


def config(*, vision=None, text=None, **options):
    return {
        "model_type": "internvl",
        "vision_config": VISION | (vision or {}),
        "text_config": TEXT | (text or {}),
        **options,
    }


def test_layers_from_patches_to_logits():
    tile = {"patches_per_tile": 16, "tokens_per_tile": 17}
    records = layer_records(config(tie_word_embeddings=False))
    assert [(record.name, record.kind, dict(record.sizes)) for record in records] == [
        ("patch_embedding", "patch_embedding", tile | {"hidden": 24, "values_per_patch": 147, "parameters": 3984}),
        *(
            (
                f"vision_block.{i}",
                "vision_block",
                tile | {"hidden": 24, "intermediate": 40, "heads": 2, "head_dim": 12, "parameters": 4456} | LAYER_NORMS,
            )
            for i in (0, 1)
        ),
        (
            "projector",
            "projector",
            tile | {"shuffled": 96, "hidden": 32, "image_tokens_per_tile": 4, "parameters": 4352},
        ),
        ("text_embedding", "text_embedding", {"hidden": 32, "vocab": 61, "parameters": 1952}),
        (
            "decoder_block.0",
            "decoder_block",
            {"hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "parameters": 7808}
            | {"rms_norms": 2, "qk_norms": 0},
        ),
        ("final_norm", "final_norm", {"hidden": 32, "parameters": 32}),
        ("head", "head", {"hidden": 32, "vocab": 61, "parameters": 1952}),
    ]
    assert all(record.tied_key is None for record in records)
    assert [record.module for record in records] == ["vision"] * 3 + ["projector"] + ["language"] * 4


def test_the_top_level_ties_and_does_so_by_default():
    for options in ({}, {"tie_word_embeddings": True}, {"text": {"tie_word_embeddings": False}}):
        records = layer_records(config(**options))
        assert [record.name for record in records if record.tied_key == "embedding"] == ["text_embedding", "head"]


def test_internvl3_1b():
    vision = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "image_size": 448,
        "patch_size": 14,
        "attention_bias": True,
    }
    text = {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
        "vocab_size": 151674,
    }
    records = layer_records(config(vision=vision, text=text))
    assert len(records) == 24 + 24 + 5
    assert records[25].sizes["image_tokens_per_tile"] == 256
    # the ViT has 304 million parameters, the projector 4.5 million, the language model (tied) 494 million
    assert sum(record.sizes["parameters"] for record in records[:-1]) == pytest.approx(0.80e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "internvl_chat"}, "model_type must be one of internvl, .* got 'internvl_chat'"),
        ({"vision_feature_layer": -2}, "vision_feature_layer must be -1"),
        ({"vision": {"use_mask_token": True}}, "vision_config.use_mask_token must be False, as in published"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy must be 'default'"),
        ({"downsample_ratio": 0.3}, "downsample_ratio must be 1/n"),
        ({"downsample_ratio": 0.0}, "downsample_ratio must be 1/n"),
        ({"vision": {"image_size": 21}}, "sides divisible by 2, got 3 x 3"),
        ({"vision": {"image_size": [28, 56]}}, "square grid"),
        ({"vision": {"hidden_size": None}}, "hidden_size must be given, got nothing"),
        ({"text": {"num_hidden_layers": 0}}, "num_hidden_layers must be at least 1, got 0"),
        ({"text": {"model_type": "gemma3"}}, "text_config.model_type must be one of llama, mistral, qwen2, qwen3"),
        ({"text_config": None}, "text_config must be a nested configuration"),
    ],
)
def test_what_the_layers_do_not_serve_is_refused_by_name(changes, message):
    nested = {key: changes[key] for key in ("vision", "text") if key in changes}
    with pytest.raises(ConfigError, match=message):
        layer_records(config(**nested) | {key: value for key, value in changes.items() if key not in nested})
