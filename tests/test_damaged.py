"""Files that are damaged, or of another kind than they are taken for: each is read or refused in a message of ours."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnibal.advise.measuring import measure_rows
from omnibal.advise.present import read_today
from omnibal.cli.options import answer
from omnibal.cluster import Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.errors import MOST_CHARACTERS, ConfigError, DataError, OmnibalError, said, shortened
from omnibal.formats.chat import read_conversation
from omnibal.formats.rows import Row
from omnibal.formats.shards import named_files
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.records import parse_relaxed
from omnibal.report.style import make_table
from omnibal.report.training import read_metrics, training_rows
from tests.advise.test_measuring import FORMS, NO_VIDEOS, RULE
from tests.report.test_training import logged

FUZZED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.just("x" * 600),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["type", "text", "from", "value", "image"]), st.integers(), max_size=2),
)


def places_in(value, path=()):
    """Paths to all that a JSON value holds."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places_in(part, (*path, key))


def changed(value, path, other):
    """A JSON value with another one at a place."""
    if not path:
        return other
    value = deepcopy(value)
    within = value
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = other
    return value


def some_change(value):
    return st.builds(partial(changed, value), st.sampled_from([*places_in(value)]), ODD)


def in_words(work, kind=OmnibalError):
    """Read something, or refuse it in so many words."""
    try:
        return work()
    except kind as error:
        assert 0 < len(str(error)) <= MOST_CHARACTERS + 10
    return None


CONVERSATION = {
    "image": ["a.png"],
    "conversations": [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "That."},
    ],
}


@given(some_change(CONVERSATION))
@FUZZED
def test_conversations(record):
    if isinstance(record, dict):  # as ``parse_entry`` asks for
        in_words(lambda: read_conversation(record, Path("root")), DataError)


@given(st.sampled_from([*FORMS.values()]).flatmap(some_change))
@FUZZED
def test_items_of_any_form(record):
    if isinstance(record, dict):
        in_words(lambda: read_conversation(record, Path("root")), DataError)
        rows = [(Row(Path("data"), 1, lambda: record), Path("root"))]
        in_words(lambda: measure_rows(rows, RULE, str.__len__, "data", NO_VIDEOS))


PLAN = Plan(PackLimits(9, 4096), 8, Partition((0, 3, 5)), ("full", "full", "full", "none", "none"))
STAGE = {
    **dict.fromkeys(("forward_seconds", "backward_seconds", "recompute_seconds", "idle_ratio"), 0.1),
    "pending_bytes": 5,
    "memory": dict.fromkeys(
        [
            "parameters",
            "gradients",
            "optimizer",
            "activations",
            "pending",
            "buffers",
            "transient",
            "logits",
            "overhead",
        ],
        7,
    ),
}
PREDICTED = {"step_seconds": 1.0, "samples_per_step": 9.0, "bubble_ratio": 0.1, "stages": [STAGE, deepcopy(STAGE)]}
RECORD = PLAN.to_record() | {"predicted": PREDICTED}


@given(some_change(RECORD))
@FUZZED
def test_plans(tmp_path, record):
    (tmp_path / "plan.json").write_text(json.dumps(record))
    in_words(lambda: Plan.load(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("stages", 1, "memory", "parameters"), -1, r"predicted.stages\[1\].memory.parameters must be finite and at"),
        (
            ("stages", 0, "pending_bytes"),
            -(2**40),
            r"predicted.stages\[0\].pending_bytes must be .*, got -1099511627776",
        ),
        (("step_seconds",), float("nan"), "predicted.step_seconds must be finite and at least 0, got nan"),
        (("bubble_ratio",), float("-inf"), "predicted.bubble_ratio must be finite and at least 0, got -inf"),
    ],
)
def test_a_plan_that_predicts_what_cannot_be_is_refused(tmp_path, path, value, message):
    (tmp_path / "plan.json").write_text(json.dumps(RECORD))
    assert Plan.load(tmp_path / "plan.json").predicted.step_seconds == 1
    (tmp_path / "plan.json").write_text(json.dumps(changed(RECORD, ("predicted", *path), value)))
    with pytest.raises(ConfigError, match=f"plan.json: {message}"):
        Plan.load(tmp_path / "plan.json")


