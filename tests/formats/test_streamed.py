"""Annotation files that are read line by line: the samples of the file, in its order, from any place on."""

import itertools
import logging

import pytest
import torch

from omnibal.errors import DataError
from omnibal.formats.conversations import open_dataset, open_streams

TURNS = [("human", "<image>\nWhat is red?"), ("gpt", "the ball")]
NUMBERS = range(9)


def records():
    """Nine samples that can be told apart; every third is a text."""
    for number in NUMBERS:
        text = [("human", f"What is {number}?"), ("gpt", f"It is {number}.")]
        yield (text, []) if number % 3 == 2 else (TURNS, [(60 + number, 50)])


def assert_same(streamed, dataset, numbers):
    numbers = list(numbers)
    assert len(streamed) == len(numbers)
    for sample, number in zip(streamed, numbers, strict=True):
        for name, value in dataset[number].items():
            assert value is sample[name] is None or torch.equal(value, sample[name])


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_those_of_the_file_in_its_order(write_dataset, model_folder, workers):
    meta = write_dataset(list(records()))
    dataset = open_dataset(meta, model_folder)
    stream = open_streams(meta, model_folder, workers=workers)["shapes"]
    assert_same([*stream], dataset, NUMBERS)
    assert_same([*stream], dataset, NUMBERS)  # a second pass
    assert_same([*stream.part(1, 2)], dataset, NUMBERS[1::2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_it_stood(write_dataset, model_folder, workers):
    meta = write_dataset(list(records()))
    stream = open_streams(meta, model_folder, workers=workers)["shapes"].part(0, 2)
    begun = iter(stream)
    list(itertools.islice(begun, 2))
    state = stream.state_dict()
    begun.close()
    again = open_streams(meta, model_folder, workers=workers)["shapes"].part(0, 2)
    again.load_state_dict(state)
    assert_same([*again], open_dataset(meta, model_folder), [4, 6, 8])
    assert_same([*again], open_dataset(meta, model_folder), NUMBERS[::2])  # then from the beginning


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_broken_is_refused_or_left_out_and_named(write_dataset, model_folder, workers, caplog):
    meta = write_dataset([TURNS_OF_ONE, "", '{"conversations"', TURNS_OF_ONE])
    stream = open_streams(meta, model_folder, workers=workers)["shapes"]
    with pytest.raises(DataError, match=r"shapes.jsonl, line 3: entry must be JSON, got Expecting ':' delimiter"):
        list(stream)
    with caplog.at_level(logging.WARNING):
        assert len(list(open_streams(meta, model_folder, workers=workers, broken="skip")["shapes"])) == 2
    assert "A sample is left out: " in caplog.text
    assert "shapes.jsonl, line 3" in caplog.text


TURNS_OF_ONE = ([("human", "What?"), ("gpt", "That.")], [])


@pytest.mark.parametrize(
    ("content", "found"), [("[{}]", "a JSON array"), ("\ufeff [{}]", "a JSON array"), ("\n \n", "nothing")]
)
def test_what_is_no_json_lines_is_refused(tmp_path, model_folder, content, found):
    path = tmp_path / "train.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=f"must be JSON lines to be read as a stream, got {found} in .*train"):
        open_streams(path, model_folder)


def test_a_file_that_is_not_there_is_named(tmp_path, model_folder):
    with pytest.raises(DataError, match=r"dataset must be a readable text file, got .*none\.jsonl"):
        open_streams(tmp_path / "none.jsonl", model_folder)
