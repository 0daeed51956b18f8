import hjson
import pytest

from omnibal.config import read_config
from omnibal.errors import ConfigError
from omnibal.records import load_json, parse_json, parse_relaxed, read_json

ENCODERS = {
    "spred": "encoder must be an object or 'spread', got 'spred'",
    '{"num_stages": 1}': "encoder must have the key 'num_replicas', got none",
    '{"num_replicas": 0}': "encoder.num_replicas must be greater than or equal to 1, got 0",
    '{"num_replicas": 1, "place": 2}': "encoder.place must be a known key, got 'place'; known keys are num_stages, nu",
}


@pytest.mark.parametrize("value", ENCODERS)
def test_where_a_record_or_a_word_is_possible_one_sentence_says_what_is_wrong(value):
    asked = parse_json(value) if value.startswith("{") else value
    with pytest.raises(ConfigError, match=rf"^omnibal\.pipeline\.{ENCODERS[value]}[^;]*$"):
        read_config({"omnibal": {"pipeline": {"encoder": asked}}})


UNREADABLE = {
    "nested": (b"[" * 100_000, "brackets nest too deeply"),
    "binary": (bytes(range(128, 256)), "can't decode byte 0x80"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
    "half a character": (b'{"a": "\\uD83D"}', r"half of a character stands alone: '\\ud83d'"),
    "cut": (b'{"a":\n', "line 2: Expecting value"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_json_is_refused_with_the_reason_and_the_file(tmp_path, kind):
    content, reason = UNREADABLE[kind]
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"thing must be JSON, got .*a\.json.*{reason}"):
        read_json(tmp_path / "a.json", "thing")
    with pytest.raises(ValueError):  # nothing else
        load_json(tmp_path / "a.json")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"thing must be a readable file, got .*a\.json: No such file"):
        read_json(tmp_path / "a.json", "thing")


def test_whole_characters_and_marks_before_them_are_read():
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert parse_json('"\\\\ud800"') == "\\ud800"


def test_a_ds_config_is_read_as_deepspeed_reads_it():
    text = '// ours\n{"zero_optimization": {"stage": 3, /* all */ "bucket": 5e8,}, # of ZeRO\n "lr": "auto"}'
    expected = {"zero_optimization": {"stage": 3, "bucket": 5e8}, "lr": "auto"}
    assert parse_relaxed(text) == parse_relaxed(b"\xef\xbb\xbf" + text.encode()) == hjson.loads(text) == expected
    with pytest.raises(ValueError, match="Expecting ',' delimiter: line 1"):
        parse_relaxed('{"a": [1 2]}')
    for twice in ('{"a": 1, "a": 2}', '{"a": 1, "a": 2} # both'):
        with pytest.raises(ValueError, match="the key 'a' stands twice"):
            parse_relaxed(twice)
