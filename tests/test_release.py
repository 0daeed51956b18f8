"""What is uploaded installs and works without the repository: the source archive, and the wheel built from it."""

import json
import os
import subprocess
import sys
import tarfile
import venv
from configparser import ConfigParser
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
SHARE = "share/omnibal/ds_configs"
# Without the checkout in sight: the commands, a plan, and what each flavour imports.
SMOKE = """
import json, sys
from pathlib import Path
import omnibal
from omnibal import BalancedBatchSampler, PackLimits, SampleLengths
assert not Path(omnibal.__file__).is_relative_to(sys.argv[1]), omnibal.__file__
sampler = BalancedBatchSampler(SampleLengths([1, 2, 3, 4], [8, 9, 7, 6]), PackLimits(8, 24), num_replicas=1, rank=0)
assert sorted(sum(sampler, [])) == [0, 1, 2, 3]
from typer.testing import CliRunner
from omnibal.cli.main import app
done = CliRunner().invoke(app, ["--version"])
assert done.exit_code == 0, done.output
print(json.dumps(done.output.split()[-1]))
"""
TRAINER = "from omnibal.integrations.transformers import balance\n"


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the source archive of a copy of the repository, as pip does where it finds no wheel."""
    folder = tmp_path_factory.mktemp("release")
    left_out = ignore_patterns(".*", "tests", "tools", "docs", "runs", "build", "*.egg-info", "__pycache__")
    copytree(ROOT, folder / "copy", ignore=left_out)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "copy")
    with tarfile.open(next((folder / "dist").glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "launch/train.py", "ds_configs/models/Qwen2.5-VL-7B/config.json"} <= names
    return next((folder / "dist").glob("*.whl"))


def test_a_wheel_has_all_that_is_needed_without_the_repository(wheel, tmp_path):
    target = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", target, wheel)
    (info,) = target.glob("omnibal-*.dist-info")
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (target / "omnibal" / "py.typed").exists()
    configs = {path.relative_to(ROOT / "ds_configs") for path in (ROOT / "ds_configs").rglob("*.*")}
    assert {path.relative_to(target / SHARE) for path in (target / SHARE).rglob("*.*")} >= {
        path for path in configs if (ROOT / "ds_configs" / path).is_file()
    }
    environment = os.environ | {"PYTHONPATH": str(target)}
    said = run(sys.executable, "-c", SMOKE, ROOT, cwd=tmp_path, env=environment)
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert json.loads(said.splitlines()[-1]) == setup["metadata"]["version"] == info.name.split("-")[1][: -len(".dist")]


@pytest.mark.slow
@pytest.mark.parametrize(("flavour", "code"), [("", SMOKE), ("[trainer]", SMOKE + TRAINER)])
def test_a_wheel_installs_into_an_empty_environment(wheel, tmp_path, flavour, code):
    venv.create(tmp_path / "env", with_pip=True)
    python, wanted = tmp_path / "env" / "bin" / "python", f"omnibal{flavour} @ {wheel.as_uri()}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = {"cwd": tmp_path, "env": environment}
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wanted, **alone)
    run(python, "-c", code, ROOT, **alone)
    said = run(tmp_path / "env" / "bin" / "omnibal", "--help", **alone)
    assert "advise" in said and "plan" in said


def test_the_changelog_begins_with_the_version():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == setup["metadata"]["version"]
