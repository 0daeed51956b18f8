import json

import numpy as np
import pytest

from omnibal.cli.lengths import lengths_table, statistics_of
from omnibal.cli.options import read_lengths
from omnibal.data.lengths import SampleLengths
from omnibal.formats.conversations import open_dataset
from tests.families.models import TEMPLATES, save_folder
from tests.report.printed import text_of

LENGTHS = SampleLengths(
    [1, 0, 5, 3],
    [300, 40, 1400, 900],
    target_tokens=[10, 20, 30, 40],
    source=[0, 2, 0, 0],
    source_names=["charts", "nothing", "text"],
)


def test_a_dataset_is_measured_and_saved(omnibal, demo, tmp_path):
    result = omnibal("lengths", demo.meta, tmp_path / "out", "--model", demo.model, "--json")
    record = json.loads(result.stdout)
    expected = open_dataset(demo.meta, demo.model).lengths()
    saved = SampleLengths.load(tmp_path / "out")
    assert saved.content_hash == expected.content_hash == record["content_hash"]
    assert set(record) == {"folder", "content_hash", "all", "sources", "broken", "packs"}
    assert [source["name"] for source in record["sources"]] == list(json.loads(demo.meta.read_text()))
    assert sum(source["samples"] for source in record["sources"]) == record["all"]["samples"] == 60
    assert record["all"]["llm_tokens"] == {
        "total": expected.llm_tokens.sum(),
        "mean": expected.llm_tokens.mean(),
        "p50": np.median(expected.llm_tokens),
        "p99": np.percentile(expected.llm_tokens, 99),
        "max": expected.llm_tokens.max(),
    }
    assert record["all"]["with_image"] == (expected.vision_units > 0).sum()


def test_the_folder_is_what_pack_reads_with_the_names_of_sources(omnibal, demo, tmp_path):
    omnibal("lengths", demo.meta, tmp_path / "out", "--model", demo.model)
    text = omnibal("lengths", tmp_path / "out", tmp_path / "again").stdout
    assert all(name in text for name in json.loads(demo.meta.read_text()))
    record = json.loads(omnibal("lengths", tmp_path / "out", "--json").stdout)
    assert record["packs"]["samples"] == 60


def test_fewer_tiles_make_shorter_samples(omnibal, demo, tmp_path):
    totals = [
        json.loads(
            omnibal("lengths", demo.meta, tmp_path, "--model", demo.model, "--max-tiles", most, "--json").stdout
        )["all"]["vision_units"]["total"]
        for most in (1, 4)
    ]
    assert totals[0] < totals[1]


@pytest.mark.parametrize("as_array", [True, False])
def test_annotations_in_llavas_format_are_measured(omnibal, demo, tmp_path, as_array):
    annotations = next((demo.meta.parent / "train").glob("*.jsonl"))
    lines = annotations.read_text().splitlines()
    source = tmp_path / ("llava.json" if as_array else "llava.jsonl")
    source.write_text(f"[{','.join(lines)}]" if as_array else "\n".join(lines))
    root = demo.meta.parent / json.loads(demo.meta.read_text())[annotations.stem]["root"]
    options = ["--model", demo.model, "--images", root, "--json"]
    record = json.loads(omnibal("lengths", source, tmp_path / "out", *options).stdout)
    expected = open_dataset(annotations, demo.model, image_folder=root).lengths()
    assert record["content_hash"] == expected.content_hash
    assert [entry["name"] for entry in record["sources"]] == ["llava"]


@pytest.mark.parametrize("model_type", TEMPLATES)
def test_lengths_are_measured_for_every_family(omnibal, demo, tmp_path, model_type):
    save_folder(model_type, tmp_path / "model", demo.model)
    omnibal("lengths", demo.meta, tmp_path / "out", "--model", tmp_path / "model")
    expected = open_dataset(demo.meta, tmp_path / "model").lengths()
    assert SampleLengths.load(tmp_path / "out").content_hash == expected.content_hash


