import pytest

from omnibal.errors import ConfigError
from omnibal.families import layer_records
from omnibal.families.base import (
    LayerRecord,
    TrainedCount,
    check_frozen,
    spelled_out,
    trained_by_module,
    trained_in_words,
)
from tests.families.models import small_config

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


BLOCKS = {"qwen2_5_vl": "window_block", "qwen3_vl": "deepstack_block"}


@pytest.mark.parametrize(("family", "other"), BLOCKS.items())
def test_the_common_name_freezes_all_blocks_of_a_vit(family, other):
    records = layer_records(small_config(family).to_dict())
    kinds = (other, "patch_embedding", "vision_block")
    for frozen in (["vision"], ["vision_block", "patch_embedding"], list(kinds), ["vision", "only:vision_block"]):
        assert check_frozen(records, frozen) == spelled_out(records, frozen) == tuple(sorted(kinds))
        assert {r.name for r in records if r.trainable_parameters(frozen)} == {
            r.name for r in records if r.module != "vision"
        }


@pytest.mark.parametrize(("family", "other"), BLOCKS.items())
def test_some_blocks_are_frozen_by_kind_only_where_the_list_says_so(family, other):
    records = layer_records(small_config(family).to_dict())
    message = (
        f"frozen must hold all of a module's blocks or say that it does not, got '{other}', which leaves 2 of 4 to "
        f"train; 'vision_block' freezes all of them, 'only:{other}' these alone"
    )
    with pytest.raises(ConfigError, match=message):
        check_frozen(records, [other, "patch_embedding", "projector"])
    for kind in (other, "vision_block"):
        assert check_frozen(records, [f"only:{kind}", "projector"]) == (f"only:{kind}", "projector")
        trained = {r.kind for r in records if r.module == "vision" and r.trainable_parameters([f"only:{kind}"])}
        assert trained == {"patch_embedding", other, "vision_block"} - {kind}
    with pytest.raises(ConfigError, match=r"kinds of the model's layers \(.*vision_block.*\), .* got 'only:block'"):
        check_frozen(records, ["only:block"])


def test_what_modules_train_in_words():
    trained = trained_by_module((record, record.trained(["patches", "embedding", "head"])) for record in RECORDS)
    assert trained == {"vision": TrainedCount(30, 42), "language": TrainedCount(0, 5)}
    millions = {name: TrainedCount(*(number * 1_000_000 for number in numbers)) for name, numbers in trained.items()}
    assert trained_in_words(millions) == "vision 30.0 of 42.0 M, language none of 5.0 M"
    deep = layer_records(small_config("qwen3_vl").to_dict())
    assert [*trained_by_module((record, record.trained(())) for record in deep)] == [
        "vision (deep-stack mergers included)", "projector", "language"
    ]  # fmt: skip
