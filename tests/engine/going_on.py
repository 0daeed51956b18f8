"""What the processes of the tests of going on run: past steps that are not finite, and from checkpoints."""

from dataclasses import replace
from fcntl import LOCK_EX, flock
from functools import partial
from math import nan
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from transformers import InternVLForConditionalGeneration

from omnibal import train as train_file
from omnibal.cluster import Layout
from omnibal.data.limits import PackLimits
from omnibal.engine import checkpointed
from omnibal.engine import engine as engine_file
from omnibal.engine import loader as loader_file
from omnibal.engine.checkpoint import latest_checkpoint
from omnibal.engine.initialize import LOG, initialize
from omnibal.errors import ConfigError, OmnibalError
from omnibal.families.base import trained_in_words
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.report.training import read_metrics
from omnibal.train import train
from tests.engine.cases import SmallDataset, changed, weights_of
from tests.engine.small import NUM_LAYERS


class PoisonedDataset(SmallDataset):
    """The small samples; every pixel of one of them is NaN."""

    def __init__(self, index):
        super().__init__()
        sample = self._samples[index]
        self._samples[index] = sample | {"pixel_values": torch.full_like(sample["pixel_values"], nan)}


def all_at_once(precisions, unsaved, saved, others, whole, folder):
    """Everything that two processes are needed for, as this rank sees it."""
    return {
        "poisoned": [poisoned(config) for config in precisions],
        "weights": weights_only(unsaved, folder / "weights"),
        **saved_run(saved, others, folder),
        "renewed": [renewed(saved, folder / "checkpoints"), renewed(unsaved, folder / "weights")],
        "whole": whole_run(changed(whole, "run", output=str(folder / "whole"), epochs=2, evaluate_every=3)),
    }


def begun_and_resumed(config):
    """What this rank has at the end of a run, and again when it goes on from its checkpoint behind step 2."""
    found = []
    for resume in (False, "global_step2"):
        engine = train(config, resume=resume)
        loss = read_metrics(engine.resolved.section.run.files.metrics).steps[-1]["loss"]
        found.append({"layout": str(engine.resolved.layout), "loss": loss, "weights": weights_of(engine)})
    return found