def test_a_ds_config_says_it_all_and_its_training_measures_nothing_again(omnibal, demo, ds_config, tmp_path):
    record = json.loads(omnibal("lengths", ds_config(), "--json").stdout)
    expected = open_dataset(demo.meta, demo.model, max_tiles=4)
    folder = tmp_path / "run" / "lengths"
    assert record["folder"] == str(folder)
    assert SampleLengths.load(folder).content_hash == expected.lengths().content_hash == record["content_hash"]
    of_training = open_dataset(demo.meta, demo.model, max_tiles=4, cache=folder, measured=True)  # takes what is kept
    assert of_training.lengths().content_hash == record["content_hash"]
    fewer = json.loads(omnibal("lengths", ds_config(data={"max_tiles": 1}), tmp_path / "copy", "--json").stdout)
    assert fewer["all"]["vision_units"]["total"] < record["all"]["vision_units"]["total"]
    assert SampleLengths.load(tmp_path / "copy").content_hash == fewer["content_hash"]


def test_a_second_pass_finds_what_was_measured(omnibal, demo, tmp_path):
    first, second = (
        json.loads(omnibal("lengths", demo.meta, tmp_path / "out", "--model", demo.model, "--json").stdout)
        for _ in range(2)
    )
    assert first | {"packs": None} == second | {"packs": None}
    measured = [path for path in (tmp_path / "out").iterdir() if path.is_dir() and path.name != "annotations"]
    assert len(measured) == 1


def test_json_lists_become_a_folder(omnibal, token_lengths, tmp_path):
    text = omnibal("lengths", token_lengths[0], tmp_path / "out").stdout
    assert "llava_mix" in text
    assert SampleLengths.load(tmp_path / "out").summary == SampleLengths.from_token_lengths(token_lengths[0]).summary


def test_what_cannot_be_written_is_refused_before_anything_is_measured(refusal, token_lengths, tmp_path):
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "deeper"
    line = refusal("lengths", token_lengths[0], blocked)
    assert f"out must be a folder, got {blocked}: {tmp_path / 'file'} is a file" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{meta}", "out"], "got nothing; type omnibal lengths {meta} out --model MODEL_FOLDER"),
        (["{meta}", "--model", "{model}"], "got none; type omnibal lengths {meta} runs/lengths --model {model}"),
        (["{lengths}", "out", "--model", "{model}"], "--model must be left out here, got {model}: {lengths} holds"),
        (
            ["{config}", "--max-tiles", "3"],
            "--max-tiles must be left out here, got 3: a ds_config names data and model",
        ),
        (["{model}", "out"], "source must be a ds_config or a dataset"),
        (["none.json", "out"], "source must be a readable file or folder, got none.json (No such file or directory)"),
    ],
)
def test_wrong_arguments_are_refused(refusal, demo, ds_config, token_lengths, arguments, message):
    names = {"meta": demo.meta, "model": demo.model, "lengths": token_lengths[0], "config": ds_config()}
    assert message.format(**names) in refusal("lengths", *(argument.format(**names) for argument in arguments))


def test_lengths_saved_into_their_own_folder_stay(omnibal, token_lengths, tmp_path):
    omnibal("lengths", token_lengths[0], tmp_path)
    omnibal("lengths", tmp_path, tmp_path)
    assert SampleLengths.load(tmp_path).summary == SampleLengths.from_token_lengths(token_lengths[0]).summary


def test_files_of_the_same_name_are_told_apart(omnibal, token_lengths, tmp_path):
    (tmp_path / token_lengths[0].name).write_bytes(token_lengths[0].read_bytes())
    named = read_lengths([token_lengths[0], tmp_path / token_lengths[0].name], "lengths")
    assert named.lengths.source_names == (str(token_lengths[0]), str(tmp_path / token_lengths[0].name))


@pytest.fixture
def broken(demo, tmp_path):
    """A meta file with two usable samples and two that are not."""
    good = (demo.meta.parent / "train" / next(iter(json.loads(demo.meta.read_text())))).with_suffix(".jsonl")
    lines = good.read_text().splitlines()[:2]
    (tmp_path / "some.jsonl").write_text("\n".join([lines[0], "{", lines[1], '{"conversations": []}']) + "\n")
    root = json.loads(demo.meta.read_text())[good.stem]["root"]
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"some": {"root": str(demo.meta.parent / root), "annotation": "some.jsonl"}}))
    return meta


def test_broken_samples_are_refused_in_one_report(omnibal, demo, broken, tmp_path):
    result = omnibal("lengths", broken, tmp_path / "out", "--model", demo.model, exit_code=2)
    assert "2 of 4 items cannot be used" in result.stderr
    assert f"{broken.parent / 'some.jsonl'}, line 2: " in result.stderr
    assert not (tmp_path / "out" / "lengths.json").exists()


