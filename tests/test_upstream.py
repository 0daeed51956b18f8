"""Bugs of others that the project works around are still there: a test that fails says that a workaround can go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "tools" / "upstream").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_bug_is_still_there(script):
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    assert done.returncode == 1, f"cured, take out what tools/upstream/README.md names: {done.stdout}"


def test_each_reproducer_has_a_text_and_a_row():
    table = (SCRIPTS[0].parent / "README.md").read_text()
    for script in SCRIPTS:
        text = script.read_text()
        assert "\nTitle: " in text and "\nRun: python " in text and "Expected: " in text, script
        assert f"| `{script.name}` |" in table
