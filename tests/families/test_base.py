import pytest

from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, check_frozen

WORDS = {"embed.weight": 5}
RECORDS = [
    LayerRecord("patches", "patches", {"parameters": 12, "untrained": 2}, module="vision", weights={"conv": 10}),
    LayerRecord(
        "block.0", "block", {"parameters": 30}, module="vision", weights={"blocks.0.weight": 24, "blocks.0.bias": 6}
    ),
    LayerRecord("embedding", "embedding", {"parameters": 5}, tied_key="e", module="language", weights=WORDS),
    LayerRecord("head", "head", {"parameters": 5}, tied_key="e", module="language", weights=WORDS),
]


def test_parameters_that_get_a_gradient():
    assert [record.trainable_parameters([]) for record in RECORDS] == [10, 30, 5, 5]
    assert [record.trainable_parameters(["patches", "head"]) for record in RECORDS] == [0, 30, 5, 0]
    assert [record.trainable_parameters(["vision"]) for record in RECORDS] == [0, 0, 5, 5]
    assert [record.trainable_parameters(["blocks.*.w*", "embed*"]) for record in RECORDS] == [10, 6, 0, 0]
    assert [record.trainable_parameters(["*.bias", "*.0.*", "block"]) for record in RECORDS] == [10, 0, 5, 5]


@pytest.mark.parametrize(
    ("frozen", "parts"),
    [
        ([], ()),
        (["patches", "patches"], ("patches",)),
        (["patches", "block"], ("block", "patches")),
        (["vision"], ("block", "patches")),
        (["vision", "block"], ("block", "patches")),
        (["embedding", "head"], ("embedding", "head")),
        (["language", "*.bias"], ("*.bias", "embedding", "head")),
        (["embed.weight"], ("embed.weight",)),
    ],
)
def test_what_can_be_frozen(frozen, parts):
    assert check_frozen(RECORDS, frozen) == parts


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (
            ["block.0"],
            r"frozen must hold kinds of the model's layers \(patches, block, embedding, head\), modules \(vision, "
            r"language\) or patterns of its weights' names, got 'block.0'; did you mean 'block' or 'blocks.0.bias' or",
        ),
        (["*.blocks.9.*"], r"got '\*\.blocks\.9\.\*'; did you mean 'blocks.0.bias'"),
        (["q!"], "got 'q!'$"),
        (["head"], "frozen must hold all kinds that share weights, got 'head' without 'embedding'"),
        (["patches", "block", "embedding", "head"], "frozen must leave layers to train"),
        (["*"], r"frozen must leave layers to train, got all of them by '\*'"),
    ],
)
def test_what_cannot_be_frozen(frozen, message):
    with pytest.raises(ConfigError, match=message):
        check_frozen(RECORDS, frozen)
