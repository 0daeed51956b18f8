import pytest
import torch

from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.vlm import load_model
from omnibal.vlm.measure import MadePack, made_packs
from omnibal.vlm.payload import SentTensors
from tests.families.models import small_config
from tests.vlm.models import IMAGE_TOKEN, PIXEL_SHAPE, TOKENS_PER_TILE, tiny_config

MODEL = load_model(tiny_config())


def test_packs_are_shares_of_the_limits_with_and_without_images():
    packs = made_packs(MODEL, PackLimits(8, 120))
    assert packs == [
        MadePack(0, (8, 8, 7, 7)),
        MadePack(2, (30,)),
        MadePack(0, (15,) * 4),
        MadePack(4, (60,)),
        MadePack(0, (30,) * 4),
        MadePack(8, (120,)),
    ]


def test_no_sample_is_longer_than_the_models_positions():
    # max_position_embeddings is 128
    assert made_packs(MODEL, PackLimits(0, 1000))[-1] == MadePack(0, (125,) * 8)


def test_images_fit_into_the_tokens():
    packs = made_packs(MODEL, PackLimits(50, 10))
    assert max(pack.units for pack in packs) == 10 // TOKENS_PER_TILE
    assert made_packs(MODEL, PackLimits(0, 1))[0] == MadePack(0, (1,))


def test_the_load_of_a_pack():
    assert MadePack(3, (4, 2)).load == Load(3, 6, 20, 9, 5)
    assert MadePack(8, (4, 2), 2).load == Load(8, 6, 20, 32, 5)


def test_images_of_any_size_are_one_and_four_to_a_pack():
    """As many patches as square images can have; no more tokens than a sample."""
    packs = made_packs(load_model(small_config("qwen2_vl")), PackLimits(420, 90))[-3:]
    assert packs == [MadePack(0, (23, 23, 22, 22)), MadePack(4 * 64, (23, 23, 22, 22), 4), MadePack(18 * 18, (90,))]


def test_canvases_are_as_large_as_the_units_allow():
    model = load_model(small_config("llava_next"))  # canvases of up to 36 tiles, and the whole image once more
    assert [pack.units for pack in made_packs(model, PackLimits(80, 4000))[1::2]] == [19, 37, 74]
    assert [pack.units for pack in made_packs(model, PackLimits(2, 4000))[1::2]] == [0, 0, 2]


@pytest.mark.parametrize("pack", made_packs(MODEL, PackLimits(8, 120)))
def test_a_payload_runs_through_the_model(pack):
    payload = pack.payload(MODEL, dtype=torch.bfloat16)
    pixels, ids, positions, bounds = SentTensors().flatten(payload)
    assert pixels.shape == (pack.units, *PIXEL_SHAPE)
    assert pixels.dtype == torch.bfloat16
    assert (ids == IMAGE_TOKEN).sum() == pack.units * TOKENS_PER_TILE
    assert bounds.tolist() == [sum(pack.lengths[:i]) for i in range(len(pack.lengths) + 1)]
    assert positions[0, bounds[:-1].long()].tolist() == [0] * len(pack.lengths)
    assert [tensor.dtype for tensor in (ids, positions, bounds)] == [torch.int64, torch.int64, torch.int32]
    for index in range(len(MODEL.records)):
        payload = MODEL.build_layer(index, seed=0, dtype=torch.bfloat16)(payload)
    assert payload.hidden.shape[1] == pack.tokens
