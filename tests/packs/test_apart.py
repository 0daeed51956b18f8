"""What depends on the length of a row is read off a configuration, tried where it shows, and exact or refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
)

from omnibal import PackLimits, SampleLengths
from omnibal.data.step_size import fit_step
from omnibal.errors import ConfigError
from omnibal.integrations.loops import balanced_loader
from omnibal.packs.apart import longest_row, refuse_other_parts, thresholds
from omnibal.packs.collator import PackCollator, positions_of
from omnibal.packs.proof import check_packed, check_packing
from tests.families.models import small_config
from tests.packs.test_leaks import model_of

SIZES = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.15,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 50,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + number for number in range(8)],
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
MIXED = {"full_attention": DYNAMIC, "sliding_attention": PLAIN}
EXPERTS = {"num_local_experts": 4}
CONFIGS = {
    "dynamic": Qwen2Config(**SIZES, rope_parameters=DYNAMIC, max_position_embeddings=50),
    "longrope": Phi3Config(
        **SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=50, max_position_embeddings=200
    ),
    "dynamic in some layers": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 6}, rope_parameters=MIXED, max_position_embeddings=50, sliding_window=30
    ),
    "scaled tables": PhimoeConfig(
        **SIZES, **EXPERTS, rope_parameters=LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.4},
        max_position_embeddings=200,
    ),
    "windows": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=50, max_window_layers=1),
    "chunks": Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4}, **EXPERTS, intermediate_size_mlp=96, attention_chunk_size=50,
        attn_temperature_tuning=False,
    ),
    "scaled attention": Ministral3Config(
        **SIZES,
        rope_parameters=PLAIN | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 50, "factor": 1.0},
    ),
}  # fmt: skip
LEAKING = {"dynamic", "longrope", "dynamic in some layers", "scaled tables"}
"""Those whose packs leak where omnibal does not keep samples apart."""


def model_of_config(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).float().eval()


def collate(items):
    ids = torch.stack(items)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def words(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 200, (size,), generator=generator) for size in sizes]


@pytest.mark.parametrize("name", CONFIGS)
def test_long_samples_in_packs_are_as_a_new_model_computes_them_alone(name):
    config, texts = CONFIGS[name], words(20, 70, 30, 61, 120, 9)
    model, collator = model_of_config(config), PackCollator(collate, positions_of(config))
    assert {each.tokens for each in thresholds(config)} <= {30, 50}
    check_packed(model, collator, words(8, 11, 9))  # too short to show anything
    with torch.no_grad():
        pack = collator.pack([collator.sample(text) for text in texts])
        found = model(**{name: value for name, value in pack.items() if name != "labels"}).logits[0]
        for text, part in zip(texts, found.split([*map(len, texts)]), strict=True):
            alone = model_of_config(config)(text[None], attention_mask=torch.ones(1, len(text))).logits[0]
            torch.testing.assert_close(part, alone, rtol=1e-3, atol=1e-4)
        if name in LEAKING:  # what has been equipped keeps its short samples apart, and so would long ones be
            assert check_packing(model, gradients=False).is_exact
        # A row with a mask is transformers' own, as in evaluation.
        rows = {"input_ids": torch.stack(words(60, 60)), "attention_mask": torch.ones(2, 60)}
        torch.testing.assert_close(model(**rows).logits, model_of_config(config)(**rows).logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_short_samples_do_not_prove_packs_of_long_ones(name):
    published = copy.deepcopy(CONFIGS[name])
    model = model_of_config(published)
    found = check_packing(model, *packed_items(11, 14, 5), gradients=False)
    assert found.is_exact == (name not in LEAKING)
    if not found.is_exact:
        assert found.summary.startswith("packs of text alone leak beyond 50 tokens of a sample (")
        assert {leak.kind for leak in found.leaks} == {"positions"}
        with pytest.raises(ConfigError, match="leak beyond 50 tokens of a sample"):
            found.require()
    assert check_packing(model_of_config(published), gradients=False).is_exact == found.is_exact
    # Long samples show it themselves.
    assert check_packing(model, *packed_items(60, 30), gradients=False).is_exact == found.is_exact


def packed_items(*sizes):
    def flat(items):
        positions = torch.cat([torch.arange(len(item)) for item in items])[None]
        return {"input_ids": torch.cat(items)[None], "position_ids": positions, "use_cache": False}

    return flat, words(*sizes)


PLACED = Llama4TextConfig(
    **SIZES | {"num_hidden_layers": 4}, **EXPERTS, intermediate_size_mlp=96, floor_scale=40, no_rope_layers=[1, 1, 1, 0]
)


class Foreign(nn.Module):
    """Rotary tables as code outside transformers makes them: by the length of the row."""

    def __init__(self, config):
        super().__init__()
        self.width, self.longest = 16, config.max_position_embeddings

    def forward(self, hidden, position_ids):
        base = 1e4 * max(2 * hidden.shape[1] / self.longest - 1, 1) ** (self.width / (self.width - 2))
        angles = position_ids[..., None] / base ** (torch.arange(0, self.width, 2) / self.width)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(hidden), angles.sin().to(hidden)


class ForeignModel(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.rotary_emb = Foreign(config)


def foreign_model():
    torch.manual_seed(0)
    return ForeignModel(LlamaConfig(**SIZES, rope_parameters=DYNAMIC, max_position_embeddings=50)).eval()


@pytest.mark.parametrize(
    ("make", "most"), [(lambda: model_of_config(PLACED), 39), (foreign_model, 50)], ids=["places", "other code"]
)
def test_rows_stay_so_short_that_a_place_in_them_does_not_count(make, most):
    model, data = make(), words(*range(8, 28))
    assert longest_row(model).tokens == most
    with pytest.raises(ConfigError, match=rf"limits\.llm_tokens must be at most {most} .* got {most + 1}"):
        balanced_loader(data, collate, PackLimits(1, most + 1), model=model)
    loader = balanced_loader(data, collate, PackLimits(1, most), model=model)
    packs = [batch["input_ids"].shape[1] for batch in loader]
    assert max(packs) <= most
    assert sum(packs) == sum(range(8, 28))
    for place, rows in ((0, most), (8, most + 8)):  # the longest row is exact, and one of a few words more is not
        flat, items = packed_items(most - 20, 20 + place)
        with torch.no_grad():
            pack = model(**flat(items)).logits[0].split([*map(len, items)])[1]
            alone = make()(items[1][None], attention_mask=torch.ones(1, len(items[1]))).logits[0]
        assert torch.allclose(pack, alone, rtol=1e-3, atol=1e-4) == (rows == most)
    found = check_packing(model, *packed_items(11, 14, 5), gradients=False)
    assert not found.is_exact
    assert found.beyond


def test_limits_that_are_searched_keep_to_the_longest_row():
    lengths = SampleLengths([0] * 64, [*range(8, 40)] * 2)
    options = {"batch_size": 4, "num_replicas": 2}
    assert fit_step(lengths, 16, **options).limits.llm_tokens > 60
    assert fit_step(lengths, 16, **options, longest_row=60).limits.llm_tokens <= 60


def test_encoders_that_follow_the_other_images_of_a_row_are_refused():
    model = model_of("llava")
    refuse_other_parts(model)
    model.config.vision_config.rope_parameters = DYNAMIC
    model.config.vision_config.max_position_embeddings = 50
    with pytest.raises(ConfigError, match="rope_type of vision_config must not follow the other images of a row"):
        refuse_other_parts(model)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_frequencies_that_are_the_same_for_all_lengths_limit_nothing(kind):
    further = {"original_max_position_embeddings": 50, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4} | (further if kind != "linear" else {})
    config = small_config("internvl", text={"rope_parameters": rope})
    assert thresholds(config) == []
