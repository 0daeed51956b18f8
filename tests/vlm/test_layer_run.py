import pytest
import torch

from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.vlm import load_model
from omnibal.vlm.layer_run import MadePack, made_packs
from omnibal.vlm.payload import Layout
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
    assert max(pack.tiles for pack in packs) == 10 // TOKENS_PER_TILE
    assert made_packs(MODEL, PackLimits(0, 1))[0] == MadePack(0, (1,))


def test_the_load_of_a_pack():
    assert MadePack(3, (4, 2)).load == Load(3, 6, 20)


@pytest.mark.parametrize("pack", made_packs(MODEL, PackLimits(8, 120)))
def test_a_payload_runs_through_the_model(pack):
    payload = pack.payload(MODEL, dtype=torch.bfloat16)
    pixels, ids, positions, bounds = Layout().flatten(payload)
    assert pixels.shape == (pack.tiles, *PIXEL_SHAPE)
    assert pixels.dtype == torch.bfloat16
    assert (ids == IMAGE_TOKEN).sum() == pack.tiles * TOKENS_PER_TILE
    assert bounds.tolist() == [sum(pack.lengths[:i]) for i in range(len(pack.lengths) + 1)]
    assert positions[0, bounds[:-1].long()].tolist() == [0] * len(pack.lengths)
    assert [tensor.dtype for tensor in (ids, positions, bounds)] == [torch.int64, torch.int64, torch.int32]
    for index in range(len(MODEL.records)):
        payload = MODEL.build_layer(index, seed=0, dtype=torch.bfloat16)(payload)
    assert payload.hidden.shape[1] == pack.tokens
