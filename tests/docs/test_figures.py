"""Figures in docs come from a report or a file of results that says when, where and with what they were made."""

import importlib
import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from tools import results

ROOT = Path(__file__).parents[2]
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?: million)?")
RESULTS = sorted(path for path in ROOT.glob("tools/*/*.json") if "made_with" in path.read_text()[:400])


def figures(text):
    """Numbers of a text, each with its decimals."""
    found = []
    for match in FIGURE.findall(re.sub(r"\]\([^)]*\)", "]", text)):
        number, *million = match.split()
        decimals = len(number.partition(".")[2])
        found.append((float(number.replace(",", "")) * (1e6 if million else 1), decimals, match))
    return found


def is_in(figure, report):
    """Whether a report has a figure, or one that it is rounded from."""
    value, decimals, _ = figure
    return any(abs(value - other) <= 0.5 * 10**-decimals + 1e-9 for other, _, _ in report)


def rows(page):
    return [line for line in page.splitlines() if line.startswith("| ") and "RESULTS.md)" in line]


@pytest.mark.parametrize("row", rows((ROOT / "tools/README.md").read_text()))
def test_measurements_are_those_of_the_report_that_they_name(row):
    *cells, link = row.strip("| ").split(" | ")
    reports = [(ROOT / "tools" / name).resolve().read_text() for name in re.findall(r"\]\(([^)]*)\)", link)]
    known = figures(" ".join(reports))
    assert not [figure[2] for figure in figures(" ".join(cells)) if not is_in(figure, known)]
    assert re.search(r"\b2026-\d\d-\d\d\b", reports[0][:600]), "the report says when it was made"


def test_a_figure_that_no_report_has_is_found():
    known = figures("1.78 times, 100,000,000 samples")
    assert [is_in(figure, known) for figure in figures("1.8 of 100 million, 1.7")] == [True, True, False]


def test_gains_in_the_readme_are_in_reports():
    paragraph = re.search(r"## What it gains.*?\n## ", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    reports = " ".join(path.read_text() for path in (*ROOT.glob("tools/*/RESULTS.md"), ROOT / "docs/advise.md"))
    known = figures(reports)
    assert len(figures(paragraph)) > 8
    assert not [figure[2] for figure in figures(paragraph) if not is_in(figure, known)]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_results_say_when_where_and_with_what(path):
    made_with = json.loads(path.read_text())["made_with"]
    told = made_with if isinstance(made_with, str) else " ".join(f"{name} {value}" for name, value in made_with.items())
    assert re.search(r"2026-\d\d-\d\d", told)
    assert "core" in told
    assert re.search(r"\w+ \d+\.\d+", told)


@pytest.mark.parametrize("report", results.REPORTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_tables_of_reports_say_when_where_and_with_what(report):
    tables = [*results.tables_of(report)]
    assert tables
    for table in tables:
        made = " ".join(table["made"])
        assert re.search(r"\b2026-\d\d-\d\d\b", made), table["section"]
        assert re.search(r"\bcores?\b|CPU|H[12]00", made), table["section"]
        assert re.search(r"[a-z] \d+\.\d+", made), table["section"]


def test_a_table_is_told_with_the_dates_that_hold_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    report = tmp_path / "RESULTS.md"
    head = "# A\n\n2026-01-01, 2 cores\n\n## B\n\n2026-01-02\nagain\n\n### C\n\n"
    report.write_text(f"{head}|x|y|\n|-|-|\n|a|**1,000**|\n\n## D\n\n|x|\n|-|\n|−2 %|\n")
    first, second = results.tables_of(report)
    told = {"report": "RESULTS.md", "section": "A / B / C", "made": ["2026-01-01, 2 cores", "2026-01-02 again"]}
    assert first == told | {"columns": ["x", "y"], "rows": [["a", 1000.0]]}
    assert second == told | {"section": "A / D", "made": told["made"][:1], "columns": ["x"], "rows": [["−2 %"]]}


def test_tables_of_packers_are_those_of_the_results():
    vision = importlib.import_module("tools.sampling.vision")
    found = json.loads(vision.RESULTS.read_text())
    report = (vision.HERE / "VISION.md").read_text()
    assert found["made_with"] in report
    for limits in vision.SETTINGS:
        assert vision.table_of(found["rows"], limits) in report


@pytest.mark.parametrize("name", ["orders.json", "orders_mixed.json"])
def test_orders_compared_are_those_of_the_results(name):
    runs = json.loads((ROOT / "tools/parity" / name).read_text())["runs"]
    report = (ROOT / "tools/parity/RESULTS.md").read_text()
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        accuracies, losses = [run["accuracy"] for run in own], [run["loss"] for run in own]
        error = stdev(accuracies) / len(own) ** 0.5
        accuracy = f"| {100 * mean(accuracies):.1f} ± {100 * error:.1f} % |"
        assert [line for line in report.splitlines() if accuracy in line and f"| {mean(losses):.4f} ± " in line], method


def test_tables_of_rollouts_are_those_of_the_results():
    bench = importlib.import_module("tools.rollouts.bench")
    found = json.loads(bench.RESULTS.read_text())
    report = bench.RESULTS.with_name("RESULTS.md").read_text()
    assert found["made_with"] in report
    for title, rows in bench.tables_of(found).items():
        assert f"## {title}\n\n{rows}" in report
