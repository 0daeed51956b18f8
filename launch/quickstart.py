"""The quickstart's four parts: data, plan, training, gain. launch/quickstart.sh runs it in its environment.

Each part shows the commands that it runs and what came of them; what they print goes to runs/quickstart/log.txt.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from omnibal.demo import majority_accuracy
from omnibal.processes import LAUNCHER
from omnibal.report.training import read_metrics

RUN = Path("runs/quickstart")
CONFIG, CLUSTER, DATA, LOG = RUN / "ds_config.json", RUN / "cluster.json", RUN / "data", RUN / "log.txt"
SAMPLES = 6000
TAIL = 20
"""Lines of the log that are shown when a command fails."""
# What libraries warn of is for those who wrote the code.
QUIET = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
OUT = Console(highlight=False, markup=False)


def main(options: Sequence[str]) -> None:
    """Run the parts; --resume goes on with the training of a run that was stopped."""
    if options not in ([], ["--resume"]):
        sys.exit(f"options must be none or --resume, got {' '.join(options)}")
    RUN.mkdir(parents=True, exist_ok=True)
    LOG.write_text("")
    processes, device, environment = devices()
    resumes = bool(options) and CONFIG.exists()

    part(1, "Data: pictures of coloured shapes, and questions about them")
    if not (DATA / "model" / "config.json").exists():  # the last thing that is written
        shutil.rmtree(DATA, ignore_errors=True)
        omnibal("demo", DATA, "--samples", SAMPLES)
    if not resumes:
        shutil.copy("ds_configs/quickstart.json", CONFIG)
    data = json.loads(omnibal("lengths", CONFIG, "--json"))["all"]
    found(
        f"{data['samples']:,} samples of 0 to {data['vision_units']['max']} tiles and up to "
        f"{data['llm_tokens']['max']} LLM tokens, {data['with_image'] / data['samples']:.0%} of them with a picture"
    )

    part(2, f"Plan: how to train a small InternVL on {processes} × {device['name']}")
    if not resumes:
        CLUSTER.write_text(json.dumps(device_cluster(processes, device), indent=2) + "\n")
        omnibal("plan", CONFIG, "--cluster", CLUSTER, "--num-stages", processes, "--measure", "--write")
    plan = json.loads((RUN / "plan.json").read_text())
    found(
        f"{len(plan['partition']) - 1} pipeline stages; {plan['micro_batches']} packs a step of at most "
        f"{plan['limits']['vision_units']} tiles and {plan['limits']['llm_tokens']} tokens",
    )

    part(3, "Training under the plan")
    launcher = [*LAUNCHER[:-1], "error", "--num_gpus", processes, "launch/train.py", "--deepspeed_config", CONFIG]
    call([*launcher, "--resume" if resumes else "--restart"], environment, shows_progress=True)
    answers = read_metrics(RUN / "metrics.jsonl").evaluations[-1]
    chance = majority_accuracy(*(sorted(DATA.glob(f"{part}/*.jsonl")) for part in ("train", "held_out")))
    omnibal("ask", CONFIG, "--count", 6, "--picture", RUN / "answers.png")
    found(
        f"{answers['held_out_accuracy']:.0%} of {answers['held_out_samples']} unseen questions are answered right "
        f"({chance:.0%} without looking)",
        f"see {RUN}/answers.png and {RUN}/loss.png; {RUN}/model is the model, for transformers",
    )

    part(4, "Gain: padded random batches and balanced packs of the same data, in turn")
    measure = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    call([*measure, "launch/gain.py", CONFIG], environment)
    gain = json.loads((RUN / "gain.json").read_text())
    padded, packed = (1e3 * gain[way]["seconds_per_sample"] for way in ("padded", "packs"))
    found(
        f"{padded:.1f} ms a sample padded, {packed:.1f} ms in packs: {gain['gain']:.2f} times as fast",
        f"measured on {gain['ranks']} × {gain['device']}; see {RUN}/gain.png",
    )


def devices() -> tuple[int, dict[str, Any], dict[str, str]]:
    """How many processes train, what each runs on, and what that needs in the environment: two GPUs, one, or a CPU."""
    gpus = min(torch.cuda.device_count(), 2)
    if gpus:
        return gpus, {"name": torch.cuda.get_device_name(), "memory_bytes": torch.cuda.mem_get_info()[1]}, {}
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return 2, {"name": "cpu", "memory_bytes": memory_bytes}, {"DS_ACCELERATOR": "cpu"}


def device_cluster(processes: int, device: dict[str, Any]) -> dict[str, Any]:
    """Describe the devices as the ds_config does; other processes take no memory of a CPU's share."""
    cluster = {"num_nodes": 1, "devices_per_node": processes, "device": device | {"link_bytes_per_second": 1e9}}
    return cluster | ({"overhead_bytes": 0} if device["name"] == "cpu" else {})


def part(number: int, title: str) -> None:
    OUT.print(f"\n{number}  {title}", style="bold")


def found(*lines: str) -> None:
    for line in lines:
        OUT.print(f"   {line}", soft_wrap=True)


def omnibal(*words: object) -> str:
    """Run a command of omnibal's, and show it: it is what a user types."""
    OUT.print(f"   $ omnibal {shlex.join(map(str, words))}", style="dim", soft_wrap=True)
    return call(["omnibal", *words])


def call(command: Sequence[object], environment: dict[str, str] | None = None, *, shows_progress: bool = False) -> str:
    """Run a command and return what it prints; all else goes to the log, except a progress bar that is shown."""
    with LOG.open("a") as log, OUT.status("   working; log.txt has what commands print"):
        process = subprocess.Popen(
            [*map(str, command)],
            env=os.environ | QUIET | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=None if shows_progress else log,
            text=True,
        )
        # A signal to this process alone ends what it runs; a terminal's Ctrl-C reaches both.
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        printed = process.communicate()[0]
        log.write(printed)
    if process.returncode:
        OUT.print("\n".join(LOG.read_text().splitlines()[-TAIL:]))
        sys.exit(f"{' '.join(map(str, command[:4]))} … ended with status {process.returncode}; {LOG} has all of it")
    return printed


if __name__ == "__main__":
    main(sys.argv[1:])
