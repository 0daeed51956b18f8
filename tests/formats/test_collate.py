import pytest

torch = pytest.importorskip("torch")

from omnibal.formats.collate import pack_samples  # noqa: E402

SHAPE = (3, 4, 4)


def item(ids, labels, tiles=None):
    pixels = None if tiles is None else torch.rand(tiles, *SHAPE)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "pixel_values": pixels}


def test_samples_lie_one_after_another():
    items = [item([5, 6, 7], [-100, 6, 7], tiles=2), item([8, 9], [8, 9]), item([4], [-100], tiles=1)]
    pack = pack_samples(items, pad_token_id=0, pixel_shape=SHAPE)
    assert pack["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4]]
    assert pack["labels"].tolist() == [[-100, 6, 7, -100, 9, -100]]
    assert pack["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert pack["cu_seq_lens"].tolist() == [0, 3, 5, 6]
    assert pack["pixel_values"].equal(torch.cat([items[0]["pixel_values"], items[2]["pixel_values"]]))
    assert items[1]["labels"].tolist() == [8, 9], "the dataset's own labels stay as they are"


@pytest.mark.parametrize("items", [[], [item([5], [-100])]])
def test_types_and_shapes_do_not_depend_on_the_content(items):
    pack = pack_samples(items, pad_token_id=0, pixel_shape=SHAPE)
    assert {key: (value.dtype, tuple(value.shape)) for key, value in pack.items()} == {
        "input_ids": (torch.int64, (1, 1)),
        "labels": (torch.int64, (1, 1)),
        "position_ids": (torch.int64, (1, 1)),
        "cu_seq_lens": (torch.int32, (2,)),
        "pixel_values": (torch.float32, (0, *SHAPE)),
    }


def test_an_empty_pack_is_one_token_without_a_target():
    pack = pack_samples([], pad_token_id=7, pixel_shape=SHAPE)
    assert pack["input_ids"].tolist() == [[7]]
    assert pack["labels"].tolist() == [[-100]]
    assert pack["cu_seq_lens"].tolist() == [0, 1]
