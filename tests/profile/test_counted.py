import hashlib
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForImageTextToText, InternVLConfig

from omnibal.advise.models import Model
from omnibal.config.section import LoraSection
from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES, Device
from omnibal.errors import ConfigError
from omnibal.families import layer_records as records_of
from omnibal.families.base import LayerRecord, trained_by_module
from omnibal.families.tiled import internvl_records
from omnibal.passes import kept_bytes
from omnibal.profile.counted import analytic_profile, with_sums
from omnibal.profile.records import ModelProfile
from omnibal.vlm import load_model
from omnibal.vlm.measure import made_packs
from tests.families.models import TEMPLATES, small_config

# 1 operation per second in 16 bits and 1 byte per second: seconds count operations and bytes
COUNTER = Device(
    "counter", memory_bytes=1, link_bytes_per_second=1, flops_per_second=1, fraction=1, memory_bytes_per_second=1
)
CONFIG = {
    "model_type": "internvl",
    "downsample_ratio": 0.5,
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": 56, "patch_size": 14,
    },
    "text_config": {
        "model_type": "qwen2", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 1000,
    },
}  # fmt: skip
RECORDS = internvl_records(CONFIG)
LOAD = Load(vision_units=3, llm_tokens=50, llm_tokens_squared=1300)


def costs(**options):
    return {layer.kind: layer for layer in analytic_profile(RECORDS, COUNTER, **options).layers}


def test_each_weight_costs_two_operations_a_token_forward_and_as_many_twice_backward():
    for kind, tokens, weights in (
        ("vision_block", 3 * 17, 4 * 64**2 + 2 * 64 * 128),
        ("projector", 3 * 4, 256 * 96 + 96**2),
        ("decoder_block", 50, 96 * 96 + 2 * 96 * 32 + 96 * 96 + 3 * 96 * 192),
    ):
        cost = costs()[kind]
        assert cost.weight_seconds(LOAD) == 2 * tokens * weights
    decoder = costs()["decoder_block"]
    # two products of half the pairs, two operations for each of 96 elements
    attention = decoder.forward_seconds.llm_tokens_squared * 1300
    assert attention == pytest.approx(2.16 * 2 * 2 * 1300 / 2 * 96)
    assert decoder.backward_seconds.llm_tokens_squared * 1300 == pytest.approx(2.5 * attention)


def test_beside_products_memory_is_read_and_written():
    decoder, vision = costs()["decoder_block"], costs()["vision_block"]
    # Elements of two bytes for a token. Products: queries, keys, values, output; gate, up and down projection.
    moved = (96 + 96) + 2 * (96 + 32) + (96 + 96) + 3 * (96 + 192)
    # Two RMS norms and two sums of branches; rotary embedding of queries and keys; SiLU and its product; attention.
    moved += 2 * (18 + 3) * 96 + 10 * (96 + 32) + 5 * 192 + 42 * 96
    assert decoder.forward_seconds.llm_tokens == pytest.approx(decoder.weight_seconds.llm_tokens + 2 * moved)
    assert decoder.backward_seconds.llm_tokens == pytest.approx(decoder.weight_seconds.llm_tokens + 2 * 2 * moved)
    # The ViT has two layer norms, two scales and two sums, no rotary embedding, and an MLP of two products.
    moved = 4 * (64 + 64) + 2 * (64 + 128) + 2 * (2 + 2 + 3) * 64 + 2 * 128 + 42 * 64
    pairs = 2.16 * 4 * 17 * 64
    products = vision.weight_seconds.vision_units
    assert vision.forward_seconds.vision_units == pytest.approx(products + 17 * (pairs + 2 * moved))


def test_products_whose_rows_are_not_whole_16_bytes_are_slower():
    def head(vocabulary):
        records = internvl_records({**CONFIG, "text_config": {**CONFIG["text_config"], "vocab_size": vocabulary}})
        return analytic_profile(records, COUNTER).layers[-1].forward_seconds.target_tokens / vocabulary

    traffic = 2 * 3 * 6
    aligned = head(1024) - traffic
    assert aligned == pytest.approx(3 * 2 * 96)
    assert [(head(words) - traffic) / aligned for words in (1028, 1026, 1025)] == pytest.approx([1.5, 2.3, 5.3])


