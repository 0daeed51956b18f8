"""Layers that tensor ranks share compute what whole ones compute."""

from math import prod
from threading import Lock

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from omnibal.config.section import LoraSection
from omnibal.device import DEVICES
from omnibal.families.parts import check_degree
from omnibal.loss import WHOLE
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LEVELS
from omnibal.vlm import load_model
from omnibal.vlm.layers import is_adapter
from omnibal.vlm.tensor import (
    SharedTokens,
    TensorGroup,
    TokenDropout,
    VocabularyPart,
    add_up,
    part_of,
    partial_parameters,
    share_layer,
)
from omnibal.vlm.weights import whole_state
from tests.families.models import small_config
from tests.vlm.families import TRAINED, family_samples, layers_of, pack_of, plain_family_model, tied_config
from tests.vlm.models import disk_state, pack_loss
from tests.vlm.tensor import load_adapters, on_ranks, shared_layers, slices_of

PACKS = {"mixed": [0, 1, 2, 3, 4, 5, 6], "text only": [1, 4]}
WIDE = {"num_attention_heads": 5, "hidden_size": 40}
CASES = {
    **{f"{family} over 2": (small_config(family), 2, "mixed") for family in TRAINED},
    **{f"{family} over 4, whose heads of keys are fewer": (tied_config(family), 4, "mixed") for family in TRAINED},
    **{f"{family} without images": (small_config(family), 2, "text only") for family in TRAINED},
    "5 heads over 2": (small_config("internvl", vision=WIDE), 2, "mixed"),
    "5 heads over 4": (small_config("internvl", vision=WIDE), 4, "mixed"),
    "norms over all heads": (
        small_config("internvl", vision=WIDE | {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True}),
        2, "mixed",
    ),
    "6 heads by 3 of keys over 2": (
        small_config("qwen3_vl", text={"num_attention_heads": 6, "num_key_value_heads": 3}), 2, "mixed",
    ),
    "a token without a gradient": (small_config("internvl", text={"pad_token_id": 7}), 2, "mixed"),
}  # fmt: skip
ADAPTERS = {"rank": 3, "targets": ["language", "vision", "projector"], "modules_to_save": ["embed_tokens"]}
ADAPTED = {
    "with adapters": ADAPTERS,
    "with adapters of the head": ADAPTERS | {"targets": ["o_proj", "k_proj", "head"], "modules_to_save": ["mlp"]},
}

LOCK = Lock()  # random numbers of threads come from one generator


def gradients_of(model, layers, pack, level):
    """Loss and gradients of a pack, and then its statistics in evaluation."""
    loss = pack_loss(layers, pack, level)
    loss.backward()
    for layer in layers:
        layer.eval()
    with torch.no_grad():
        statistics = pack_loss(layers, pack)
    return loss.detach(), disk_state(model, layers, gradients=True), statistics


@pytest.mark.parametrize(
    ("config", "num_tensor", "chosen", "lora"),
    [
        *((*case, None) for case in CASES.values()),
        *((small_config("internvl"), 2, "mixed", lora) for lora in ADAPTED.values()),
        *((small_config("qwen3_vl"), 2, "mixed", lora) for lora in ADAPTED.values()),
    ],
    ids=[*CASES, *(f"{family} {name}" for family in ("internvl", "qwen3_vl") for name in ADAPTED)],
)
def test_shared_layers_give_loss_and_gradients_of_whole_ones(config, num_tensor, chosen, lora):
    model = load_model(config, None if lora is None else LoraSection(**lora))
    source = plain_family_model(config).state_dict()
    check_degree(model.records, num_tensor)
    samples = [family_samples(config.model_type)[index] for index in PACKS[chosen]]
    pack, whole_layers = pack_of(model, samples), layers_of(model, source)
    adapters = {
        parameter: torch.nn.init.normal_(parameter, std=0.1)
        for layer in whole_layers
        for name, parameter in layer.named_parameters()
        if is_adapter(name)
    }
    assert bool(adapters) == (lora is not None)
    state = [layer.state_dict() for layer in whole_layers]
    loss, whole, statistics = gradients_of(model, whole_layers, pack, "none")
    assert statistics[1] > 0 and statistics[0] == pytest.approx(loss.item(), rel=1e-5)
    level = {4: "full", 2: "none"}[num_tensor] if chosen == "mixed" else "selective"

    def of_rank(ranks):
        layers = shared_layers(model, source, ranks)
        for index, layer in enumerate(layers):
            load_adapters(layer, state[index], model.slices(index, num_tensor, ranks.rank))
        loss, _, statistics = gradients_of(model, layers, pack_of(model, samples), level)
        partial = [each for layer in dict.fromkeys(layers) for each in partial_parameters(layer)]
        add_up({each: each.grad.view(-1) for each in partial}, ranks)
        return loss, disk_state(model, layers, gradients=True), statistics, [layer.state_dict() for layer in layers]

    found = on_ranks(num_tensor, of_rank)
    for index, expected in enumerate(state):
        joined = whole_state(model, index, [of_rank[3][index] for of_rank in found])
        assert joined.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in joined.items())
    for rank, (own_loss, gradients, own_statistics, _) in enumerate(found):
        assert own_loss.item() == pytest.approx(loss.item(), rel=1e-5)
        assert own_statistics.tolist() == pytest.approx(statistics.tolist(), rel=1e-5)
        assert gradients.keys() == whole.keys()
        slices = slices_of(model, num_tensor, rank)
        assert slices
        for name, gradient in gradients.items():
            if whole[name] is None:  # not trained beside adapters
                assert gradient is None, name
                continue
            expected = part_of(whole[name], slices[name]) if name in slices else whole[name]
            near = {"rtol": 1e-3, "atol": 1e-6 + 1e-4 * float(expected.abs().max())}
            assert_close(gradient, expected, **near, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", ["internvl", "qwen3_vl"])
def test_what_is_whole_in_a_block_gets_a_part_of_its_gradient_on_each_rank(family):
    model = load_model(small_config(family))
    for index, record in enumerate(model.records):
        layer = model.build_layer(index, seed=0)
        share_layer(model, index, layer, TensorGroup(0, 2))
        if record.kind.endswith("_block"):
            block = {name: each for name, each in layer.named_parameters() if name.startswith("block.")}
            whole = [each for name, each in block.items() if name not in model.slices(index, 2, 0)]
            assert len(whole) >= 2
            assert {*map(id, whole)} == {*map(id, partial_parameters(layer))}


def test_packs_in_flight_may_be_recomputed_or_not():
    """A pack above the plan's limits is recomputed between others that are not."""
    config = small_config("qwen2_vl")
    model, source = load_model(config), plain_family_model(config).state_dict()
    samples = family_samples("qwen2_vl")
    packs = {level: pack_of(model, [samples[number]]) for number, level in enumerate(LEVELS)}

    def of_rank(ranks):
        alone, together = (shared_layers(model, source, ranks) for _ in range(2))
        for level in reversed(LEVELS):
            pack_loss(alone, packs[level]).backward()
        for loss in [pack_loss(together, packs[level], level) for level in reversed(LEVELS)]:
            loss.backward()
        return [disk_state(model, layers, gradients=True) for layers in (alone, together)]

    for alone, together in on_ranks(2, of_rank):
        assert_close(together, alone)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 8])