def whole_run(config):
    """A loop over the loader's steps, and a run of ``train`` with everything of its own that does the same."""
    engine, _, loader, _ = initialize(config=config, dataset=SmallDataset())
    for _ in range(2):
        steps = iter(loader)
        for _ in range(len(loader)):
            engine.train_batch(steps)
    with pytest.raises(ConfigError, match="data_iter must have a step left, got its end"):
        engine.train_batch(steps)
    with pytest.raises(ConfigError, match=r"data_iter must be iter\(loader\) of the loader, got an iterator over dict"):
        engine.train_batch(iter([{"input_ids": []}]))
    with pytest.raises(ConfigError, match="loader must be of held-out samples, got that of training"):
        engine.evaluate(loader)
    with pytest.raises(ConfigError, match=r"eval_batch must not be called; engine.evaluate"):
        engine.eval_batch(steps)
    with pytest.raises(ConfigError, match="train_batch_size must stay as it is, got 8"):
        engine.set_train_batch_size(8)
    evaluated, seen = [], set()
    own = {
        "model": InternVLForConditionalGeneration.from_pretrained(config["omnibal"]["model"]["path"]),
        "dataset": SmallDataset(),
        "held_out": SmallDataset(1),
        "optimizer": partial(torch.optim.AdamW, lr=config["optimizer"]["params"]["lr"]),
        "lr_scheduler": lambda optimizer, total_steps: WarmupCosineLR(
            optimizer, total_steps, warmup_num_steps=max(1, total_steps // 20)
        ),
        "on_evaluation": lambda engine: evaluated.append(engine.global_steps),
        "on_gradient": lambda name, _: seen.add(name),
    }
    bare = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    trained = train(bare, **own)
    output = Path(config["omnibal"]["run"]["output"])
    mixed = changed(config, "run", output=f"{output}_mixed", max_steps=3, evaluate_every=0)
    mixed = changed(mixed, "data", mixture={"0": 1, "1": 3})
    trained_mixed = train(changed(mixed, "packing", method="balanced"), dataset=SmallDataset())
    with pytest.raises(ConfigError, match=r"must be a folder without checkpoints, got .*; resume \(--resume\) goes on"):
        train(bare, **own)
    with pytest.raises(ConfigError, match="resume must be False with restart, got True"):
        train(bare, resume=True, restart=True, **own)
    refused_before_anything(bare, output)
    fails_behind_the_last_step(config, Path(f"{output}_failed"))
    goes_on_under_plans(config, Path(f"{output}_planned"))
    learns_nothing(config)
    return {
        "steps": (engine.global_steps, trained.global_steps, evaluated),
        "seen": seen == weights_of(trained).keys(),
        "weights": (weights_of(engine), weights_of(trained)),
        "model": output / "model",
        "logged": len((output / "metrics.jsonl").read_text().splitlines()),
        "mixed": (trained_mixed.global_steps, trained_mixed.lr_scheduler.total_num_steps),
        "shares": [step["shares"] for step in read_metrics(Path(f"{output}_mixed") / "metrics.jsonl").steps],
    }


def refused_before_anything(config, output):
    """What ``train`` says without having read a sample."""
    unread = {"dataset": object()}
    with pytest.raises(ConfigError, match=r"must hold checkpoints to go on from, got .*_none without any; begin"):
        train(changed(config, "run", output=f"{output}_none", evaluate_every=0), resume=True, **unread)
    with pytest.raises(ConfigError, match=r"must be a folder that omnibal wrote completely, got .*step7"):
        train(changed(config, "run", evaluate_every=0), resume="step7", **unread)
    with pytest.raises(ConfigError, match="evaluate_every must be 0 without held-out data, got 3"):
        train(config, resume=True, **unread)
    with (output / "lock").open() as lock:
        if dist.get_rank() == 0:
            flock(lock, LOCK_EX)
        with pytest.raises(ConfigError, match="must be a folder that no other run trains into now, got "):
            train(changed(config, "run", evaluate_every=0), restart=True, **unread)


def fails_behind_the_last_step(config, output):
    """A caller's evaluation that fails costs no step; the run can go on in the same process."""
    config = changed(config, "run", output=str(output), evaluate_every=0, max_steps=2)
    config = changed(config, "data", workers=1)
    with pytest.raises(ZeroDivisionError):
        train(config, dataset=SmallDataset(), on_evaluation=lambda engine: 1 / 0)
    assert latest_checkpoint(output / "checkpoints").name == "global_step2"
    dist.barrier()
    if dist.get_rank() == 0:
        (output / "metrics.jsonl").unlink()
    assert train(config, dataset=SmallDataset(), resume=True).global_steps == 2
    assert (output / "model" / "config.json").is_file()
    begins_anew_behind_a_link(config, output / "checkpoints")


def begins_anew_behind_a_link(config, checkpoints):
    """``restart`` deletes what a linked folder holds of the run, and nothing else."""
    elsewhere = checkpoints.with_name("elsewhere")
    if dist.get_rank() == 0:
        checkpoints.rename(elsewhere)
        checkpoints.symlink_to(elsewhere)
        (elsewhere / "notes.txt").write_text("mine")
    dist.barrier()
    train(changed(config, "run", max_steps=1), dataset=SmallDataset(), restart=True)
    assert sorted(path.name for path in elsewhere.iterdir()) == SAVED


SAVED = ["global_step1", "notes.txt", "zero_to_fp32.py", "zero_to_torch.py"]


def goes_on_under_plans(config, output):
    """A plan of packs under the same limits is adopted; one under other limits is not."""
    layout = Layout(2, precision="float32", accumulate_float32=False)  # the run's: of machines the plan says nothing
    begun = Plan(PackLimits(4, 48), 2, Partition((0, 4, NUM_LAYERS)), ("none",) * NUM_LAYERS, layout=layout)
    newer = replace(begun, micro_batches=3, partition=Partition((0, 6, NUM_LAYERS)))
    config = changed(config, "pipeline", plan="auto", num_stages="auto")
    with pytest.raises(ConfigError, match=r"pipeline.plan must be a file, got .*plan.json; `omnibal plan --write`"):
        train(changed(config, "run", output=str(output), evaluate_every=0), dataset=SmallDataset())
    told = []
    other = replace(newer, limits=PackLimits(5, 48))
    for step, (plan, followed) in enumerate(((begun, begun), (newer, newer), (other, newer)), start=1):
        dist.barrier()
        if dist.get_rank() == 0:
            plan.save(output / "plan.json")
        dist.barrier()
        run = changed(config, "run", output=str(output), evaluate_every=0, max_steps=step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_file.LOG, "warning", lambda message, *values: told.append(message % values))
            engine = train(run, dataset=SmallDataset(), resume=step > 1)
        assert (engine.global_steps, engine.plan) == (step, followed)
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all(f"under the plan that it followed before, {output / 'run_plan.json'}; " in line for line in told)


class UntargetedDataset(SmallDataset):
    """The small samples, of which no token is a target; as if their template ended no answer."""

    added_end = "</end>"

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"labels": torch.full_like(sample["labels"], -100)}

    def text(self, index):
        return self[index] | {"pixel_values": None}


