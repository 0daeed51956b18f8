"""The quickstart's run on a little of its data."""

import json

from omnibal.demo import write_demo
from tests.engine.launch import ROOT


def demo_config(folder):
    """Write data and a model without weights; the quickstart's ds_config with their paths, and no monitor."""
    paths = write_demo(folder, samples=60, held_out=20)
    config = json.loads((ROOT / "ds_configs" / "quickstart.json").read_text())
    config["omnibal"]["model"]["path"] = str(paths.model)
    config["omnibal"]["data"] |= {"train": str(paths.meta), "held_out": None, "workers": 0}
    config["omnibal"]["run"]["output"] = str(folder / "run")
    del config["csv_monitor"]
    return config
