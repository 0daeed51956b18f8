"""What the code gives today, recorded before a restructuring and compared after it.

    python -m tools.pins.pins record pins.json     # before
    python -m tools.pins.pins check pins.json      # after: says what differs, exit code 1

Pinned are packs (hashes of every step of every rank, of mixtures and streams too), plans, simulated steps, advice,
and short runs of the pipeline and of a Trainer, bit for bit: losses, weights and exported files. Floats of planning
are compared to 12 digits. Runs repeat bit for bit on one machine only: record and check on the same one. ``--without-
runs`` leaves out what needs torch.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from omnibal import BalancedBatchSampler, PackLimits, SampleLengths
from omnibal.cli.main import app
from omnibal.data.packing_spec import Knot, Mixture
from tests.engine.launch import launch
from tools.synthetic import patch_lengths, tiled_lengths

REPOSITORY = Path(__file__).parents[2]
SAMPLES = 4_000
LIMITS = {"tiles": (PackLimits(16, 7296), PackLimits(9, 4096)), "patches": (PackLimits(32768, 16384),)}
RANKS = ((1, 1), (8, 4), (64, 1))
PLANNED = {
    "free": ([], {"packing": {"samples_per_step": 64}}),
    "limits": (["--num-stages", "4", "--limits", "9,4096"], {"pipeline": {"schedule": "1f1b"}}),
    "tight": (
        ["--num-stages", "4"],
        {
            "pipeline": {"schedule": "zero-bubble-lean"},
            "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": "a100", "memory_bytes": 14 * 2**30},
        },
    ),
    "frozen": (["--num-stages", "2"], {"model": {"frozen": ["vision_block"]}, "pipeline": {"schedule": "1f1b"}}),
}
RUNS = {
    "1f1b": ({}, {"partition": "parameters"}),
    "zero-bubble": (
        {"bf16": {"enabled": True}},
        {"partition": "uniform", "recompute": "selective", "schedule": "zero-bubble"},
    ),
}


def lengths_of(kind: str) -> SampleLengths:
    """Made-up samples."""
    return tiled_lengths(SAMPLES, seed=1) if kind == "tiles" else patch_lengths(SAMPLES, seed=2)


def packs() -> Iterator[tuple[str, Any]]:
    """Hashes of two epochs of all ranks, method by method."""
    for kind, (num_replicas, micro_batches), method in product(LIMITS, RANKS, ("balanced", "isf", "random")):
        lengths = lengths_of(kind)
        for limits, seed in product(LIMITS[kind], (0, 7)):
            digest = hashlib.sha256()
            for rank in range(num_replicas):
                sampler = BalancedBatchSampler(
                    lengths,
                    limits,
                    num_replicas=num_replicas,
                    rank=rank,
                    micro_batches=micro_batches,
                    method=method,  # type: ignore[arg-type]
                    seed=seed,
                )
                for epoch in range(2):
                    sampler.set_epoch(epoch)
                    digest.update(json.dumps([list(map(int, pack)) for pack in sampler]).encode())
            at = f"{limits.vision_units}/{limits.llm_tokens}"
            yield f"packs {kind} {at} {num_replicas}x{micro_batches} {method} seed {seed}", digest.hexdigest()[:16]


def feeds() -> Iterator[tuple[str, Any]]:
    """Hashes of packs of a mixture, and of a stream, on one rank and on four."""
    lengths = lengths_of("tiles")
    sources = np.arange(len(lengths)) % 3
    named = SampleLengths(lengths.vision_units, lengths.llm_tokens, source=sources, source_names=("a", "b", "c"))
    mixture = Mixture({"a": 3, "b": 1, "c": 1}, schedule=(Knot(20, {"a": 1, "c": 2}),))
    for num_replicas in (1, 4):
        digest = hashlib.sha256()
        for rank in range(num_replicas):
            sampler = BalancedBatchSampler(
                named, PackLimits(16, 7296), num_replicas=num_replicas, rank=rank, micro_batches=2, mixture=mixture
            )
            for epoch in range(2):
                sampler.set_epoch(epoch)
                digest.update(json.dumps([list(map(int, pack)) for pack in sampler]).encode())
        yield f"mixture {num_replicas}", digest.hexdigest()[:16]


def drop_ins(folder: Path) -> Iterator[tuple[str, Any]]:
    """Losses and weights of a Trainer under ``balance``, and samples of a stream, on two processes."""
    first, *_ = launch(2, "tools.pins.drop_ins:train_and_draw", folder)
    yield from first.items()


def command(*arguments: str) -> Any:
    """What a verb prints as JSON."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    if result.exit_code != 0:
        sys.exit(f"omnibal {' '.join(arguments)}: {result.output} {result.exception!r}")
    return json.loads(result.stdout)