def learns_nothing(config):
    """What is trained is told at the start, an end that no template writes, and a step without targets."""
    with pytest.MonkeyPatch.context() as patch:
        told = []
        for log, level in (
            (LOG, "info"),
            (LOG, "warning"),
            (loader_file.LOG, "warning"),
            (engine_file.LOG, "warning"),
        ):
            patch.setattr(log, level, lambda message, *values: told.append(message % values))
        engine, *_ = initialize(config=changed(config, "model", frozen=["vision"]), dataset=UntargetedDataset())
        assert engine.train_batch() == 0
    expected = [
        f"parameters trained: {trained_in_words(engine.resolved.trained)}",
        "labels must name targets, got none in a whole step (0 of epoch 0)",
    ]
    if engine.global_rank == 0:
        assert "each answer is trained with '</end>' behind it" in told.pop(1)
    assert told == (expected if engine.global_rank == 0 else [])
    assert engine.resolved.trained["vision"].trained == 0 < engine.resolved.trained["language"].trained


def poisoned(config):
    """An epoch with a sample that is not finite; then steps without end whose gradients on the first rank are not."""
    engine, _, loader, scheduler = initialize(config=config, dataset=PoisonedDataset(13))
    losses = [engine.train_batch().item() for _ in range(loader.steps_per_epoch)]
    found = {
        "losses": losses,
        "steps": (engine.skipped_steps, engine.global_steps, scheduler.last_batch_iteration + 1),
        "samples": engine.global_samples,
    }
    if engine.global_rank == 0:
        next(engine.module.parameters()).register_hook(lambda gradient: gradient * nan)
    before, step = weights_of(engine), engine.global_steps
    with pytest.raises(OmnibalError) as caught:
        while True:
            engine.train_batch()
    after = weights_of(engine)
    return found | {
        "error": str(caught.value),
        "failed": engine.global_steps - step,
        "finite": all(weight.isfinite().all() for weight in before.values()),
        "kept": all(torch.equal(after[name], weight) for name, weight in before.items()),
    }


def weights_only(config, folder):
    """How far weights lie from the saved ones: the initial ones, those loaded, and those after one more step."""
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    initial = weights_of(engine)
    for _ in range(3):
        engine.train_batch()
    engine.save_checkpoint(folder)
    saved = weights_of(engine)
    other = config | {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    other, *_ = initialize(config=changed(other, "model", frozen=["patch_embedding"]), dataset=SmallDataset())
    other.load_checkpoint(folder, load_optimizer_states=False)
    loaded = weights_of(other)
    other.train_batch()
    return [_distance(weights, saved) for weights in (initial, loaded, weights_of(other))]


def renewed(config, checkpoints):
    """What holds, and what is said, where a run goes on under other settings."""
    params = {"lr": 0.003, "weight_decay": 0.4, "torch_adam": True}
    other = config | {"optimizer": {"type": "AdamW", "params": params}, "gradient_clipping": 0.25}
    other = changed(other | {"gradient_accumulation_steps": 1}, "run", epochs=5)
    engine, _, _, scheduler = initialize(config=other, dataset=SmallDataset())
    with pytest.MonkeyPatch.context() as patch:
        told = []
        patch.setattr(checkpointed.LOG, "warning", lambda message, *values: told.append(message % values))
        engine.load_checkpoint(checkpoints)
    groups, steps = engine.basic_optimizer.param_groups, engine.global_steps
    found = {
        "decay": {group["weight_decay"] for group in groups},
        "clipping": {engine.gradient_clipping(), engine.optimizer.clip_grad},
        "rates": {group["lr"] for group in groups},
        "scheduled": scheduler.get_lr()[0],
        "told": told,
    }
    engine.train_batch()
    return found | {"went_on": engine.global_steps == steps + 1 > 1}


def _distance(weights, others):
    return max(float((weights[name].float() - others[name].float()).abs().max()) for name in others)


def saved_run(config, others, folder):
    """What runs under other settings say to a run's checkpoint, and its weights, which its model is saved with."""
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    engine.train_batch()
    engine.save_checkpoint(folder / "checkpoints")
    refused = []
    for other_config in others:
        other, *_ = initialize(config=other_config, dataset=SmallDataset())
        with pytest.raises(OmnibalError) as caught:
            other.load_checkpoint(folder / "checkpoints")
        refused.append(str(caught.value))
    return {"refused": refused, "model": weights_of(engine)}
