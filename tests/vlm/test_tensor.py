"""Layers that tensor ranks share compute what whole ones compute."""

import pytest
from torch.testing import assert_close

from omnibal.families.cuts import check_degree
from omnibal.vlm import load_model
from omnibal.vlm.tensor import add_up, part_of, partial_parameters
from tests.families.models import small_config
from tests.vlm.families import TRAINED, family_samples, layers_of, pack_of, plain_family_model, tied_config
from tests.vlm.models import disk_state, pack_loss
from tests.vlm.tensor import on_ranks, shared_layers

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
}  # fmt: skip


def gradients_of(model, layers, pack, level):
    loss = pack_loss(layers, pack, level)
    loss.backward()
    return loss.detach(), disk_state(model, layers, gradients=True)


@pytest.mark.parametrize(("config", "num_tensor", "chosen"), CASES.values(), ids=CASES)
def test_shared_layers_give_loss_and_gradients_of_whole_ones(config, num_tensor, chosen):
    model, source = load_model(config), plain_family_model(config).state_dict()
    check_degree(model.records, num_tensor)
    samples = [family_samples(config.model_type)[index] for index in PACKS[chosen]]
    pack = pack_of(model, samples)
    loss, whole = gradients_of(model, layers_of(model, source), pack, "none")
    level = "full" if num_tensor == 4 else "selective"

    def of_rank(ranks):
        layers = shared_layers(model, source, ranks)
        loss, _ = gradients_of(model, layers, pack_of(model, samples), level)
        partial = [each for layer in dict.fromkeys(layers) for each in partial_parameters(layer)]
        add_up({each: each.grad.view(-1) for each in partial}, ranks)
        return loss, disk_state(model, layers, gradients=True)

    for rank, (own_loss, gradients) in enumerate(on_ranks(num_tensor, of_rank)):
        assert own_loss.item() == pytest.approx(loss.item(), rel=1e-5)
        assert gradients.keys() == whole.keys()
        slices = {}
        for index in range(len(model.records)):
            names = model.weight_names(index)
            slices |= {names[name]: own for name, own in model.slices(index, num_tensor, rank).items()}
        assert slices
        for name, gradient in gradients.items():
            expected = part_of(whole[name], slices[name]) if name in slices else whole[name]
            near = {"rtol": 1e-3, "atol": 1e-6 + 1e-4 * float(expected.abs().max())}
            assert_close(gradient, expected, **near, msg=lambda text, name=name: f"{name}: {text}")
