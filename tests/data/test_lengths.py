import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.data.lengths import SampleLengths
from omnibal.errors import DataError
from tests.data.strategies import sample_lengths


def full_lengths():
    return SampleLengths(
        [1, 5, 0], [300, 1400, 40], target_tokens=[10, 20, 30], vision_squared=[2**40, 25, 0], source=[0, 0, 1]
    )


def test_columns_have_fixed_types_and_are_read_only():
    lengths = full_lengths()
    types = {name: column.dtype for name, column in lengths.columns().items()}
    assert types == {
        "vision_units": np.int32,
        "llm_tokens": np.int32,
        "target_tokens": np.int32,
        "vision_squared": np.int64,
        "source": np.int32,
    }
    with pytest.raises(ValueError, match="read-only"):
        lengths.vision_units[0] = 3


def test_a_given_array_stays_writable():
    given_column = np.array([1, 2], dtype=np.int32)
    SampleLengths(given_column, [1, 2])
    given_column[0] = 5
    assert given_column.tolist() == [5, 2]


def test_optional_columns_are_absent_by_default():
    lengths = SampleLengths([1], [2])
    assert list(lengths.columns()) == ["vision_units", "llm_tokens"]
    assert lengths.target_tokens is lengths.vision_squared is lengths.source is None
    assert lengths.summary.total_target_tokens is None


@given(sample_lengths())
def test_summary(lengths):
    summary = lengths.summary
    assert summary.num_samples == len(lengths) == len(lengths.vision_units)
    assert summary.total_vision_units == sum(lengths.vision_units.tolist())
    assert summary.total_llm_tokens == sum(lengths.llm_tokens.tolist())
    assert summary.max_vision_units == max(lengths.vision_units.tolist(), default=0)
    assert summary.max_llm_tokens == max(lengths.llm_tokens.tolist(), default=0)


def test_totals_exceed_32_bits():
    assert SampleLengths([0, 0], [2**31 - 1] * 2).summary.total_llm_tokens == 2**32 - 2


@pytest.mark.parametrize(
    ("vision_units", "llm_tokens", "message"),
    [
        ([1, -2], [1, 1], r"vision_units must lie between 0 and 2147483647, got -2 for sample 1"),
        ([1, 1], [1, 2**31], r"llm_tokens must lie between 0 and 2147483647, got 2147483648 for sample 1"),
        ([1, 2], [1], r"llm_tokens must have one entry per sample \(2\), got 1"),
        ([1.5], [1], r"vision_units must hold integers, got float64"),
        ([[1]], [1], r"vision_units must be one-dimensional, got shape \(1, 1\)"),
        ([1, [2]], [1, 1], r"vision_units must be one-dimensional, got \[1, \[2\]\]"),
        ([1, float("nan")], [1, 1], r"vision_units must hold integers, got float64"),
    ],
)
def test_bad_columns_are_refused(vision_units, llm_tokens, message):
    with pytest.raises(DataError, match=message):
        SampleLengths(vision_units, llm_tokens)


def test_units_of_videos_are_part_of_all_units():
    lengths = SampleLengths([8, 40, 6, 0], [9, 50, 8, 5], video_units=[0, 40, 2, 0])
    assert lengths.kinds.tolist() == [1, 2, 3, 0]
    assert lengths.take([2]).video_units.tolist() == [2]
    assert SampleLengths([3, 0], [9, 9]).kinds.tolist() == [1, 0]
    with pytest.raises(DataError, match="video_units must be part of vision_units, got 9 of 8 for sample 1"):
        SampleLengths([10, 8], [20, 20], video_units=[1, 9])


def test_save_and_load_map_the_same_columns(tmp_path):
    lengths = full_lengths()
    lengths.save(tmp_path / "lengths")
    loaded = SampleLengths.load(tmp_path / "lengths")
    assert list(loaded.columns()) == list(lengths.columns())
    for name, column in loaded.columns().items():
        np.testing.assert_array_equal(column, lengths.columns()[name])
        assert column.dtype == lengths.columns()[name].dtype
        assert isinstance(column.base, np.memmap)
        assert type(column) is np.ndarray
        assert not column.flags.writeable
    assert loaded.summary == lengths.summary
    assert loaded.content_hash == lengths.content_hash


def test_summary_and_hash_of_a_saved_copy_are_not_computed_again(tmp_path, monkeypatch):
    full_lengths().save(tmp_path)
    monkeypatch.setattr("hashlib.blake2b", None)
    loaded = SampleLengths.load(tmp_path)
    assert loaded.content_hash
    assert "summary" in vars(loaded)


def test_saving_over_other_lengths(tmp_path):
    full_lengths().save(tmp_path)
    SampleLengths([1], [2]).save(tmp_path)
    assert list(SampleLengths.load(tmp_path).columns()) == ["vision_units", "llm_tokens"]


