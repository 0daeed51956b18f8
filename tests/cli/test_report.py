import json
import re
import shutil
import subprocess

import pytest
from PIL import Image

from omnibal.data.limits import PackLimits
from omnibal.data.synthetic import tiled_lengths
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.pipeline.profiles import fixed_profile

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def inputs(tmp_path):
    """Arguments of a report about a plan and a run."""
    fixed_profile([0.03, 0.02, 0.05], output=[1e6] * 3).save(tmp_path / "profile.json")
    Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("full", "none", "none")).save(tmp_path / "plan.json")
    tiled_lengths(2000, seed=1).save(tmp_path / "lengths")
    (tmp_path / "run").mkdir()
    record = {"epoch": 0, "learning_rate": 0.1, "seconds": 0.5, "samples": 10, "llm_tokens": 4000}
    steps = [record | {"step": n, "loss": 3 / n, "balance": {"vision": 0.9, "llm": 0.8}} for n in range(1, 30)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return (
        "report", tmp_path / "profile.json", "--plan", tmp_path / "plan.json", "--lengths", tmp_path / "lengths",
        "--num-replicas", 2, "--bandwidth", 1, "--budget", 1, "--overhead", 0.1,
        "--out", tmp_path / "out" / "report.html", "--title", "6B & 20B",
    )  # fmt: skip


def test_a_page_opens_with_the_imbalance_and_holds_its_pictures(omnibal, inputs, tmp_path):
    record = json.loads(omnibal(*inputs, "--run", tmp_path / "run", "--json").stdout)
    text = (tmp_path / "out" / "report.html").read_text()
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == [
        "How uneven the work is", "Data: which samples share a micro-batch", "Model and memory: what each stage holds",
        "One step, stage by stage", "What it gains, one idea after the other", "Measured",
    ]  # fmt: skip
    assert "<h1>6B &amp; 20B</h1>" in text
    assert text.count('src="data:image/png;base64,') == 5
    assert not re.search('(src|href)="(?!data:)', text)
    rates = record["samples_per_second"]
    assert [*rates] == ["as today", "+ data", "+ model", "+ memory"]
    assert f"{rates['+ memory'] / rates['as today']:.2f} times the throughput" in text
    assert "<td>speed</td><td>20.0 samples/s, 8,000 LLM tokens/s</td>" in text


def test_a_run_alone_has_its_measured_part_alone(omnibal, inputs, tmp_path):
    omnibal("report", "--run", tmp_path / "run", "--out", tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", text) == ["Measured"]
    assert "29 steps were measured" in text


def test_wrong_options_are_refused(omnibal, inputs, tmp_path):
    assert "a report must be about a --plan, a --run, or both" in omnibal("report", exit_code=2).stderr
    empty = omnibal("report", "--run", tmp_path, exit_code=2).stderr
    assert "--run must name a run's folder with metrics.jsonl" in empty.replace("\n", " ")
    assert "--lengths must name sample lengths" in omnibal(*inputs[:4], "--bandwidth", 1, exit_code=2).stderr
    alone = omnibal("report", inputs[1], "--run", tmp_path / "run", exit_code=2).stderr
    assert "--plan must be given beside costs or --lengths" in alone.replace("\n", " ")
    folder = omnibal(*inputs, "--out", tmp_path, exit_code=2).stderr
    assert "--out must be a file, got the folder" in folder.replace("\n", " ")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("0", "--budget must be GiB such as 80 or 80,80,40, got '0'"),
        ("1,-1", "--budget must be GiB such as 80 or 80,80,40, got '1,-1'"),
        ("1,1,1", "--budget must be one for each of 2 stages, got '1,1,1'"),
    ],
)
def test_budgets_that_no_stages_can_have_are_refused(omnibal, inputs, budget, message):
    assert message in omnibal(*inputs, "--budget", budget, exit_code=2).stderr.replace("\n", " ")


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
    omnibal(*inputs, "--run", tmp_path / "run")
    page = tmp_path / "out" / "report.html"
    for width, height in ((1100, 4200), (390, 4200)):
        picture = shot_of(page, width, height)
        # pictures and text, from the top to far down
        for top in range(0, 3600, 600):
            assert len(picture.crop((0, top, width, top + 600)).getcolors()) > 20
    margin = picture.crop((width - 12, 0, width, height))  # of the narrow page, which as a whole does not scroll
    assert margin.getextrema()[0] > 200