def test_counted_weights_are_the_parameters_that_multiply():
    for record, layer in zip(RECORDS, analytic_profile(RECORDS, COUNTER).layers, strict=True):
        if record.kind in ("decoder_block", "head"):
            # the head's three products run forward, and its logits pass memory eighteen times, at two bytes
            products = (layer.forward_seconds.target_tokens - 2 * 18 * 1000) / 3
            per_token = (layer.weight_seconds.llm_tokens or products) / 2
            assert per_token <= record.sizes["parameters"] <= 1.02 * per_token


def test_a_cut_sends_what_the_layer_before_it_puts_out():
    sent = {kind: layer.output_bytes(LOAD) - 16 * 50 for kind, layer in costs().items()}
    vision = 2 * 3 * 17 * 64
    text = 2 * 50 * 96
    assert sent == {
        "patch_embedding": vision, "vision_block": vision, "projector": 2 * 3 * 4 * 96,
        "text_embedding": text, "decoder_block": text, "final_norm": text, "head": 0,
    }  # fmt: skip


def test_a_recomputed_layer_keeps_its_input():
    layers = analytic_profile(RECORDS, COUNTER).layers
    assert layers[0].saved_bytes["full"] == CostModel(vision_units=2 * 3 * 56**2)
    for before, layer in pairwise(layers):
        if layer.kind == "head":
            assert layer.saved_bytes["full"] == layer.saved_bytes["none"]
            assert layer.recompute_seconds["full"] == CostModel()
            continue
        # the token ids that a cut sends along are kept once for all layers
        assert layer.saved_bytes["full"](LOAD) == before.output_bytes(LOAD) - 16 * 50
        if layer.kind.endswith("block"):
            assert layer.saved_bytes["full"](LOAD) < layer.saved_bytes["none"](LOAD)


def test_the_first_layer_has_no_input_gradient():
    first = costs()["patch_embedding"]
    assert (first.backward_seconds, first.weight_seconds) == (first.forward_seconds, CostModel())


def test_parameters_gradients_and_optimizer_in_bytes():
    for record, layer in zip(RECORDS, analytic_profile(RECORDS, COUNTER).layers, strict=True):
        number = record.sizes["parameters"]
        assert (layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_bytes) == (
            2 * number, 2 * number, 12 * number,
        )  # fmt: skip
        assert layer.optimizer_seconds == 28 * number
    single = analytic_profile(RECORDS, COUNTER, dtype="float32").layers[1]
    number = RECORDS[1].sizes["parameters"]
    assert (single.parameter_bytes, single.gradient_bytes, single.optimizer_bytes) == (
        4 * number,
        4 * number,
        8 * number,
    )


def test_frozen_layers_have_no_weight_gradient():
    frozen = costs(frozen=["vision_block"])["vision_block"]
    assert frozen.weight_seconds == CostModel()
    assert frozen.backward_seconds == costs()["vision_block"].backward_seconds
    assert frozen.gradient_bytes == frozen.optimizer_bytes == frozen.optimizer_seconds == 0
    assert not frozen.trainable
    assert costs(frozen=["vision_block"])["head"].trainable


