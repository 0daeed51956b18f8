"""Folders of Parquet files whose columns differ: read where datasets casts them to the first file's, else refused."""

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
        ((PICTURE, HELD), (pa.null(), None), [HELD, None]),
        ((PICTURE, HELD), None, [HELD, None]),
        ((pa.large_string(), "b.png"), (pa.string(), "a.png"), ["b.png", "a.png"]),
    ],
)
def test_columns_that_a_later_file_lacks_are_read(write, first, second, read):
    rows = open_rows(write(first, second))
    assert [row.read()["image"] for row in rows] == read


def test_rows_without_pictures_and_with_them_are_trained(write, model_folder):
    folder = write((PICTURE, None), (PICTURE, None), (pa.null(), None))
    dataset = open_dataset(folder, model_folder)
    assert len(dataset.lengths()) == len(list(next(iter(open_streams(folder, model_folder).values())))) == 3


@pytest.mark.parametrize("first", [(pa.null(), None), (pa.string(), "a.png"), None])
def test_columns_that_cannot_be_cast_to_the_first_files_are_refused(write, first):
    with pytest.raises(DataError, match=r"must be a table that datasets can load, got .*data: .*cast"):
        open_rows(write(first, (PICTURE, HELD)))


def test_what_a_package_keeps_as_the_cause_of_an_error_is_said():
    try:
        raise datasets.exceptions.DatasetGenerationError("An error occurred") from KeyError("image")
    except datasets.exceptions.DatasetGenerationError as error:
        assert said(error) == "DatasetGenerationError: An error occurred: KeyError: 'image'"
    try:
        raise ValueError("no picture") from KeyError("image")
    except ValueError as error:
        assert said(error) == "no picture"
