"""What pages show as printed is what is printed today, for the made-up lengths that they name."""

import re
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from omnibal.advise.memory import RankMemory, free_levels
from omnibal.advise.models import Model
from omnibal.advise.wait import phase_costs
from omnibal.cli.main import app
from omnibal.cluster import Cluster
from omnibal.data.step_size import fit_step
from omnibal.device import Device, usable_bytes
from omnibal.integrations.trainer.recompute import LayerChoice
from omnibal.integrations.trainer.steps import AskedSteps, describe
from omnibal.packs.loading import PackSampler
from omnibal.profile.counted import analytic_profile
from tools.synthetic import patch_lengths, tiled_lengths

DOCS = Path(__file__).parents[2] / "docs"
SAMPLES = 20_000
BATCH, ACCUMULATION, RANKS = 2, 2, 8  # of all pages
SEED = 42  # TrainingArguments'


def sample_of(page, first):
    """The indented block of a page that begins with some words, as it is printed."""
    lines = (DOCS / page).read_text().splitlines()
    begin = max(number for number, line in enumerate(lines) if line.lstrip().startswith(first))
    end = next(number for number in range(begin, len(lines)) if not lines[number].strip())
    return dedent("\n".join(lines[begin:end]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("advise")
    patch_lengths(SAMPLES).save(home / "runs/lengths")
    return home


@cache
def advised(folder, batches):
    """What the command of advise.md prints for a batch and accumulation, as ``2, 8``."""
    batch, accumulation = batches.split(", ")
    recipe = f"--today zero3 --batch {batch} --accumulation {accumulation}"
    command = f"advise runs/lengths --model Qwen2.5-VL-7B --cluster {RANKS}xA100-80GB {recipe}"
    with chdir(folder):
        return command, CliRunner().invoke(app, command.split()).stdout


def test_what_advise_prints(folder):
    command, printed = advised(folder, f"{BATCH}, {ACCUMULATION}")
    assert command.split("lengths ")[1] in (DOCS / "advise.md").read_text()
    parts = (sample_of("advise.md", first) for first in ("omnibal over your best settings", "changes, each", "paste:"))
    assert printed.strip() == "\n".join(parts)
    assert f"    {printed.splitlines()[0]}\n    …\n" in (DOCS.parent / "README.md").read_text()


ROWS = re.findall(
    r"^\| (\d+, \d+) \| all → (.*?) \| (.*?) \| (.*?) \|$", (DOCS / "advise.md").read_text(), re.MULTILINE
)


def test_the_readme_has_the_gains_of_the_page_on_advice():
    readme, (first, *others) = (DOCS.parent / "README.md").read_text(), ROWS
    assert first[0] == f"{BATCH}, {ACCUMULATION}" and len(others) == 3
    assert f"(only {first[1]} layers of ViT and LLM recompute)" in readme
    said = [gain.replace(" (", f"{bold} (likely ") for gain, bold in zip(first[2:], ("**", ""), strict=True)]
    assert f"| batch {BATCH}, accumulation {ACCUMULATION} | **{said[0]} | {said[1]} |" in readme
    least, most = (tuple(found(row[column].split()[0] for row in others) for column in (2, 3)) for found in (min, max))
    assert f"#other-batches) | {least[0]} to {most[0]} | {least[1]} to {most[1]} |" in readme


@pytest.mark.parametrize(("batches", "layers", "over_settings", "over_today"), ROWS)
def test_gains_of_other_batches(folder, batches, layers, over_settings, over_today):
    _, printed = advised(folder, batches)
    gains = (gain.replace(" (", "x (").replace(")", "x)") for gain in (over_settings, over_today))
    assert printed.startswith("omnibal over your best settings: {}; over today: {}\n".format(*gains))
    assert f"({layers} layers recompute)" in printed


@pytest.mark.parametrize(
    ("page", "model", "lengths", "batch"),
    [
        ("finetune.md", "Qwen2.5-VL-7B", patch_lengths(SAMPLES), BATCH),
        ("trainer.md", "InternVL3-8B", tiled_lengths(SAMPLES, seed=1), 4),
    ],
)
def test_what_balance_prints(page, model, lengths, batch):
    asked = batch * ACCUMULATION * RANKS
    size = fit_step(lengths, asked, batch_size=batch, num_replicas=RANKS)
    ranks = {"micro_batches": size.micro_batches, "num_replicas": RANKS, "rank": 0}
    sampler = PackSampler(lengths, size.limits, seed=SEED, **ranks)
    profile = analytic_profile(Model.known(model).records, Device.named("A100-80GB"))
    steps = AskedSteps(asked, batch, ACCUMULATION, 1, on_targets=True)
    costs = phase_costs(profile, recompute="full")
    printed = describe(sampler, costs, "zero3", steps, device="A100-80GB")
    assert printed.split() == sample_of(page, "omnibal: 20000 samples").split()


@pytest.mark.parametrize("page", ["finetune.md", "troubleshooting.md"])
def test_what_balance_prints_of_memory(page):
    """Of the command of finetune.md, whose batches are as large as those of test_what_balance_prints."""
    lengths, device = patch_lengths(SAMPLES), Device.named("A100-80GB")
    size = fit_step(lengths, BATCH * ACCUMULATION * RANKS, batch_size=BATCH, num_replicas=RANKS)
    profile = analytic_profile(Model.known("Qwen2.5-VL-7B").records, device)
    cluster = replace(Cluster(1, RANKS, device), memory_bytes=int(usable_bytes(device.memory_bytes)))
    given = free_levels(profile)
    flagged = tuple(index for index, layer in enumerate(profile.layers) if layer.kind.endswith("_block"))
    choice = LayerChoice(given, RankMemory(profile, "zero3", cluster, "full", True), profile, flagged)
    printed = choice.told(lengths, size.limits, choice.chosen(lengths, size.limits))
    assert printed == sample_of(page, printed[:12]).strip()


def test_what_the_planner_makes_is_what_its_page_shows(capsys):
    page = (DOCS.parent / "omnibal/data/balance/ALGORITHM.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    assert capsys.readouterr().out == dedent(re.search(r"(?:^ {4}rank .*\n)+", page, re.MULTILINE)[0])


@pytest.mark.slow
def test_what_advise_prints_of_layouts(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    tiled_lengths(SAMPLES, seed=1).save(tmp_path)
    page = (DOCS / "layouts.md").read_text()
    command = re.search(r"^ {4}omnibal (advise .*)$", page, re.MULTILINE)[1].replace("train.jsonl", str(tmp_path))
    printed = [line.strip() for line in CliRunner().invoke(app, command.split()).stdout.splitlines()]
    shown = re.search(r"\n {4} +samples  without.*?(?=\n\n\|)", page, re.DOTALL)[0].split("\n")
    assert len(shown) > 10
    assert [line for line in shown if line.strip() not in printed] == []