def test_a_layer_that_is_trained_in_part_costs_its_trained_weights():
    model = load_model(InternVLConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"}))
    whole, part = (analytic_profile(model.records, COUNTER, frozen=frozen) for frozen in ((), ("*.mlp.*", "head")))
    assert (whole.frozen_parts, part.frozen_parts) == ((), ("*.mlp.*", "head"))
    for record, full, layer in zip(model.records, whole.layers, part.layers, strict=True):
        numbers = sum(size for name, size in record.weights.items() if ".mlp." not in name and record.kind != "head")
        share = numbers / record.sizes["parameters"]
        assert (layer.gradient_bytes, layer.optimizer_bytes) == (2 * numbers, 12 * numbers)
        assert layer.weight_seconds(LOAD) == pytest.approx(share * full.weight_seconds(LOAD))
        if record.kind == "head":  # without the product for its weight, and without its gradient
            assert layer.forward_seconds(LOAD) == full.forward_seconds(LOAD) - 2 * 50 * record.sizes["parameters"]
            assert layer.saved_bytes == {
                level: replace(full.saved_bytes[level], fixed=0.0) for level in ("none", "full")
            }
        else:
            assert layer.saved_bytes == full.saved_bytes
        assert layer.trainable == (numbers > 0)
        assert 0 < share < 1 or ".mlp" not in "".join(record.weights)


def test_a_profile_says_what_is_frozen(tmp_path):
    model = load_model(InternVLConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"}))
    for frozen, parts in ((["vision"], ("patch_embedding", "vision_block")), (["*.layer.0.*"], ("*.layer.0.*",))):
        analytic_profile(model.records, COUNTER, frozen=frozen).save(tmp_path / "profile.json")
        made = ModelProfile.load(tmp_path / "profile.json")
        assert made.frozen_parts == parts
        made.check_matches(records=model.records, frozen=frozen)
        made.check_matches(frozen=parts)
        with pytest.raises(ConfigError, match=r"frozen parts \[.*\] where the run has \['projector'\]; make"):
            made.check_matches(frozen=["projector"])


def test_a_profile_tells_kinds_of_blocks_apart(tmp_path):
    records = records_of(small_config("qwen2_5_vl").to_dict())
    whole, part = (
        analytic_profile(records, COUNTER, frozen=frozen) for frozen in (["vision_block"], ["only:vision_block"])
    )
    assert (whole.frozen_parts, part.frozen_parts) == (("vision_block", "window_block"), ("only:vision_block",))
    part.save(tmp_path / "profile.json")
    loaded = ModelProfile.load(tmp_path / "profile.json")
    loaded.check_matches(frozen=part.frozen_parts)
    with pytest.raises(ConfigError, match="profile must fit this run, got frozen parts"):
        loaded.check_matches(frozen=["vision_block"])


def test_a_profile_says_what_each_module_trains():
    for frozen in ((), ("vision_block",), ("language",)):
        expected = trained_by_module((record, record.trained(frozen)) for record in RECORDS)
        for devices in (1, 2):
            made = analytic_profile(RECORDS, COUNTER, frozen=frozen, tensor_parallel=devices)
            assert made.trained == expected


WHOLE = ("patch_embedding", "final_norm")  # layers that every tensor rank computes
# Elements that tensor ranks sum for LOAD, forward and backward; the head runs backward in its forward pass. A block
# gathers three times and scatters twice, halves of sums, and backward the other way round.
SUMS = {
    "vision_block": (2.5 * 3 * 17 * 64, 2.5 * 3 * 17 * 64), "projector": (3 * 4 * 96, 3 * 4 * 256),
    "text_embedding": (50 * 96, 0), "decoder_block": (2.5 * 50 * 96, 2.5 * 50 * 96), "head": (6 * 50 + 50 * 96, 0),
}  # fmt: skip


def test_tensor_parallelism_divides_products_and_adds_what_ranks_sum():
    one, two = costs(), costs(tensor_parallel=2)
    for kind, layer in two.items():
        share = 1 if kind in WHOLE else 1 / 2
        # two bytes each, 2 (t - 1) / t of them over the link, which reaches 0.75 of its byte per second
        forward, backward = (elements * 2 * 1 / 0.75 for elements in SUMS.get(kind, (0, 0)))
        if kind == "text_embedding":  # each rank writes zeros for the tokens of the other's vocabulary
            assert layer.forward_seconds(LOAD) == pytest.approx(one[kind].forward_seconds(LOAD) + forward)
        else:
            assert layer.forward_seconds(LOAD) == pytest.approx(one[kind].forward_seconds(LOAD) * share + forward)
            assert layer.backward_seconds(LOAD) == pytest.approx(one[kind].backward_seconds(LOAD) * share + backward)
        assert layer.weight_seconds(LOAD) == pytest.approx(one[kind].weight_seconds(LOAD) * share)
        assert layer.recompute_seconds["full"] == (CostModel() if kind == "head" else layer.forward_seconds)
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "optimizer_seconds"):
            assert getattr(layer, name) == pytest.approx(getattr(one[kind], name) * share)
        assert layer.output_bytes == one[kind].output_bytes


def test_measured_costs_get_the_sums_that_are_counted():
    slow, fast = (
        analytic_profile(RECORDS, replace(COUNTER, link_bytes_per_second=link), tensor_parallel=2) for link in (1, 1e30)
    )
    found = with_sums(replace(fast, device="here", versions={"torch": "2"}), RECORDS, COUNTER)
    assert (found.device, found.num_tensor) == ("here", 2)
    for layer, expected in zip(found.layers, slow.layers, strict=True):
        for name in ("forward_seconds", "backward_seconds", "weight_seconds"):
            assert getattr(layer, name)(LOAD) == pytest.approx(getattr(expected, name)(LOAD))
        assert layer.recompute_seconds["full"](LOAD) == pytest.approx(expected.recompute_seconds["full"](LOAD))
        assert layer.recompute_seconds["none"] == CostModel()


def test_tensor_ranks_share_what_blocks_keep_but_inputs_of_products_with_weights():
    one, two = costs(), costs(tensor_parallel=2)
    kept = {kind: layer.saved_bytes["none"](LOAD) for kind, layer in two.items()}
    # outputs of two norms | inputs of two norms, two scaled branches; queries, keys, values, attention, the MLP
    assert kept["vision_block"] == 2 * 3 * 17 * (2 * 64 + (4 * 64 + 4 * 64 + 2 * 128) / 2)
    # outputs of two norms | outputs before the weight; queries, keys, values, attention, the MLP | inputs in float32
    assert kept["decoder_block"] == 2 * 50 * (2 * 96 + (2 * 96 + 2 * 96 + 2 * 32 + 4 * 192) / 2) + 4 * 50 * 96
    assert kept["projector"] == 2 * 3 * 4 * (2 * 256 + 2 * 96 / 2)
    waiting = {kind: layer.pending_bytes(LOAD) for kind, layer in two.items()}
    assert waiting["vision_block"] == 2 * 3 * 17 * (4 * 64 + (4 * 64 + 2 * 128) / 2)
    assert waiting["decoder_block"] == 2 * 50 * (4 * 96 + (2 * 96 + 2 * 32 + 3 * 192) / 2)
    for kind, layer in two.items():
        if kind.endswith("_block"):
            assert layer.saved_bytes["full"](LOAD) == one[kind].saved_bytes["full"](LOAD) / 2
        elif kind != "head":
            assert layer.saved_bytes["full"] == one[kind].saved_bytes["full"]


def test_modules_have_degrees_of_their_own():
    one, two = (analytic_profile(RECORDS, COUNTER, tensor_parallel=degree) for degree in (1, 2))
    mixed = analytic_profile(RECORDS, COUNTER, tensor_parallel={"vision": 1, "language": 2})
    expected = [b if b.module == "language" else a for a, b in zip(one.layers, two.layers, strict=True)]
    assert mixed.layers == tuple(expected)
    assert mixed.devices == "1 x counter (vision), 2 x counter (language)"


# Hashes of all costs as they were counted when tensor ranks' sums were not.
ONE_RANK = {
    "Qwen2-VL-2B": "faed46578ac00731", "Qwen2.5-VL-7B": "f16adec79ecf5ddb", "Qwen3-VL-8B": "9251443b0d0642b3",
    "InternVL3-78B": "d35bfbc825bddd00", "LLaVA-1.5-7B": "cc8f74d9efbbe61f",
    "LLaVA-OneVision-Qwen2-7B": "c5ae00ab488b5c64",
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_tensor_rank_costs_what_it_did_bit_by_bit(tmp_path, name):
    analytic_profile(Model.known(name).records, DEVICES["A100-80GB"]).save(tmp_path / "profile.json")
    layers = json.loads((tmp_path / "profile.json").read_text())["layers"]
    assert hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:16] == ONE_RANK[name]


def test_tokens_go_through_their_active_experts_and_ranks_hold_all():
    text = {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2}
    records = internvl_records(CONFIG | {"text_config": CONFIG["text_config"] | text | {"mlp_only_layers": [1]}})
    routed, dense = (
        {layer.name: layer for layer in analytic_profile(records, COUNTER, tensor_parallel=degree).layers}
        for degree in (1, 2)
    )
    block, half = (layers["decoder_block.0"] for layers in (routed, dense))
    attention = 2 * 96 * (96 + 32)
    assert block.weight_seconds(LOAD) == 2 * 50 * (attention + 3 * 96 * 2 * 32 + 96 * 16)
    held = attention + 16 * 3 * 96 * 32 + 96 * 16 + 2 * 96 + 2 * 16
    assert (block.parameter_bytes, block.gradient_bytes, block.optimizer_bytes) == (2 * held, 2 * held, 12 * held)
    # of two norms; of queries, keys, values and attention, and of two experts; copies and outputs of two experts
    assert block.saved_bytes["none"](LOAD) == 50 * (
        2 * (4 * 96 + 2 * 96 + 2 * 32 + 4 * 2 * 32 + 128 + 2 * 2 * 96) + 4 * (2 * 96 + 128 + 16)
    )
    copies = 50 * (2 * (2 * 96 + 2 * 2 * 96) + 4 * 16)
    assert half.saved_bytes["none"](LOAD) == (block.saved_bytes["none"](LOAD) + copies) / 2
    assert routed["decoder_block.1"].sizes["intermediate"] == 192
    assert "experts" not in routed["decoder_block.1"].sizes


def test_counted_bytes_of_experts_are_those_that_transformers_modules_keep():
    config = small_config("qwen3_vl_moe", text={"moe_intermediate_size": 64})
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    block, hidden = model.model.language_model.layers[1], torch.randn(1, 512, 24, requires_grad=True)
    angles = model.model.language_model.rotary_emb(hidden, torch.arange(512).expand(3, 1, 512))
    kept = kept_bytes(lambda: block(hidden, position_embeddings=angles), free=[*block.parameters(), *angles])
    layers = {
        layer.name: layer for layer in analytic_profile(records_of(config.to_dict()), COUNTER, dtype="float32").layers
    }
    # On a CPU statistics of attention come on top, and the integers that sort tokens by their experts.
    assert layers["decoder_block.1"].saved_bytes["none"](Load(0, 512)) == pytest.approx(kept, rel=0.06)


@pytest.mark.parametrize(("degree", "heads"), [(2, 26), (4, 28), (8, 32)])
def test_a_vit_gets_zero_heads_where_the_degree_does_not_divide_its_own(degree, heads):
    made = analytic_profile(Model.known("InternVL3-78B").records, DEVICES["A100-80GB"], tensor_parallel=degree)
    block = next(layer for layer in made.layers if layer.kind == "vision_block")
    weights = (4 * 3200 * 128 * heads + 2 * 3200 * 12800) / degree
    seconds = 2 * 1025 * weights / (0.6 * 312e12)
    assert block.weight_seconds.vision_units == pytest.approx(seconds)
    assert block.parameter_bytes / 2 == pytest.approx(weights, rel=1e-3)
    assert block.gradient_bytes == block.parameter_bytes
    assert block.sizes["heads"] == 25
    head = made.layers[-1]
    assert head.sizes["vocab"] == 151_674
    assert head.parameter_bytes == 2 * 8192 * -(-151_674 // degree)


def test_tensor_ranks_hold_copies_of_too_few_key_and_value_heads():
    blocks = [
        analytic_profile(Model.known("Qwen2.5-VL-3B").records, COUNTER, tensor_parallel=degree).layers[-3]
        for degree in (1, 2, 4)
    ]
    counts = [block.parameter_bytes / 2 * degree for block, degree in zip(blocks, (1, 2, 4), strict=True)]
    assert counts[1] == counts[0]
    assert counts[2] == counts[0] + 2 * 2048 * 2 * 128  # four key and value heads in place of two
    weights = blocks[2].weight_seconds.llm_tokens / 2 * 4
    assert weights == 2 * 2048 * (16 + 4) * 128 + 3 * 2048 * 11008


def test_the_profile_fits_the_records_and_names_the_device():
    made = analytic_profile(RECORDS, DEVICES["A100-80GB"], tensor_parallel=2)
    made.check_matches(records=RECORDS, device="A100-80GB", tensor_parallel=2, dtype="bfloat16")
    assert made.devices == "2 x A100-80GB"


def test_a_decoder_layer_of_20b_takes_the_time_one_would_expect():
    # InternLM2-20B: hidden 6144, 48 layers; an A100 at half its peak
    record = LayerRecord("decoder_block.0", "decoder_block", {
        "hidden": 6144, "intermediate": 16384, "heads": 48, "kv_heads": 8, "head_dim": 128, "rms_norms": 2,
        "qk_norms": 0, "parameters": 390_000_000,
    }, module="language")  # fmt: skip
    cost = analytic_profile([record], DEVICES["A100-80GB"]).layers[0]
    seconds = cost.forward_seconds(Load(0, 4096, 4 * 1024**2))
    assert 0.020 < seconds < 0.023


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"records": [LayerRecord("a", "magic", {}, module="vision")]},
            "kind of a layer must be one of patch_embedding, .* got 'magic'",
        ),
        ({"frozen": ["visoin"]}, "frozen must hold kinds of the model's layers.*got 'visoin'; did you mean 'vision'"),
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float32, got 'int8'"),
        ({"tensor_parallel": 0}, "tensor_parallel must be positive, got 0"),
        ({"tensor_parallel": 8}, "num_tensor must be at most the 6 heads of decoder_block.0, got 8"),
        ({"tensor_parallel": 3}, "tensor_parallel must divide the intermediate 128 of vision_block.0, got 3"),
        (
            {"tensor_parallel": {"vision": 1, "language": 3}},
            "num_tensor must be a multiple of the 2 kv_heads of decoder_block.0, or fewer, got 3",
        ),
        (
            {"tensor_parallel": {"language": 2}},
            "tensor_parallel must be one number, or one each of vision and language, got {'language': 2}",
        ),
        (
            {"device": Device("card", memory_bytes=1, link_bytes_per_second=1)},
            "device card must have flops_per_second and memory_bytes_per_second to count costs, got none; measure",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        analytic_profile(**{"records": RECORDS, "device": COUNTER, **change})


@pytest.mark.parametrize(("field", "value"), [("fraction", 0.0), ("memory_bytes", float("nan")), ("fraction", 1.1)])
def test_impossible_devices_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} of device A100-80GB must be"):
        replace(DEVICES["A100-80GB"], **{field: value})


