"""A user's JSON keeps its form where keys are set in it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal.cli.entering import set_keys

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


@given(OBJECTS, st.lists(st.text(max_size=4), min_size=1, max_size=3), VALUES, st.sampled_from([None, 2, "\t"]))
def test_the_key_is_set_and_nothing_else_changes(content, keys, value, indent):
    text = set_keys(json.dumps(content, indent=indent), {tuple(keys): value})
    expected = json.loads(json.dumps(content))
    inner = expected
    for key in keys[:-1]:
        if not isinstance(inner.get(key), dict):
            inner[key] = {}
        inner = inner[key]
    inner[keys[-1]] = value
    assert json.loads(text) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{}", '{"a": {"b": 1}}'),
        ('{ "x" :1 , "a": {"b":2,  "c" : [1,\n2]} }\n', '{ "x" :1 , "a": {"b":1,  "c" : [1,\n2]} }\n'),
        (
            '{\n    "a": {\n        "c": 1e-5\n    }\n}\n',
            '{\n    "a": {\n        "c": 1e-5,\n        "b": 1\n    }\n}\n',
        ),
        ('{"a": {"c": 1, "d": "b\\": {"}, "x": 0}', '{"a": {"c": 1, "d": "b\\": {", "b": 1}, "x": 0}'),
        ('{"a": null, "x": 0}', '{"a": {"b": 1}, "x": 0}'),
        ('\n{\n  "x": 0\n}', '\n{\n  "x": 0,\n  "a": {"b": 1}\n}'),
    ],
)
def test_its_form_stays(before, after):
    assert set_keys(before, {("a", "b"): 1}) == after