def plans(folder: Path) -> Iterator[tuple[str, Any]]:
    """Plans, and a simulated step of each, of a small InternVL on counted costs and eight devices."""
    lengths_of("tiles").save(folder / "lengths")
    write_model(folder / "model")
    for name, (options, changes) in PLANNED.items():
        section: dict[str, Any] = {
            "model": {"path": str(folder / "model")},
            "packing": {"samples_per_step": 128},
            "run": {"output": str(folder / name)},
            "cluster": "8xa100",
        }
        for key, values in changes.items():
            section[key] = values if key == "cluster" else section.get(key, {}) | values
        content = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "omnibal": section}
        config = folder / f"{name}.json"
        config.write_text(json.dumps(content))
        plan = command("plan", str(config), "--lengths", str(folder / "lengths"), *options)["plan"]
        of_hardware = ("version", "made_from", "cluster", "layout")
        yield f"plan {name}", {key: value for key, value in plan.items() if key not in of_hardware}
        kept = str(folder / name / "what-if" / "plan.json")
        simulated = command("plan", kept, "--lengths", str(folder / "lengths"))
        yield f"simulate {name}", {key: value for key, value in simulated.items() if "seconds" in key or "ratio" in key}


def advice(folder: Path) -> Iterator[tuple[str, Any]]:
    """What advise says of a trainer."""
    asked = (
        str(folder / "lengths"),
        "--model",
        str(folder / "model"),
        "--cluster",
        "8xA100-80GB",
        "--accumulation",
        "4",
    )
    for today in ("zero3", "ddp"):
        yield f"advise {today}", numbers_of(command("advise", *asked, "--today", today))


def numbers_of(answer: Any) -> Any:
    """An answer without its words."""
    if isinstance(answer, dict):
        return {key: numbers_of(value) for key, value in answer.items() if not isinstance(value, str)}
    return list(map(numbers_of, answer)) if isinstance(answer, list) else answer


def write_model(folder: Path) -> None:
    """The configuration of a 1B model, which is enough to count its costs."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    vision = sizes | {"image_size": [448, 448], "patch_size": [14, 14]}
    text = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    text |= {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    folder.mkdir()
    content = {"model_type": "internvl", "vision_config": vision, "text_config": text, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(content))


def runs(folder: Path) -> Iterator[tuple[str, Any]]:
    """Losses, weights and exported files of short runs of two processes."""
    demo = ["omnibal", "demo", str(folder / "data"), "--samples", "200"]
    subprocess.run(demo, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    quickstart = json.loads((REPOSITORY / "ds_configs" / "quickstart.json").read_text())
    for name, (deepspeed_keys, pipeline) in RUNS.items():
        output = folder / name
        config = {key: value for key, value in quickstart.items() if key != "csv_monitor"} | deepspeed_keys
        config["omnibal"] = {
            **quickstart["omnibal"],
            "model": {"path": str(folder / "data" / "model"), "weights": "random", "seed": 0},
            "data": {"train": str(folder / "data" / "train.json"), "max_tiles": 4, "workers": 1},
            "pipeline": {"num_stages": 2, **pipeline},
            "run": {"output": str(output), "epochs": 1},
        }
        (folder / f"{name}.json").write_text(json.dumps(config))
        launch = ["deepspeed", "--log_level", "warning", "--num_gpus", "2", str(REPOSITORY / "launch" / "train.py")]
        subprocess.run(
            [*launch, "--deepspeed_config", str(folder / f"{name}.json")],
            check=True,
            cwd=REPOSITORY,
            env=os.environ | {"DS_ACCELERATOR": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        yield f"run {name} losses", [step["loss"] for step in steps if "loss" in step]
        files = sorted(path for path in (output / "model").rglob("*") if path.is_file())
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}
        yield f"run {name} files", hashes


def take(with_runs: bool) -> dict[str, Any]:
    """All pins."""
    with tempfile.TemporaryDirectory() as folder:
        of_numbers = (packs(), feeds(), plans(Path(folder)), advice(Path(folder)))
        of_runs = (runs(Path(folder)), drop_ins(Path(folder))) if with_runs else ()
        return {name: value for kind in (*of_numbers, *of_runs) for name, value in kind}


def rounded(value: Any) -> Any:
    """The value with floats to 12 digits."""
    if isinstance(value, float):
        return float(np.format_float_scientific(value, precision=12))
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def main() -> None:
    """Record or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--without-runs", action="store_true", help="leave out what needs torch")
    arguments = parser.parse_args()
    found = rounded(take(not arguments.without_runs))
    if arguments.what == "record":
        arguments.file.write_text(json.dumps(found, indent=1) + "\n")
        return
    pinned = json.loads(arguments.file.read_text())
    different = [name for name in pinned if name in found and found[name] != pinned[name]]
    missing = [name for name in pinned if name not in found]
    print(f"{len(pinned) - len(different) - len(missing)} of {len(pinned)} pins are as they were")
    for name in different:
        print(f"different: {name}\n  was {json.dumps(pinned[name])[:400]}\n  is  {json.dumps(found[name])[:400]}")
    if missing:
        print(f"not taken: {', '.join(missing)}")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