@pytest.mark.parametrize("model_type", TEMPLATES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counted_bytes_are_those_that_transformers_modules_keep(model_type, dtype):
    config = small_config(model_type)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    model = AutoModelForImageTextToText.from_config(config, **options).model
    layers = {
        layer.name: layer for layer in analytic_profile(records_of(config.to_dict()), COUNTER, dtype=dtype).layers
    }
    if "qwen" in model_type:
        block, merger = model.visual.blocks[1], model.visual.merger
        hidden = torch.randn(512, 32, dtype=options["dtype"])
        angles = torch.randn(512, 8)
        bounds = torch.tensor([0, 512], dtype=torch.int32)
        inputs, integers = {"cu_seqlens": bounds, "position_embeddings": (angles, angles)}, [bounds, angles]
        load = Load(512, 0, 0, 512**2)
    else:
        block, merger = model.vision_tower.encoder.layers[1], model.multi_modal_projector
        tokens = layers["vision_block.1"].sizes["tokens_per_tile"]
        hidden, inputs, integers = torch.randn(32, tokens, 32, dtype=options["dtype"]), {"attention_mask": None}, []
        load = Load(32, 0)
    hidden.requires_grad_()
    kept = kept_bytes(lambda: block(hidden, **inputs), free=[*block.parameters(), *integers])
    # On a CPU statistics of attention, and in Qwen's blocks a copy of its output, come on top.
    assert layers["vision_block.1"].saved_bytes["none"](load) == pytest.approx(kept, rel=0.1)
    features = hidden if "qwen" in model_type else hidden[:, : (12 // 4) ** 2].detach().contiguous().requires_grad_()
    kept = kept_bytes(lambda: merger(features), free=merger.parameters())
    assert layers["projector"].saved_bytes["none"](load) == pytest.approx(kept, rel=0.02)


def test_adapters_cost_their_own_products_and_the_base_has_no_gradient():
    config = InternVLConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    plain, lora = load_model(config), load_model(config, LoraSection(rank=4, modules_to_save=["projector"]))
    saved = sum(sum(record.weights.values()) for record in plain.records if record.kind == "projector")
    both = [analytic_profile(model.records, COUNTER).layers for model in (plain, lora)]
    adapters = 4 * (96 + 96 + 2 * (96 + 32) + 96 + 96 + 3 * (96 + 192))
    for record, without, layer in zip(lora.records, *both, strict=True):
        is_block = record.kind == "decoder_block"
        beside = 2 * 50 * adapters if is_block else 0
        trained = adapters if is_block else saved if record.kind == "projector" else 0
        if record.kind == "head":
            assert layer.forward_seconds(LOAD) == without.forward_seconds(LOAD) - 2 * 50 * record.sizes["parameters"]
            continue
        assert layer.forward_seconds(LOAD) == without.forward_seconds(LOAD) + beside
        if record.kind == "projector":
            assert layer == without.__class__(**{**vars(without), "sizes": layer.sizes})
            continue
        assert (layer.gradient_bytes, layer.optimizer_bytes) == (2 * trained, 12 * trained)
        assert layer.parameter_bytes == without.parameter_bytes + 2 * trained
        assert layer.weight_seconds(LOAD) == beside
        assert layer.trainable == is_block
        first = record.kind == "patch_embedding"
        inputs = without.backward_seconds(LOAD) - (0 if without.pending_bytes(LOAD) else without.weight_seconds(LOAD))
        assert first or layer.backward_seconds(LOAD) == inputs + beside
        # seven adapters: what their first matrices put out; and twice as much for gradients that wait
        kept = 2 * 50 * 7 * 4 if is_block else 0
        assert layer.saved_bytes["none"](LOAD) == without.saved_bytes["none"](LOAD) + kept
        assert layer.pending_bytes(LOAD) == (without.pending_bytes(LOAD) + 2 * kept if is_block else 0)
    dropped = analytic_profile(load_model(config, LoraSection(rank=4, dropout=0.1)).records, COUNTER).layers
    block = next(number for number, record in enumerate(lora.records) if record.kind == "decoder_block")
    more = dropped[block].saved_bytes["none"](LOAD) - both[1][block].saved_bytes["none"](LOAD)
    assert more == 3 * 50 * (6 * 96 + 192)  # a copy in 16 bits, and a byte that says what is dropped


def test_counted_bytes_of_a_block_with_adapters_are_those_that_it_keeps():
    model = load_model(small_config("llava"), LoraSection(rank=2))
    index = [record.kind for record in model.records].index("decoder_block")
    layer, tokens = model.build_layer(index, seed=0), 40
    counted = analytic_profile(model.records, COUNTER, dtype="float32").layers[index]
    pack = made_packs(model, PackLimits(1, tokens))[-1]
    payload = pack.payload(model, dtype=torch.float32)
    payload = payload.replace(hidden=torch.randn(1, tokens, 24, requires_grad=True))
    free = [*layer.parameters(), *layer.buffers(), *payload.integers.values()]
    kept = kept_bytes(lambda: layer(payload).hidden, free=free)
    assert counted.saved_bytes["none"](Load(0, tokens)) == pytest.approx(kept, rel=0.1)