def test_broken_samples_are_left_out_and_listed(omnibal, demo, broken, tmp_path):
    options = [broken, tmp_path / "out", "--model", demo.model, "--broken", "skip"]
    record = json.loads(omnibal("lengths", *options, "--json").stdout)
    assert record["all"]["samples"] == 2
    assert [problem["line"] for problem in record["broken"]] == [2, 4]
    assert json.loads((tmp_path / "out" / "broken.json").read_text()) == record["broken"]
    assert "2 items cannot be used and are left out" in omnibal("lengths", *options).stdout


def test_statistics_of_each_source_in_the_order_of_their_numbers():
    figures = statistics_of(LENGTHS)
    charts, nothing, text = figures["sources"]
    assert (charts["name"], charts["samples"], charts["with_image"]) == ("charts", 3, 3)
    assert charts["vision_units"] == {"total": 9, "mean": 3.0, "p50": 3.0, "p99": pytest.approx(4.96), "max": 5}
    assert charts["target_tokens"]["total"] == 80
    assert (nothing["name"], nothing["samples"], set(nothing["llm_tokens"].values())) == ("nothing", 0, {0})
    assert (text["with_image"], text["llm_tokens"]["max"]) == (0, 40)
    assert figures["all"]["samples"] == 4


def test_lengths_without_sources_or_targets():
    (entry,) = statistics_of(SampleLengths([1, 2], [10, 30]))["sources"]
    assert (entry["name"], entry["samples"], entry["llm_tokens"]["mean"]) == ("all", 2, 20.0)
    assert entry["target_tokens"] is None


def test_totals_do_not_overflow():
    lengths = SampleLengths(np.full(3000, 2**30, dtype=np.int32), np.ones(3000, dtype=np.int32))
    assert statistics_of(lengths)["all"]["vision_units"]["total"] == 3000 * 2**30


def test_the_table_has_a_section_per_source_and_one_for_all():
    lines = [line.split() for line in text_of(lengths_table(statistics_of(LENGTHS))).splitlines()]
    assert ["charts", "vision", "units", "3.0", "3", "5", "5"] in lines
    assert ["3", "samples", "LLM", "tokens", "866.7", "900", "1,390", "1,400"] in lines
    assert ["0.0%", "with", "image", "target", "tokens", "20.0", "20", "20", "20"] in lines
    assert ["all", "vision", "units", "2.2", "2", "5", "5"] in lines
    assert ["75.0%", "with", "image", "target", "tokens", "25.0", "25", "40", "40"] in lines


def test_videos_are_shown_by_source():
    lengths = SampleLengths([8, 40, 6], [20, 60, 9], video_units=[0, 40, 2], source=[0, 1, 1], source_names=["a", "b"])
    figures = statistics_of(lengths)
    assert [(entry["with_image"], entry["with_video"]) for entry in figures["sources"]] == [(1, 0), (1, 2)]
    lines = [line.split() for line in text_of(lengths_table(figures, "patches")).splitlines()]
    assert ["100.0%", "with", "video", "patches", "of", "videos", "21.0", "21", "40", "40"] in lines
    assert ["0.0%", "with", "video", "patches", "of", "videos", "0.0", "0", "0", "0"] in lines


def test_a_single_source_needs_no_total():
    lengths = SampleLengths([1], [10], source=[0], source_names=["one"])
    text = text_of(lengths_table(statistics_of(lengths)))
    assert "all" not in text
    assert "target" not in text


def test_a_ds_config_without_data_is_told_which_key_names_it(refusal, ds_config):
    assert "omnibal.data.train must name the data, got none in" in refusal("lengths", ds_config(data={"train": None}))


def test_samples_that_a_message_names_are_shown(omnibal, refusal, demo, ds_config):
    config = ds_config()
    shown = json.loads(omnibal("lengths", config, "--samples", "0,7", "--json").stdout)
    expected = open_dataset(demo.meta, demo.model)
    assert [each["sample"] for each in shown] == [0, 7]
    for each in shown:
        row = expected.row_of(each["sample"])
        assert (each["file"], each["line"], each["record"]) == (str(row.file), row.number, row.read())
        assert each["llm_tokens"] == expected.lengths().llm_tokens[each["sample"]]
    assert "line 8" in omnibal("lengths", config, "--samples", "7").stdout
    assert "--samples must be numbers below 60 with commas between them, got '60'" in refusal(
        "lengths", config, "--samples", "60"
    )
    assert "source must be the run's ds_config to show --samples" in refusal("lengths", demo.meta, "--samples", "1")
