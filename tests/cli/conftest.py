import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from omnibal import vlm
from omnibal.advise import estimate, layouts
from omnibal.cli.main import app
from omnibal.demo import write_demo
from omnibal.families.base import LayerRecord
from omnibal.planner import packings
from omnibal.vlm import load_model
from omnibal.vlm.weights import save_model
from tools.synthetic import INTERNVL_MIX, tiled_lengths

CLUSTER = "4xA100-80GB"


@pytest.fixture
def omnibal():
    """Runs the command as a user does; the exit code is 0 unless the test says otherwise."""

    def run(*arguments, exit_code=0):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == exit_code, result.output
        return result

    return run


@pytest.fixture
def refusal(omnibal):
    """Runs a command that must be refused; the one line that says why."""

    def run(*arguments):
        error = omnibal(*arguments, exit_code=2).stderr
        line = error[error.index("error: ") :].rstrip("\n")
        return line.removeprefix("error: ")

    return run


@pytest.fixture(scope="session")
def token_lengths(tmp_path_factory):
    """JSON lists of lengths, as InternVL's packed training uses them: one per source."""
    folder = tmp_path_factory.mktemp("lengths")
    lengths = tiled_lengths(3000, seed=5)
    paths = []
    for number, source in enumerate(INTERNVL_MIX[:3]):
        part = lengths.take((lengths.source == number).nonzero()[0])
        loads = zip(part.vision_units.tolist(), part.llm_tokens.tolist(), strict=True)
        paths.append(folder / f"{source.name}.json")
        paths[-1].write_text(json.dumps([{"vit_num": tiles, "token_num": tokens} for tiles, tokens in loads]))
    return paths


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The demo's data, and its model with random weights; for all tests, none of which changes it."""
    paths = write_demo(tmp_path_factory.mktemp("demo") / "data", samples=60, held_out=20, seed=3)
    model = load_model(paths.model)
    save_model(model, lambda index: dict(model.build_layer(index, seed=0).state_dict()), paths.model)
    return paths


@pytest.fixture
def ds_config(demo, tmp_path):
    """Writes a ds_config about the demo, keys of its sections changed; its path, and the folder of its run."""

    def write(name="config.json", *, deepspeed=None, **sections):
        section = {
            "model": {"path": str(demo.model)},
            "data": {"train": str(demo.meta), "held_out": str(demo.held_out_meta), "max_tiles": 4},
            "packing": {"vision_units": 12, "llm_tokens": 256},
            "pipeline": {"num_stages": 2},
            "run": {"output": str(tmp_path / "run")},
            "cluster": CLUSTER,
        }
        for key, values in sections.items():
            section[key] = section[key] | values if key != "cluster" else values
        content = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}, **(deepspeed or {})}
        (tmp_path / name).write_text(json.dumps(content | {"omnibal": section}, indent=2))
        return tmp_path / name

    return write


@pytest.fixture
def few_steps(monkeypatch):
    """Plans and layouts are judged by a few steps, and few layouts are tried."""
    monkeypatch.setattr(packings, "SIMULATED", 16)
    monkeypatch.setattr(packings, "FEWEST_SIMULATED", 2)
    monkeypatch.setattr(estimate, "LEAST_SAMPLES", 64)
    monkeypatch.setattr(estimate, "LEAST_STEPS", 2)
    monkeypatch.setattr(estimate, "LEAST_SEARCHED", 8)
    monkeypatch.setattr(estimate, "GROUPED", 1)
    monkeypatch.setattr(layouts, "MOST_TRIED", 3)
    monkeypatch.setattr(layouts, "MOST_TIMES", 1)


@pytest.fixture
def no_recompute(tmp_path):
    """Options of somebody who trains by ZeRO 3 without gradient checkpointing, as their arguments say."""
    arguments = {"deepspeed": {"zero_optimization": {"stage": 3}}, "gradient_checkpointing": False}
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    return "--today", tmp_path / "arguments.json"


def cluster_of(num_devices, *, gigabytes=1.0, memory=80.0, **changes):
    """The record of a cluster of devices called "test", as the command line takes it."""
    device = {"name": "test", "memory_bytes": int(memory * 2**30), "link_bytes_per_second": gigabytes * 1e9}
    record = {"num_nodes": 1, "devices_per_node": num_devices, "device": device, "overhead_bytes": 0}
    return json.dumps(record | changes)


def stand_in(monkeypatch, profile):
    """Let every model folder hold the model that a profile is of."""
    records = [
        LayerRecord(cost.name, cost.kind, cost.sizes, cost.tied_key, module=cost.module) for cost in profile.layers
    ]
    monkeypatch.setattr(vlm, "load_records", lambda path, *adapters: records)
    monkeypatch.setattr(vlm, "load_model", lambda path, *adapters: SimpleNamespace(records=records))