def test_saving_lengths_over_themselves(tmp_path):
    full_lengths().save(tmp_path)
    loaded = SampleLengths.load(tmp_path)
    loaded.save(tmp_path)
    again = SampleLengths.load(tmp_path)
    for lengths in (loaded, again):
        assert {name: column.tolist() for name, column in lengths.columns().items()} == {
            name: column.tolist() for name, column in full_lengths().columns().items()
        }


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    full_lengths().save(tmp_path)
    files = sorted(tmp_path.iterdir())

    def disk_is_full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "save", disk_is_full)
    with pytest.raises(OSError, match="no space"):
        SampleLengths([1], [2]).save(tmp_path)
    assert SampleLengths.load(tmp_path).content_hash == full_lengths().content_hash
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": ["llm_tokens"]}, "must list columns of .* got ."),
        ({"columns": 3}, "lengths.json.columns must be a valid array, got 3; measure again"),
        ({"columns": ["vision_units", "llm_tokens", "colour"]}, "must list columns of .*colour"),
        ({"content_hash": None}, "content_hash must be a valid string, got None"),
        ({"summary": {"num_samples": 3}}, "summary must have the key 'total_vision_units'"),
        ({"more": 1}, "more must be a known key, got 'more'"),
    ],
)
def test_a_summary_that_is_not_what_was_written(tmp_path, change, message):
    full_lengths().save(tmp_path)
    record = json.loads((tmp_path / "lengths.json").read_text())
    (tmp_path / "lengths.json").write_text(json.dumps(record | change))
    with pytest.raises(DataError, match=message):
        SampleLengths.load(tmp_path)


def test_an_interrupted_or_damaged_copy_is_refused(tmp_path):
    full_lengths().save(tmp_path)
    np.save(tmp_path / "source.npy", np.zeros(2, dtype=np.int32))
    with pytest.raises(DataError, match=r"source.npy must hold 3 samples as lengths.json says, got 2"):
        SampleLengths.load(tmp_path)
    np.save(tmp_path / "source.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"source.npy must be one-dimensional of int32, got float64"):
        SampleLengths.load(tmp_path)
    (tmp_path / "source.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"source.npy must be a column that SampleLengths.save wrote"):
        SampleLengths.load(tmp_path)
    (tmp_path / "lengths.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="must have format 1, got 99"):
        SampleLengths.load(tmp_path)
    (tmp_path / "lengths.json").unlink()
    with pytest.raises(DataError, match=r"must be a folder of lengths, written completely"):
        SampleLengths.load(tmp_path)


def test_saved_lengths_are_pickled_as_their_folder(tmp_path):
    lengths = SampleLengths(np.arange(10_000), np.arange(10_000))
    lengths.save(tmp_path)
    packed = pickle.dumps(SampleLengths.load(tmp_path))
    assert len(packed) < 1000
    again = pickle.loads(packed)
    assert again.content_hash == pickle.loads(pickle.dumps(lengths)).content_hash == lengths.content_hash
    assert isinstance(again.llm_tokens.base, np.memmap)
    full_lengths().save(tmp_path)
    with pytest.raises(DataError, match="must hold the lengths that were pickled, got others"):
        pickle.loads(packed)


def test_the_hash_tells_different_lengths_apart():
    lengths = full_lengths()
    hashes = {
        lengths.content_hash,
        lengths.take([0, 2, 1]).content_hash,
        SampleLengths(lengths.vision_units, lengths.llm_tokens).content_hash,
        SampleLengths([], []).content_hash,
    }
    assert len(hashes) == 4
    assert lengths.content_hash == full_lengths().content_hash


@given(st.lists(sample_lengths(max_samples=5), min_size=1, max_size=4))
def test_concatenate_numbers_the_parts(parts):
    joined = SampleLengths.concatenate(parts)
    assert joined.vision_units.tolist() == [units for part in parts for units in part.vision_units.tolist()]
    assert joined.source.tolist() == [number for number, part in enumerate(parts) for _ in range(len(part))]


def test_concatenate_refuses_unequal_columns_and_nothing():
    with pytest.raises(DataError, match="part 1 must have the columns of the part before"):
        SampleLengths.concatenate([full_lengths(), SampleLengths([1], [2])])
    with pytest.raises(DataError, match="at least one"):
        SampleLengths.concatenate([])


def test_token_length_files(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(
        json.dumps([{"vit_num": 5, "token_num": 1341, "image_flags": 5}, {"vit_num": 1, "token_num": 307}])
    )
    second.write_text(json.dumps([{"vit_num": 3, "token_num": 900}]))
    lengths = SampleLengths.from_token_lengths([first, second])
    assert lengths.vision_units.tolist() == [5, 1, 3]
    assert lengths.llm_tokens.tolist() == [1341, 307, 900]
    assert lengths.source.tolist() == [0, 0, 1]
    assert lengths.source_names == ("a", "b")
    assert len(SampleLengths.from_token_lengths(str(second))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "bad.json must be a readable JSON file"),
        ("{}", "bad.json must hold a JSON list, got dict"),
        ('[{"vit_num": 1, "token_num": 2}, {"vit_num": 1}]', "bad.json, entry 1: vit_num and token_num must be"),
        ('[{"vit_num": -1, "token_num": 2}]', "bad.json, entry 0"),
        ('[{"vit_num": true, "token_num": 2}]', "bad.json, entry 0"),
        ("[3]", "bad.json, entry 0"),
        ('[{"vit_num": 1, "token_num": NaN}]', "bad.json, entry 0"),
        ('[{"vit_num": 1, "token_num": 2147483648}]', "bad.json, entry 0: .* from 0 to 2147483647"),
    ],
)
def test_broken_token_length_files(tmp_path, text, message):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(DataError, match=message):
        SampleLengths.from_token_lengths(tmp_path / "bad.json")


def test_a_token_length_file_with_a_byte_order_mark(tmp_path):
    (tmp_path / "windows.json").write_text('[{"vit_num": 1, "token_num": 2}]', encoding="utf-8-sig")
    assert len(SampleLengths.from_token_lengths(tmp_path / "windows.json")) == 1


def test_a_missing_token_length_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent.json must be a readable JSON file"):
        SampleLengths.from_token_lengths(tmp_path / "absent.json")
