import pytest

from omnibal.data.sources import survey
from omnibal.data.sources.measured import measure_lengths
from omnibal.errors import DataError

ITEMS = [{"tiles": tiles, "text": "word " * words} for tiles, words in [(1, 3), (0, 5), (4, 1), (2, 2)]]


def loads(item):
    return {"vision_units": item["tiles"], "llm_tokens": len(item["text"].split())}


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_lists_and_iterables(kind):
    measured = measure_lengths(kind(ITEMS), loads)
    assert measured.lengths.vision_units.tolist() == [1, 0, 4, 2]
    assert measured.lengths.llm_tokens.tolist() == [3, 5, 1, 2]
    assert measured.lengths.target_tokens is None
    assert measured.problems == ()


def test_several_processes_find_the_same(monkeypatch):
    monkeypatch.setattr(survey, "ITEMS_WORTH_A_PROCESS", 4)
    monkeypatch.setattr(survey, "CHUNK_ITEMS", 3)
    several = measure_lengths(ITEMS * 10, loads, processes=2)
    alone = measure_lengths(iter(ITEMS * 10), loads)
    assert several.lengths.content_hash == alone.lengths.content_hash


def test_further_columns():
    measured = measure_lengths(
        ITEMS,
        lambda item: loads(item) | {"target_tokens": 1, "source": item["tiles"] % 2},
        columns=("vision_units", "llm_tokens", "target_tokens", "source"),
    )
    assert measured.lengths.target_tokens.tolist() == [1] * 4
    assert measured.lengths.source.tolist() == [1, 0, 0, 0]


BROKEN = [ITEMS[0], {"tiles": 1}, ITEMS[1], {"tiles": -1, "text": ""}, {"tiles": 1.5, "text": ""}, ITEMS[2]]


def test_unusable_items_are_refused_in_one_report():
    with pytest.raises(DataError) as error:
        measure_lengths(BROKEN, loads, name="captions")
    message = str(error.value)
    assert "3 of 6 items cannot be used" in message
    assert "captions, line 2: KeyError: 'text'" in message
    assert "captions, line 4: ValueError: vision_units must be an integer of at least 0, got -1" in message
    assert "captions, line 5: ValueError: vision_units must be an integer of at least 0, got 1.5" in message


def test_skipped_items_are_told_by_number():
    measured = measure_lengths(BROKEN, loads, broken="skip")
    assert measured.lengths.vision_units.tolist() == [1, 0, 4]
    assert measured.broken_items.tolist() == [1, 3, 4]
    assert [problem.line for problem in measured.problems] == [2, 4, 5]


@pytest.mark.parametrize("columns", [("vision_units",), ("vision_units", "llm_tokens", "pixels")])
def test_unknown_or_missing_columns_are_refused(columns):
    with pytest.raises(DataError, match="columns must be of"):
        measure_lengths(ITEMS, loads, columns=columns)


@pytest.mark.parametrize("items", [[], iter([])])
def test_no_item_is_refused(items):
    with pytest.raises(DataError, match="at least one item"):
        measure_lengths(items, loads)
