"""Compiles what a fresh environment lacks before two workers and their ranks each do so: python -m tests.warm_up.

numba's code lies in the user's cache. What is not met here is compiled when a test needs it.
"""

import json
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from omnibal.cli.main import app
from tests.engine.demo import demo_config
from tests.engine.launch import run_loops


def main() -> None:
    """Run loops, and make a plan."""
    run_loops()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "config.json"
        file.write_text(json.dumps(demo_config(Path(name))))
        done = CliRunner().invoke(app, ["plan", str(file), "--cluster", "4xA100-80GB", "--num-stages", "2"])
        assert done.exit_code == 0, done.output


if __name__ == "__main__":
    main()
