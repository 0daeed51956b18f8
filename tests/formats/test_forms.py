"""Every form of records in every kind of file: advice and training read the same, and name the row that is broken."""

import io
import json
import tarfile

import datasets
import pytest
import torch
from datasets import Dataset
from PIL import Image

from omnibal.advise.measuring import measure
from omnibal.advise.models import read_model
from omnibal.advise.present import Present
from omnibal.errors import DataError
from omnibal.formats.conversations import open_dataset, open_streams

ASKED, SAID, OTHER = "What is red?", "the ball", "Where is it?"


def turns(who, what, users, assistants, image="<image>"):
    said = [(users, f"{image}\n{ASKED}"), (assistants, SAID), (users, OTHER), (assistants, "top left")]
    return [{who: role, what: text} for role, text in said]


MESSAGES = turns("role", "content", "user", "assistant")
PARTS = [
    {"role": "user", "content": [{"type": "image", "image": "file://a.png"}, {"type": "text", "text": f"\n{ASKED}"}]},
    *({"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in MESSAGES[1:]),
]
FORMS = {
    "InternVL": {
        "image": "a.png",
        "width": 120,
        "height": 50,
        "conversations": turns("from", "value", "human", "gpt"),
    },
    "LLaVA": {"id": "1", "image": "a.png", "conversations": turns("from", "value", "human", "gpt")},
    "ShareGPT": {"images": ["a.png"], "conversations": turns("from", "value", "human", "gpt")},
    "messages": {"messages": MESSAGES, "images": ["a.png"]},
    "messages without a mark": {
        "messages": [{"role": "user", "content": ASKED}, *MESSAGES[1:]],
        "images": ["a.png"],
    },
    "messages with images": {"messages": PARTS},
    "Qwen-VL": {"conversations": turns("from", "value", "user", "assistant", "<img>a.png</img>")},
    "ms-swift": {"messages": MESSAGES, "images": [{"bytes": None, "path": "a.png"}]},
    "query and response": {
        "query": OTHER, "response": "top left", "history": [[f"<image>\n{ASKED}", SAID]], "images": ["a.png"],
    },
    "instruction": {
        "instruction": "Where is", "input": "it?", "output": "top left", "history": [[ASKED, SAID]], "image": "a.png",
    },
    "prompt and completion": {"prompt": MESSAGES[:3], "completion": MESSAGES[3:], "images": ["a.png"]},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    picture = Image.radial_gradient("L").resize((120, 50)).convert("RGB")
    picture.save(tmp_path / "a.png")
    return tmp_path


def json_lines(path, records):
    path.write_text("\n".join(map(json.dumps, records)))


def json_array(path, records):
    path.write_text(json.dumps(records, indent=1))


def tar(path, records):
    with tarfile.open(path, "w") as shard:
        for number, record in enumerate(records):
            picture = (path.parent / "a.png").read_bytes()
            for name, content in (("json", json.dumps(record).encode()), ("png", picture)):
                entry = tarfile.TarInfo(f"{number:03}.{name}")
                entry.size = len(content)
                shard.addfile(entry, io.BytesIO(content))


KINDS = {
    "a.jsonl": json_lines,
    "a.json": json_array,
    "a.tar": tar,
    "a.parquet": lambda path, records: Dataset.from_list(records).to_parquet(path),
    "saved": lambda path, records: Dataset.from_list(records).save_to_disk(path),
}


def folders_of(kind, folder):
    return {"image_folder": folder} if kind == "saved" else {}


def assert_equal(sample, expected):
    assert sample.keys() == expected.keys()
    assert all(torch.equal(sample[name], value) for name, value in expected.items())


@pytest.fixture
def expected(write_dataset, model_folder, folder):
    """The sample that all forms say, as InternVL's meta file has it."""
    (folder / "expected.jsonl").write_text(json.dumps(FORMS["InternVL"]))
    (folder / "expected.json").write_text(json.dumps({"a": {"root": ".", "annotation": "expected.jsonl"}}))
    return open_dataset(folder / "expected.json", model_folder)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_advice_training_and_streams_read_the_same(folder, model_folder, expected, form, kind):
    path = folder / kind
    KINDS[kind](path, [FORMS[form]] * 3)
    images = folders_of(kind, folder)
    dataset = open_dataset(path, model_folder, **images)
    if form != "instruction":  # which has a line break between its parts
        assert_equal(dataset[2], expected)
    lengths = dataset.lengths()
    assert lengths.llm_tokens.tolist() == [len(dataset[0]["input_ids"])] * 3
    of_advice = measure([path], read_model(str(model_folder)), Present(), images=images.get("image_folder")).lengths
    for name, column in of_advice.columns().items():
        assert column.tolist() == lengths.columns()[name].tolist(), name
    if kind != "a.json":
        (stream,) = open_streams(path, model_folder, **images).values()
        _, second, _ = stream
        assert_equal(second, dataset[0])
        iterator = iter(stream)
        next(iterator)
        state = stream.state_dict()
        stream.load_state_dict(state)
        assert len([*stream]) == 2


@pytest.mark.parametrize(("kind", "row"), [*zip(KINDS, ("line 2", "line 5", "001", "row 2", "row 2"), strict=True)])
def test_a_broken_row_is_named_with_its_file_and_key(folder, model_folder, kind, row):
    good = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]}
    broken = {"messages": [good["messages"][0], {"role": "robot", "content": SAID}]}
    path = folder / kind
    records = [good, broken, good]
    if kind == "a.json":
        path.write_text(f"[{json.dumps(good)},\n\n\n\n{json.dumps(broken)}]")
    else:
        KINDS[kind](path, records)
    message = rf"{kind}, {row}: messages\[1\] must have role \(system, .*\) and content, got {{.*robot"
    dataset = open_dataset(path, model_folder)
    with pytest.raises(DataError, match=message):
        dataset[1]
    with pytest.raises(DataError, match=f"1 of .*\n.*{message}"):
        dataset.lengths()
    assert [problem.line for problem in open_dataset(path, model_folder, broken="skip").skipped] in ([2], [5])
    if kind != "a.json":
        (stream,) = open_streams(path, model_folder).values()
        with pytest.raises(DataError, match=message):
            list(stream)


def test_a_dataset_in_memory_and_its_pictures(folder, model_folder, expected):
    features = datasets.Features({
        "image": datasets.Image(),
        "conversations": [{"from": datasets.Value("string"), "value": datasets.Value("string")}],
    })  # fmt: skip
    content = {"bytes": (folder / "a.png").read_bytes(), "path": None}
    rows = [{"image": content, "conversations": FORMS["LLaVA"]["conversations"]}] * 2
    in_memory = Dataset.from_list(rows, features=features)
    dataset = open_dataset(in_memory, model_folder)
    assert_equal(dataset[1], expected)
    in_memory.save_to_disk(folder / "saved")
    again = open_dataset(folder / "saved", model_folder, cache=folder / "lengths")
    assert again.lengths().content_hash == open_dataset(folder / "saved", model_folder).lengths().content_hash
    assert_equal(again[0], expected)


@pytest.mark.parametrize("kind", ["a.jsonl", "a.tar", "a.parquet"])
def test_a_folder_of_files_of_one_kind_is_one_source(folder, model_folder, kind):
    parts = folder / "parts"
    parts.mkdir()
    for number, answer in enumerate(["red", "blue", "green"]):
        (parts / "a.png").write_bytes((folder / "a.png").read_bytes())
        records = [{"query": ASKED, "response": f"{answer} {place}", "images": ["a.png"]} for place in range(2)]
        KINDS[kind](parts / f"{number}{kind}", records)
    dataset = open_dataset(parts, model_folder)
    assert (len(dataset), dataset.lengths().source_names) == (6, ("parts",))
    labels = [dataset[index]["labels"] for index in range(6)]
    (stream,) = open_streams(parts, model_folder).values()
    streamed, states = [], []
    for sample in stream:
        streamed.append(sample["labels"])
        states.append(stream.state_dict())
    assert all(map(torch.equal, labels, streamed))
    stream.load_state_dict(states[3])
    assert all(map(torch.equal, labels[4:], [sample["labels"] for sample in stream]))


def test_a_damaged_table_is_named_in_a_stream(folder, model_folder):
    path = folder / "a.parquet"
    KINDS["a.parquet"](path, [FORMS["LLaVA"]] * 3)
    path.write_bytes(path.read_bytes()[:-100])
    (stream,) = open_streams(path, model_folder).values()
    with pytest.raises(DataError, match=r"data must be Parquet that can be read, got .*a\.parquet: "):
        list(stream)


def test_a_damaged_table_is_named_once(folder, model_folder, caplog):
    path = folder / "a.parquet"
    KINDS["a.parquet"](path, [FORMS["LLaVA"]] * 3)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"data must be a table that datasets can load, got .*a\.parquet: "):
        open_dataset(path, model_folder)
    assert not caplog.records


def test_what_is_no_folder_of_rows_is_refused(folder, model_folder):
    (folder / "nothing").mkdir()
    with pytest.raises(DataError, match=r"data must be JSON lines, .* of one kind, got .*nothing with none"):
        open_dataset(folder / "nothing", model_folder)
