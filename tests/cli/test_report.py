import json
import re
import shutil
import subprocess

import pytest
from PIL import Image

from omnibal import workspace
from omnibal.data.limits import PackLimits
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.clusters import on_cluster
from tests.pipeline.profiles import fixed_profile
from tests.test_records import UNREADABLE
from tools.synthetic import tiled_lengths

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def inputs(tmp_path):
    """Arguments of a report about a plan; a run lies beside it."""
    fixed_profile([0.03, 0.02, 0.05], output=[1e6] * 3).save(tmp_path / "profile.json")
    plan = Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("full", "none", "none"))
    on_cluster(plan, 2, 2**30).save(tmp_path / "plan.json")
    tiled_lengths(2000, seed=1).save(tmp_path / "lengths")
    write_metrics(tmp_path / "metrics.jsonl")
    return "report", tmp_path / "plan.json", "--out", tmp_path / "out" / "report.html"


def write_metrics(path):
    """Of 29 steps."""
    record = {"epoch": 0, "learning_rate": 0.1, "seconds": 0.5, "samples": 10, "llm_tokens": 4000}
    record["shares"] = {"ocr": (0.25, 0.3), "chat": (0.75, 0.7)}
    steps = [record | {"step": n, "loss": 3 / n, "balance": {"vision": 0.9, "llm": 0.8}} for n in range(1, 30)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_a_page_opens_with_the_data_and_holds_its_pictures(omnibal, inputs, tmp_path):
    record = json.loads(omnibal(*inputs, "--json").stdout)
    text = (tmp_path / "out" / "report.html").read_text()
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == [
        "Data: which samples share a micro-batch", "Model and memory: what each stage holds",
        "One step, stage by stage", "What it gains, one idea after the other", "Measured",
    ]  # fmt: skip
    assert "<h1>Balanced training</h1>" in text
    assert text.count('src="data:image/png;base64,') == 5
    assert not re.search('(src|href)="(?!data:)', text)
    rates = record["samples_per_second"]
    assert [*rates] == ["random batches", "+ data", "+ model", "+ memory"]
    # A profile without a head's vocabulary tells no trainer's memory; random batches are nobody's way of today.
    lead = text[text.index("<p") :][:1500]
    assert f"{rates['+ memory']:,.1f} samples/s are predicted" in lead
    assert "ZeRO with a trainer&#x27;s own settings is not estimated: profile must have a head" in lead
    assert f"{rates['+ memory'] / rates['random batches']:.2f}x" not in lead
    assert "<td>speed</td><td>20.0 samples/s, 8,000 LLM tokens/s</td>" in text


def test_a_run_alone_has_its_measured_part_alone(omnibal, tmp_path):
    write_metrics(tmp_path / "run" / "metrics.jsonl")
    omnibal("report", tmp_path / "run", "--out", tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", text) == ["Measured"]
    assert "29 steps were measured" in text


@pytest.mark.usefixtures("few_steps")
def test_a_ds_config_says_where_plan_and_run_are(omnibal, ds_config, monkeypatch, tmp_path):
    monkeypatch.setattr("omnibal.cli.plan.REPORTED_STEPS", 2)
    write_metrics(tmp_path / "run" / "metrics.jsonl")
    config = ds_config()
    record = json.loads(omnibal("report", config, "--json").stdout)
    text = (tmp_path / "run" / "report.html").read_text()
    assert "Data: which samples share" in text and "29 steps were measured" in text
    assert (tmp_path / "run" / "what-if" / "plan.json").is_file()
    planned = json.loads(omnibal("plan", config, "--json").stdout)
    name, (today, own) = "the present configuration", record["others"].items()
    # What is done today is what `omnibal plan` compares with, not random batches that nobody asked for.
    assert own[1] is not None and today == (name, pytest.approx(planned["present_samples_per_second"]))
    fastest = [*record["samples_per_second"].values()][-1]
    for way, rate in (today, own):
        assert f"{fastest / rate:.2f}x the {rate:,.1f} samples/s of {way}".replace("'", "&#x27;") in text
    omnibal("plan", config, "--write")
    followed = json.loads(omnibal("report", config, "--json").stdout)["others"]
    assert name not in followed and len(followed) == 1  # training follows the plan: it is no gain over itself
    monkeypatch.setattr(workspace, "devices_at_hand", lambda: None)
    path = ds_config(cluster=None, run={"output": str(tmp_path / "trained")})
    write_metrics(tmp_path / "trained" / "metrics.jsonl")
    assert "what a plan changes is left out" in omnibal("report", path).stderr
    text = (tmp_path / "trained" / "report.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", text) == ["Measured"]


def test_what_no_report_is_about_is_refused(refusal, inputs, token_lengths, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "source must be a ds_config or a plan or a run's folder, got" in refusal("report", tmp_path / "empty")
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert "a run that has trained a step, got" in refusal("report", tmp_path / "empty")
    assert "--out must be a file, got the folder" in refusal(*inputs[:2], "--out", tmp_path)
    (tmp_path / "empty" / "metrics.jsonl").write_bytes(UNREADABLE["binary"][0])
    assert "metrics.jsonl must be a run's log" in refusal("report", tmp_path / "empty")
    (tmp_path / "lengths" / "lengths.json").unlink()
    assert "lengths must be known here, got none; name a folder of lengths" in refusal(*inputs)


def shot_of(page, width, height):
    """A browser's picture of a page."""
    shot = page.with_suffix(".png")
    # A frame of the width: a browser's own window is never as narrow as a phone.
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<body style="margin: 0"><iframe src="{page.name}" width="{width}" height="{height}" frameborder="0">'
    )
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={page.parent / 'browser'}",
        f"--window-size={max(width, 600)},{height}", f"--screenshot={shot}",
    ]  # fmt: skip
    subprocess.run([*command, frame.as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(shot) as picture:
        return picture.convert("L")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_browser_shows_the_page(omnibal, inputs, tmp_path):
    omnibal(*inputs)
    page = tmp_path / "out" / "report.html"
    for width, height in ((1100, 4200), (390, 4200)):
        picture = shot_of(page, width, height)
        # pictures and text, from the top to far down
        for top in range(0, 3600, 600):
            assert len(picture.crop((0, top, width, top + 600)).getcolors()) > 20
    margin = picture.crop((width - 12, 0, width, height))  # of the narrow page, which as a whole does not scroll
    assert margin.getextrema()[0] > 200


@pytest.mark.usefixtures("few_steps")
def test_a_page_about_few_samples_compares_with_a_step_of_all(omnibal, ds_config, tmp_path):
    omnibal("report", ds_config(packing={"samples_per_step": 60}))
    assert "Data: which samples share" in (tmp_path / "run" / "report.html").read_text()
