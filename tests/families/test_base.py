import pytest

from omnibal.errors import ConfigError
from omnibal.families.base import LayerRecord, check_frozen

RECORDS = [
    LayerRecord("patches", "patches", {"parameters": 12, "untrained": 2}, module="vision"),
    LayerRecord("block.0", "block", {"parameters": 30}, module="vision"),
    LayerRecord("embedding", "embedding", {"parameters": 5}, tied_key="embedding", module="language"),
    LayerRecord("head", "head", {"parameters": 5}, tied_key="embedding", module="language"),
]


def test_parameters_that_get_a_gradient():
    assert [record.trainable_parameters([]) for record in RECORDS] == [10, 30, 5, 5]
    assert [record.trainable_parameters(["patches", "head"]) for record in RECORDS] == [0, 30, 5, 0]


@pytest.mark.parametrize("frozen", [[], ["patches"], ["patches", "block"], ["embedding", "head"]])
def test_kinds_that_can_be_frozen(frozen):
    check_frozen(RECORDS, frozen)


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (
            ["block.0"],
            r"frozen must hold kinds of the model's layers \(patches, block, embedding, head\), got 'block.0'",
        ),
        (["head"], "frozen must hold all kinds that share weights, got 'head' without 'embedding'"),
        (["patches", "block", "embedding", "head"], "frozen must leave layers to train"),
    ],
)
def test_kinds_that_cannot_be_frozen(frozen, message):
    with pytest.raises(ConfigError, match=message):
        check_frozen(RECORDS, frozen)
