"""Layers that tensor ranks share compute what whole ones compute."""

import pytest
import torch
from torch.testing import assert_close

from omnibal.config import LoraSection
from omnibal.families.cuts import check_degree
from omnibal.loss import WHOLE
from omnibal.vlm import load_model
from omnibal.vlm.layers import is_adapter
from omnibal.vlm.tensor import VocabularyPart, add_up, part_of, partial_parameters, whole_state
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
    level = "full" if num_tensor == 4 else "selective"

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
