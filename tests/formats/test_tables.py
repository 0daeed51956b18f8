"""Folders of Parquet files whose columns differ from file to file: read where they unite, else refused by name."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnibal.errors import DataError, said
from omnibal.formats.conversations import open_dataset, open_streams
from omnibal.formats.files import open_rows

TURNS = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
ASKED = [{"from": "human", "value": "What colour?"}, {"from": "gpt", "value": "red"}]
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
HELD = {"bytes": b"x", "path": "a"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a folder of files of one row each; of each the type and the value of its column of images, or None."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()

    def of(*images):
        for number, image in enumerate(images):
            columns = {"conversations": pa.array([ASKED], TURNS)}
            if image is not None:
                columns["image"] = pa.array([image[1]], image[0])
            pq.write_table(pa.table(columns), folder / f"{number}.parquet")
        return folder

    return of


@pytest.mark.parametrize(
    ("first", "second", "read"),
    [
        ((pa.null(), None), (PICTURE, HELD), [None, HELD]),
        ((PICTURE, HELD), (pa.null(), None), [HELD, None]),
        ((pa.null(), None), (pa.string(), "a.png"), [None, "a.png"]),
        ((pa.list_(pa.null()), []), (pa.list_(PICTURE), [HELD]), [[], [HELD]]),
        ((pa.struct([("bytes", pa.binary()), ("path", pa.null())]), {"bytes": b"y"}), (PICTURE, HELD),
         [{"bytes": b"y", "path": None}, HELD]),
        (None, (PICTURE, HELD), [None, HELD]),
        ((PICTURE, HELD), None, [HELD, None]),
        ((pa.large_string(), "b.png"), (pa.string(), "a.png"), ["b.png", "a.png"]),
    ],
)  # fmt: skip
def test_columns_that_are_empty_in_a_file_are_read(write, first, second, read):
    rows = open_rows(write(first, second))
    assert [row.read()["image"] for row in rows] == read


def test_rows_without_pictures_and_with_them_are_trained(write, model_folder):
    folder = write((pa.null(), None), (PICTURE, None), (PICTURE, None))
    dataset = open_dataset(folder, model_folder)
    assert len(dataset.lengths()) == len(list(next(iter(open_streams(folder, model_folder).values())))) == 3


def test_columns_that_do_not_unite_are_named_with_their_files_and_types(write):
    folder = write((pa.null(), None), (PICTURE, HELD), (pa.string(), "a.png"))
    message = r"column 'image' must have one type in all files, got struct<.*> in .*1\.parquet and string in .*2\.parq"
    with pytest.raises(DataError, match=message):
        open_rows(folder)


def test_what_a_package_keeps_as_the_cause_of_an_error_is_said():
    try:
        raise datasets.exceptions.DatasetGenerationError("An error occurred") from KeyError("image")
    except datasets.exceptions.DatasetGenerationError as error:
        assert said(error) == "DatasetGenerationError: An error occurred: KeyError: 'image'"
    try:
        raise ValueError("no picture") from KeyError("image")
    except ValueError as error:
        assert said(error) == "no picture"