@given(st.data())
@FUZZED
def test_metrics(tmp_path, data):
    path = tmp_path / "metrics.jsonl"
    if not path.exists():
        logged(path, 1)
        (tmp_path / "kept").write_text(path.read_text())
    lines = [json.loads(line) for line in (tmp_path / "kept").read_text().splitlines()]
    lines[0] |= {"shares": {"a": [0.5, 0.4], "b": [0.5, 0.6]}, "oversized": {"drop": 3}}
    path.write_text("".join(json.dumps(data.draw(some_change(line))) + "\n" for line in lines))
    metrics = in_words(lambda: read_metrics(path))
    if metrics is not None and metrics.steps:
        training_rows(metrics)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"loss": float("-inf")}, "loss"),
        ({"seconds": -1.0}, "seconds"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"samples": -3}, "samples"),
        ({"balance": {"vision": float("nan")}}, "balance.vision"),
        ({"shares": {"a": [0.5, float("inf")]}}, "shares.a.1"),
        ({"oversized": {"lost": 3}}, "oversized.lost.*"),
    ],
)
def test_a_log_of_what_no_run_does_is_refused(tmp_path, change, place):
    path = tmp_path / "metrics.jsonl"
    logged(path, 1)
    line = json.loads(path.read_text().splitlines()[0]) | change
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match=rf"metrics.jsonl, line 1: {place} must be as a run logs it, got: "):
        read_metrics(path)


@given(st.sampled_from(["lengths.json", "llm_tokens.npy"]), st.lists(st.tuples(st.integers(0), st.binary(max_size=3))))
@FUZZED
def test_saved_lengths(tmp_path, name, changes):
    SampleLengths([1, 5, 0], [300, 1400, 40], source=[0, 0, 1], source_names=["a", "b"]).save(tmp_path / "lengths")
    file = tmp_path / "lengths" / name
    content = bytearray(file.read_bytes())
    for place, part in changes:
        at = place % len(content)
        content[at : at + len(part)] = part
    file.write_bytes(content)
    in_words(lambda: SampleLengths.load(tmp_path / "lengths"))


@pytest.mark.parametrize(
    "header", ["{", "((((", "[" * 5000, "{'shape': (99999999999999999999,)}", "{1: 2, 'descr': 3}"]
)
def test_columns_with_odd_headers_are_refused(tmp_path, header):
    SampleLengths([1, 5, 0], [300, 1400, 40]).save(tmp_path)
    size = len(header).to_bytes(2, "little")
    (tmp_path / "llm_tokens.npy").write_bytes(b"\x93NUMPY\x01\x00" + size + header.encode())
    with pytest.raises(DataError, match=r"llm_tokens.npy must be a column that SampleLengths.save wrote, got "):
        SampleLengths.load(tmp_path)


META = {"shapes": {"root": "images", "annotation": "a.jsonl", "repeat_time": 1.5, "length": 3, "max_dynamic_patch": 6}}


@given(some_change(META))
@FUZZED
def test_meta_files(tmp_path, content):
    (tmp_path / "meta.json").write_text(json.dumps(content))
    in_words(lambda: named_files(tmp_path / "meta.json"))


@pytest.mark.parametrize("text", ["# ours\n" + "[" * 100_000, "# ours\n" + "{a:" * 100_000])
def test_brackets_that_nest_too_deeply_in_a_ds_config_with_comments(text):
    with pytest.raises(ValueError, match="brackets nest too deeply"):
        parse_relaxed(text)


def test_a_comment_that_does_not_end_in_a_ds_config():
    with pytest.raises(ValueError, match="Expecting property name"):
        parse_relaxed('{"omnibal": {}, /* ours')


@pytest.mark.parametrize("name", ["today.yaml", "today.json"])
def test_brackets_that_nest_too_deeply_in_what_advise_reads(tmp_path, name):
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=rf"today must be JSON or YAML, got .*{name}: "):
        read_today(str(tmp_path / name))


def test_messages_cut_what_they_repeat():
    long = "7" * 100_000
    for error in (
        ConfigError(f"seed must be an integer, got {long!r}; give one"),
        DataError(f"no {long}"),
        ValueError(long),
    ):
        assert len(said(error)) < 500
    assert str(ConfigError(f"seed must be an integer, got {long!r}; give one")).endswith("7'; give one")
    words = " ".join(["word"] * 100_000)
    assert len(shortened(words)) < MOST_CHARACTERS + 10
    assert shortened("as it is") == "as it is"
    with pytest.raises(ConfigError, match="77 … 77") as caught:
        Cluster.parse(long)
    assert len(str(caught.value)) < 1000


def test_names_that_look_like_tags_are_printed_as_they_are(capsys):
    answer({}, "of [/b]", make_table(("[/red]", "share"), [("[/INST] [bold]x", "1")]), as_json=False)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("of [/b]", "[/red]", "[/INST] [bold]x"))
