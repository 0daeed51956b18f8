"""The base install plans and simulates; what lacks an extra says which one, in one line."""

import json
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from PIL import Image

from omnibal.data.limits import PackLimits
from omnibal.errors import _EXTRAS
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.cli.conftest import cluster_of
from tests.clusters import on_cluster
from tests.pipeline.profiles import fixed_profile
from tools.synthetic import tiled_lengths

BASE_ONLY = f"""
import json, sys
for name in {sorted(_EXTRAS)}:
    sys.modules[name] = None  # as if it were not installed
"""
RUN_ALL = (
    BASE_ONLY
    + """
from typer.testing import CliRunner
from omnibal.cli.main import app
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    result = CliRunner().invoke(app, arguments)
    error = None if result.exception is None or isinstance(result.exception, SystemExit) else repr(result.exception)
    results[name] = (result.exit_code, result.output, error)
print(json.dumps(results))
"""
)


def after(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Exit code, output and uncaught error of every verb where only the base install is there."""
    folder = tmp_path_factory.mktemp("base")
    fixed_profile([0.03, 0.02, 0.05], output=[1e6] * 3).save(folder / "profile.json")
    on_cluster(Plan(PackLimits(9, 4096), 4, Partition((0, 2, 3)), ("none",) * 3), 2).save(folder / "plan.json")
    tiled_lengths(500, seed=1).save(folder / "lengths")
    (folder / "meta.json").write_text('{"shapes": {}}')
    for name in ("model/config.json", "checkpoint/omnibal.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
    profile, plan, lengths, model = (str(folder / name) for name in ("profile.json", "plan.json", "lengths", "model"))
    section = {"packing": {"samples_per_step": 16}, "run": {"output": str(folder / "run")}}
    (folder / "ds_config.json").write_text(json.dumps({"omnibal": section}))
    cluster = ("--num-stages", "2", "--cluster", cluster_of(4))
    Image.new("RGB", (300, 200)).save(folder / "a.png")
    (folder / "train.jsonl").write_text('{"image": "a.png", "conversations": [{"from": "gpt", "value": "A cat."}]}')
    (folder / "today.yaml").write_text("finetuning_type: lora\ndeepspeed: null\n")
    advise = ["advise", str(folder / "train.jsonl"), "--model", "InternVL3-1B", "--cluster", "2xA100-80GB"]
    verbs = {
        "demo": ["demo", str(folder / "demo")],
        "lengths": ["lengths", str(folder / "meta.json"), str(folder / "out"), "--model", model],
        "advise": [*advise, "--today", str(folder / "today.yaml")],
        "advise, drawn": [*advise, "--plot", str(folder / "advice.png")],
        "lengths, packed": ["lengths", lengths, "--num-replicas", "2"],
        "profile": ["profile", model, str(folder / "p.json"), "--cluster", "a100"],
        "plan, drawn": ["plan", plan, f"--plot={folder / 'timeline.png'}"],
        "plan": ["plan", str(folder / "ds_config.json"), "--profile", profile, "--lengths", lengths, *cluster,
                 "--limits", "9,4096"],
        "plan, shown": ["plan", plan],
        "report": ["report", plan, "--out", str(folder / "r.html")],
        "ask": ["ask", model, "What is this?"],
        "export": ["export", str(folder / "checkpoint"), str(folder / "exported")],
    }  # fmt: skip
    return after(RUN_ALL, json.dumps(verbs))


def test_planning_needs_nothing_but_the_base_install(results):
    for verb in ("advise", "lengths, packed", "plan", "plan, shown"):
        assert results[verb][0] == 0, results[verb]


@pytest.mark.parametrize(
    ("verb", "extra"),
    [
        *((verb, "train") for verb in ("demo", "lengths", "profile", "ask", "export")),
        *((verb, "plots") for verb in ("advise, drawn", "plan, drawn", "report")),
    ],
)
def test_a_command_without_its_extra_names_it_in_one_line(results, verb, extra):
    code, output, error = results[verb]
    assert (code, error) == (2, None), output
    (line,) = output.strip().splitlines()
    assert line.startswith("error: ") and line.endswith(f"run pip install 'omnibal[{extra}]'")


@pytest.mark.parametrize(
    "statement",
    [
        "from omnibal import initialize",
        "import omnibal.engine.loader",
        "import omnibal.train",
        "from omnibal.vlm import load_model",
        "from omnibal.formats.conversations import open_dataset",
        "from omnibal.demo import write_demo",
    ],
)
def test_an_import_without_its_extra_names_it(statement):
    code = (
        f"{BASE_ONLY}\ntry:\n    {statement}\nexcept ModuleNotFoundError as error:\n    print(json.dumps(str(error)))"
    )
    assert after(code).endswith("run pip install 'omnibal[train]'")


def test_every_module_that_may_be_missing_is_in_an_extra():
    setup = ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg")
    extras = setup["options.extras_require"]
    packages = {extra: {line.partition(">")[0] for line in lines.split()} for extra, lines in extras.items()}
    for module, extra in _EXTRAS.items():
        assert module in packages[extra]


def test_tools_versions_runs_the_tests_at_every_floor_of_setup_cfg():
    setup, root = ConfigParser(), Path(__file__).parents[1]
    setup.read(root / "setup.cfg")
    extras = {name: lines for name, lines in setup["options.extras_require"].items() if name != "test"}
    lines = "\n".join([setup["options"]["install_requires"], *extras.values()]).splitlines()
    floors = {}
    for need in (Requirement(line) for line in lines if line.strip() and not line.startswith(("#", "omnibal["))):
        for each in need.specifier:
            floors[need.name] = max(floors.get(need.name, Version("0")), Version(each.version))
    lines = (root / "tools/versions/oldest.txt").read_text().splitlines()
    oldest = {pin.name: pin.specifier for pin in (Requirement(line) for line in lines if not line.startswith("#"))}
    assert len(floors) > 20
    assert {name: str(floor) for name, floor in floors.items() if floor not in oldest.get(name, ())} == {}