def test_tokens_that_ranks_do_not_divide_come_back_and_nothing_beside_them(count):
    generator = torch.Generator().manual_seed(count)
    whole, weights = (torch.randn(count, 2, 3, generator=generator) for _ in range(2))

    def of_rank(ranks):
        tokens, own_whole = SharedTokens(ranks), whole.clone().requires_grad_()
        part = tokens.own(own_whole)
        gathered = tokens.gathered(part + 1)  # zeros behind the last token become ones
        scattered = tokens.scattered(gathered * (ranks.rank + 1))
        found = tokens.whole(scattered)
        (found * weights).sum().backward()
        assert part.shape == scattered.shape == (1, -(-2 * count // 4), 3)
        return gathered.detach(), found.detach(), own_whole.grad

    for gathered, found, gradient in on_ranks(4, of_rank):
        assert torch.equal(gathered, whole + 1)
        assert_close(found, 10 * (whole + 1))
        assert_close(gradient, 10 * weights)


def test_dropout_of_a_part_of_the_tokens_drops_what_whole_dropout_drops():
    whole = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))

    def of_rank(ranks):
        module = TokenDropout(0.5)
        module.tokens = SharedTokens(ranks)
        part = module.tokens.own(whole)
        with LOCK:
            torch.manual_seed(7)
            dropped = module(part)
        return module.tokens.whole(dropped), module.eval()(part) is part

    torch.manual_seed(7)
    expected = functional.dropout(whole, 0.5)
    for found, is_whole in on_ranks(4, of_rank):
        assert torch.equal(found, expected)
        assert is_whole


def test_parts_of_the_vocabulary_judge_as_the_whole():
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(3))
    logits[4] = 0.5  # all words equal
    targets = WHOLE.likeliest(logits)
    targets[5] = 6 - targets[5]

    def judged(vocabulary, own):
        logs, chosen = vocabulary.log_probabilities(own, targets)
        kept = logs.clone()
        return kept, chosen, vocabulary.gradient(logs, targets, chosen), vocabulary.likeliest(own)

    expected = judged(WHOLE, logits)
    bounds = (0, 4, 6, 7)
    found = on_ranks(
        3,
        lambda ranks: judged(
            VocabularyPart(bounds[ranks.rank], bounds[ranks.rank + 1] - bounds[ranks.rank], ranks),
            logits[:, bounds[ranks.rank] : bounds[ranks.rank + 1]],
        ),
    )
    for place in (0, 2):  # of the own words
        assert_close(torch.cat([of_rank[place] for of_rank in found], 1), expected[place])
    for of_rank in found:
        assert_close(of_rank[1], expected[1])
        assert torch.equal(of_rank[3], expected[3])


@pytest.mark.parametrize(("num_tensor", "heads", "kv_heads"), [(2, 6, 3), (4, 6, 2), (2, 4, 4), (4, 12, 6), (3, 8, 4)])
@pytest.mark.parametrize("family", TRAINED)
def test_a_profile_counts_the_blocks_of_the_fullest_rank_where_heads_do_not_divide(family, num_tensor, heads, kv_heads):
    text = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 96,
        "head_dim": 24 // heads,
    }
    model = load_model(small_config(family, text=text))
    degrees = {"vision": 1, "language": num_tensor}
    counted = analytic_profile(model.records, DEVICES["A100-80GB"], dtype="float32", tensor_parallel=degrees)
    for index, record in enumerate(model.records):
        if record.kind == "decoder_block":
            slices = model.slices(index, num_tensor, 0)
            shapes = {name: list(model.shape(path)) for name, path in model.paths(index).items()}
            for name, cut in slices.items():
                shapes[name][cut.dim] = cut.width
            held = sum(prod(shape) for shape in shapes.values())
            assert counted.layers[index].parameter_bytes == pytest.approx(4 * held, rel=0.02)
