"""The quickstart as a user runs it, only smaller: launcher, training script, resume after a kill, export, questions."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from typer.testing import CliRunner

from omnibal import train
from omnibal.cli.main import app
from omnibal.data.limits import PackLimits
from omnibal.engine.checkpoint import newest_first
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.processes import free_port
from omnibal.report.training import plot_training, read_metrics
from tests.engine.cases import run_script
from tests.engine.launch import RANKS_ON, how_all_end, launch
from tools.gpu.one_device import SHARED

pytestmark = pytest.mark.distributed
HERE, ROOT, SCRIPT = Path(__file__).parent, Path(__file__).parents[2], "launch/train.py"
ENVIRONMENT = os.environ | {"DS_ACCELERATOR": RANKS_ON, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SHARING = "OMNIBAL_RANKS_ON" in os.environ and torch.cuda.device_count() < 2
if SHARING:
    ENVIRONMENT |= SHARED


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's data, and a ds_config for a short run on it."""
    folder = tmp_path_factory.mktemp("demo")
    done = CliRunner().invoke(app, ["demo", str(folder / "data"), "--samples", "60", "--held-out", "20", "--json"])
    assert done.exit_code == 0, done.output
    config = json.loads((ROOT / "ds_configs" / "quickstart.json").read_text())
    config["csv_monitor"]["output_path"] = str(folder / "monitor")
    section = config["omnibal"]
    section["model"]["path"] = str(folder / "data" / "model")
    section["data"] |= {
        "train": str(folder / "data" / "train.json"),
        "held_out": str(folder / "data" / "held_out.json"),
    }
    section["run"] |= {"output": str(folder), "epochs": 2, "save_every": 2, "keep": 2, "evaluate_every": 8}
    section["packing"] |= {"vision_units": 12, "llm_tokens": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def start(folder):
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
    script = [SCRIPT, "--deepspeed_config", str(folder / "config.json")]
    if SHARING:
        script = ["--no_python", "--no_local_rank", str(HERE / "share_device.sh"), sys.executable, *script]
    log = (folder / "log.txt").open("w")
    return subprocess.Popen(
        [*command, *script], cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def resume(folder):
    """What a process says that goes on with the run, on each of a launch: their imports took half a minute."""
    train.plot_training = plot_training  # which launches leave out
    log, before = Path("/proc/self/fd/1").readlink(), os.lseek(1, 0, os.SEEK_CUR)
    run_script([SCRIPT, "--deepspeed_config", str(folder / "config.json"), "--resume"], ROOT)
    sys.stdout.flush()
    return log.read_bytes()[before:].decode()


@pytest.mark.cluster(0)
def test_train_kill_resume_export_ask(demo):
    process = start(demo)
    while len(newest_first(demo / "checkpoints")) < 2:
        assert process.poll() is None, (demo / "log.txt").read_text()
        time.sleep(0.1)
    launched = psutil.Process(process.pid).children(recursive=True)
    assert len(launched) >= 3  # the node's launcher and two ranks
    process.terminate()  # the runner alone, which passes no signal on
    process.wait()
    _, alive = psutil.wait_procs(launched, timeout=60)
    assert not alive
    damaged, whole = newest_first(demo / "checkpoints")[:2]
    os.truncate(damaged / "mp_rank_01_model_states.pt", 100)
    output = "".join(launch(2, "tests.launch.test_quickstart:resume", demo, ends=True))

    assert f"going on from {whole.name}, the newest whole checkpoint: checkpoint must be whole" in output
    assert "mp_rank_01_model_states.pt (written by rank 1) has 100 bytes" in output
    assert "held-out answers right" in output
    assert re.search(r"parameters trained +│ vision all [\d.]+ M, projector all [\d.]+ M, language", output)
    assert output.count("memory peak") >= 2  # a line for each stage
    metrics = read_metrics(demo / "metrics.jsonl")
    steps = [record["step"] for record in metrics.steps]
    assert steps == list(range(1, len(steps) + 1))
    assert sum(record["samples"] for record in metrics.steps) == 2 * 60
    assert {record["epoch"] for record in metrics.steps} == {0, 1}
    assert len(list((demo / "checkpoints").glob("global_step*"))) == 2
    assert (demo / "loss.png").exists()
    monitored = {path.name for path in (demo / "monitor").rglob("*.csv")}
    assert {"Train_Balance_vision.csv", "Train_Balance_llm.csv", "Train_Samples_train_loss.csv"} <= monitored

    again = CliRunner().invoke(app, ["export", str(demo / "config.json"), str(demo / "again"), "--json"])
    assert again.exit_code == 0, again.output
    for name in ("model.safetensors", "config.json", "tokenizer.json", "preprocessor_config.json"):
        assert (demo / "again" / name).read_bytes() == (demo / "model" / name).read_bytes()

    drawn = ["--picture", str(demo / "answers.png")]  # about its held-out data
    asked = CliRunner().invoke(app, ["ask", str(demo / "config.json"), "--count", "12", "--json", *drawn])
    assert asked.exit_code == 0, asked.output
    answers = [json.loads(line) for line in asked.stdout.splitlines()]
    assert len(answers) > 10
    assert all(sorted(answer) == ["answer", "images", "question", "right"] for answer in answers)
    assert {len(answer["images"]) for answer in answers} == {0, 1, 2}
    with_image = sum(bool(answer["images"]) for answer in answers)
    assert Image.open(demo / "answers.png").size == (1440, 480 * -(-with_image // 3))


def measure_gain(config):
    """On each process of a launch, as launch/gain.py does it."""
    sys.path.insert(0, str(ROOT / "launch"))
    gain = importlib.import_module("gain")
    gain.STEPS, gain.WARM_UP = 2, 0
    gain.measure(config, torch.device("cpu"))


def test_what_packs_gain_is_measured_and_drawn(demo):
    plan = Plan(PackLimits(12, 256), 2, Partition((0, 8, 13)), ("none",) * 13)
    folder = demo / "gain"
    shutil.copytree(demo / "data" / "model", folder / "model")
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(
        folder / "model"
    )
    plan.save(folder / "plan.json")
    config = json.loads((demo / "config.json").read_text())
    config["omnibal"]["run"]["output"] = str(folder)
    (folder / "config.json").write_text(json.dumps(config))
    launch(2, "tests.launch.test_quickstart:measure_gain", folder / "config.json")
    found = json.loads((folder / "gain.json").read_text())
    assert found["packs"]["padding"] == 0 < found["padded"]["padding"] < 1
    assert all(0 <= found[way]["waiting"] < 0.5 for way in ("padded", "packs"))
    assert found["gain"] == found["padded"]["seconds_per_sample"] / found["packs"]["seconds_per_sample"]
    assert Image.open(folder / "gain.png").size == (1440, 576)


def test_gain_counts_the_slowest_rank_and_the_samples_of_all():
    sys.path.insert(0, str(ROOT / "launch"))
    gain = importlib.import_module("gain")
    # Two ranks, two steps: seconds, samples, share of real tokens.
    padded = np.array([[[1.0, 2, 0.5], [3.0, 2, 1.0]], [[2.0, 2, 0.5], [1.0, 2, 1.0]]])
    packs = np.array([[[1.0, 3, 1.0], [1.0, 1, 1.0]], [[1.0, 3, 1.0], [1.0, 1, 1.0]]])
    assert gain.summary({"padded": padded, "packs": packs}) == {
        "padded": {"seconds_per_sample": 5 / 8, "waiting": 1 - 7 / 10, "padding": 0.25},
        "packs": {"seconds_per_sample": 2 / 8, "waiting": 0, "padding": 0},
        "gain": 2.5,
    }


def test_broken_data_is_named_before_training_starts(demo):
    annotation = demo / "data" / "train" / "stories.jsonl"
    lines = annotation.read_text().splitlines()
    try:
        annotation.write_text("\n".join([*lines[:4], lines[4][:-3], *lines[5:]]) + "\n")
        words = [ROOT / "omnibal" / "train.py", "--deepspeed_config", demo / "config.json", "--restart"]
        (said,) = how_all_end(1, "tests.engine.cases:run_script", [*map(str, words)], ROOT)
    finally:
        annotation.write_text("\n".join(lines) + "\n")
    assert "DataError" in said
    assert "stories.jsonl, line 5" in said
    assert "step/s" not in said
    assert list((demo / "checkpoints").glob("global_step*"))
