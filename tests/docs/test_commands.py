"""The commands on the pages run as they stand there, on tiny data in one folder."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from omnibal.advise import estimate, layouts
from omnibal.cli.main import app
from omnibal.demo import write_demo
from omnibal.planner import packings
from omnibal.vlm import load_model
from omnibal.vlm.weights import save_model
from tests.engine.launch import launch

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "ds_configs" / "README.md"]
PROGRAMS = ("omnibal", "deepspeed", "torchrun", "srun", "pip", "hf", "python", "swift", "export")
NOT_RUN = {
    r"pip|hf|python -m sphinx": "needs the network, or makes the site",
    r"\./": "tests/launch and this very run of tests",
    r"export [A-Z]|srun|torchrun --nnodes|deepspeed --hostfile": "sets up, or needs, several nodes",
    r"swift|torchrun \.\.\.": "tests/integrations/test_plugins.py has stand-ins of these hosts",
    r"deepspeed launch/train.py .*--re(sume|start)": "tests/launch/test_quickstart.py goes on and begins anew",
    r"deepspeed launch/examples/finetune.py": "tests/integrations/test_hosts.py trains and resumes it",
    r"omnibal plan .*--(from-run|layout)": "tests/cli/test_plan.py: a GPU's run, and several devices",
    r"omnibal export .*--merged": "tests/cli/test_lora.py: this run has no adapters",
    r"omnibal check-packing": "tests/cli/test_check_packing.py: it needs a model that leaks",
    r"omnibal over": "a line that advise prints",
}
"""How commands begin that do not run here, and why, or what tries them."""
ORDER = ("lengths", "profile", "advise", "plan", "deepspeed", "report", "export", "ask")
"""What comes later needs what came before."""


def commands_of(text):
    """Whole commands: lines of indented or fenced blocks, and calls with a path between backticks."""
    text = re.sub(r"```(?!bash|console)\w+.*?```", "", text, flags=re.DOTALL)
    lines = re.findall(r"^(?: {4}|\$ )((?:.*\\\n)*.*)$", text, re.MULTILINE)
    lines += re.findall(r"`(omnibal [a-z-]+ [\w-]+[./][^`…]*)`", text)
    for line in lines:
        command = " ".join(line.replace("\\\n", " ").split("  #")[0].split())
        if command.startswith(("./", "OMNIBAL_")) or command.split(" ")[0] in PROGRAMS:
            yield re.sub(r"^([A-Z_]+=\S+ )+", "", command)


def rank(command):
    program, verb = command.split()[:2]
    return ORDER.index(verb if program == "omnibal" else program)


FOUND = {command: page.name for page in PAGES for command in commands_of(page.read_text())}
RUN = [command for command in FOUND if not any(re.match(begin, command) for begin in NOT_RUN)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the pages' files lie: a model, conversations, a ds_config, a picture."""
    home = tmp_path_factory.mktemp("pages")
    paths = write_demo(home / "data", samples=200, held_out=20)
    model = load_model(paths.model)
    save_model(model, lambda index: dict(model.build_layer(index, seed=0).state_dict()), paths.model)
    (home / "models").mkdir()
    for name in ("InternVL3-1B-hf", "Qwen2.5-VL-7B", "Qwen2.5-VL-7B-Instruct"):
        (home / "models" / name).symlink_to(paths.model)
    annotations = paths.train_annotations[0]
    images = json.loads(paths.meta.read_text())[annotations.stem]["root"]
    text = annotations.read_text().replace('"image": "', f'"image": "data/{images}/')
    (home / "train.jsonl").write_text(text)
    (home / "launch").symlink_to(ROOT / "launch")
    (home / "ds_configs").mkdir()
    (home / "ds_configs" / "plans").symlink_to(ROOT / "ds_configs" / "plans")
    for name in ("models", *(path.name for path in ROOT.glob("ds_configs/*.json"))):
        (home / "ds_configs" / name).symlink_to(ROOT / "ds_configs" / name)
    section = {
        "model": {"path": str(paths.model)},
        "data": {"train": "data/train.json", "max_tiles": 4, "workers": 0},
        "cluster": "A100-80GB",
        "packing": {"samples_per_step": 8},
        "run": {"max_steps": 3},
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    content = {"optimizer": optimizer, "zero_optimization": {"stage": 1}, "omnibal": section}
    (home / "ds_configs" / "mine.json").write_text(json.dumps(content))
    Image.new("RGB", (80, 60), "red").save(home / "a.jpg")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(packings, "SIMULATED", 16)
        patch.setattr(packings, "FEWEST_SIMULATED", 2)
        patch.setattr(estimate, "LEAST_SAMPLES", 64)
        patch.setattr(estimate, "LEAST_STEPS", 2)
        patch.setattr(estimate, "LEAST_SEARCHED", 8)
        patch.setattr(estimate, "GROUPED", 1)
        patch.setattr(layouts, "MOST_TRIED", 2)
        patch.setattr(layouts, "MOST_TIMES", 1)
        yield home


@pytest.mark.parametrize("command", sorted(RUN, key=rank))
def test_a_command_of_a_page_runs(folder, command):
    program, *words = shlex.split(command)
    for new in ("my-model", "my-adapters"):
        if program == "omnibal" and words[0] == "export" and new in words:
            shutil.rmtree(folder / new, ignore_errors=True)
    if program == "omnibal":
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        return
    # DeepSpeed's launcher itself: tests/launch/test_quickstart.py.
    assert program == "deepspeed"
    launch(1, "tests.engine.cases:run_script", words, folder)  # the plan is of one device


def test_every_reason_for_not_running_is_needed():
    assert [begin for begin in NOT_RUN if not any(re.match(begin, command) for command in FOUND)] == []
    assert len(RUN) > 15


def test_commands_are_found_as_they_stand():
    text = "`omnibal plan a/b.json`, `omnibal plan --explain`\n\n    OMNIBAL_LIMITS=1 omnibal x \\\n        y  # z\n"
    assert [*commands_of(text)] == ["omnibal x y", "omnibal plan a/b.json"]
