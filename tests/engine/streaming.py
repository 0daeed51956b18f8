"""What the processes of the tests of streams run: packs of samples that are drawn one by one."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from omnibal.engine import loader as loader_file
from omnibal.engine.initialize import initialize
from omnibal.errors import OmnibalError
from omnibal.report.training import read_metrics
from omnibal.train import train
from tests.engine.cases import changed, weights_of
from tests.engine.small import IMAGE_TOKEN, PIXEL_SHAPE, TOKENS_PER_TILE, VOCABULARY, small_samples

LAST_STEP, SAVED_AT, KILLED_AT = 6, 3, 4
MOST_STEPS = 8
"""By which sources that fail have failed."""


def sample(number):
    """A sample that can be told from all others by its tokens."""
    generator = torch.Generator().manual_seed(number)
    tiles = int(torch.randint(0, 3, (1,), generator=generator))
    image = torch.full((tiles * TOKENS_PER_TILE,), IMAGE_TOKEN)
    text = torch.randint(4, VOCABULARY, (int(torch.randint(6, 14, (1,), generator=generator)),), generator=generator)
    pixels = torch.randn(tiles, *PIXEL_SHAPE, generator=generator) if tiles else None
    return {
        "input_ids": torch.cat([image, text]),
        "labels": torch.cat([torch.full_like(image, -100), torch.where(torch.arange(len(text)) > 2, text, -100)]),
        "pixel_values": pixels,
    }


class Counting:
    """Samples from a number on, for ever; goes on where it stood."""

    def __init__(self, first):
        self.next = first

    def __iter__(self):
        while True:
            number, self.next = self.next, self.next + 1
            yield sample(number)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Finite(IterableDataset):
    """Some samples, in each pass; without a state."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def sources():
    return {
        "stateful": Counting(1000),
        "indexed": [sample(number) for number in range(2000, 2030)],
        "stateless": Finite([sample(number) for number in range(3000, 3050)]),
    }


def watched(engine, steps):
    """Train to a step: losses, the samples that this rank read, and the shares of each step."""
    found = {"losses": [], "seen": [], "shares": [], "samples": []}
    next_step = engine.loader.next_step

    def seen():
        step, batches = next_step()
        found["seen"] += [batch.get("input_ids", batch["labels"]).tolist() for batch in batches]
        return step, batches

    engine.loader.next_step = seen
    while engine.global_steps < steps:
        found["losses"].append(engine.train_batch().item())
        found["shares"].append(dict(engine.last_step.shares))
        found["samples"].append(engine.last_step.num_samples)
    return found


def everything(configs, plain, folder, streamed):
    """What four processes are needed for, as this rank sees it; buffers are small, so that there are many windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_file, "buffer_of", lambda micro_batches: 24)
        return _everything(configs, plain, folder, streamed)


def all_resumed(configs, folder):
    """The runs of other layouts alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_file, "buffer_of", lambda micro_batches: 24)
        return _all_resumed(configs, folder)


def _all_resumed(configs, folder):
    return [resumed(config, Path(folder) / str(number)) for number, config in enumerate(configs)]


def _everything(configs, plain, folder, streamed):
    return {
        "resumed": _all_resumed(configs, folder),
        "plain": plain_run(plain),
        "refused": refused(configs[0]),
        "failed": failed(configs[0]),
        "streamed": streamed_run(streamed),
    }


def resumed(config, folder):
    """A run, and one that was killed two steps behind its checkpoint and went on."""
    engine, *_ = initialize(config=config, dataset=sources())
    whole = watched(engine, LAST_STEP) | {"weights": weights_of(engine)}
    killed, *_ = initialize(config=config, dataset=sources())
    watched(killed, SAVED_AT)
    killed.save_checkpoint(folder)
    watched(killed, KILLED_AT)
    del killed
    engine, *_ = initialize(config=config, dataset=sources())
    engine.load_checkpoint(folder)
    again = watched(engine, LAST_STEP) | {"weights": weights_of(engine)}
    other, *_ = initialize(config=changed(config, "packing", seed=7), dataset=sources())
    return {"whole": whole, "again": again, "other": _said(lambda: other.load_checkpoint(folder))}


def plain_run(config):
    """Losses and gradients of steps that each hold all of a few samples."""
    gradients = []
    engine, *_ = initialize(
        config=config,
        dataset=Finite(small_samples()),
        on_gradient=lambda name, gradient: gradients.append((name, gradient.clone())),
    )
    losses = [engine.train_batch().item() for _ in range(3)]
    first = dict(gradients[: len(gradients) // 3])
    return {
        "losses": losses,
        "gradients": first,
        "epochs": engine.last_step.epoch,
        "samples": engine.global_samples,
        "beyond": _said(engine.train_batch),
    }


def refused(config):
    """What initialize says to streams that cannot work."""
    few = type("FewShards", (Finite,), {"num_shards": 1})([])
    cases = {
        "epochs": (changed(config, "run", max_steps=None), Counting(0)),
        "limits": (changed(config, "packing", llm_tokens=None), Counting(0)),
        "method": (changed(config, "packing", method="isf"), Counting(0)),
        "repeat": (changed(config, "data", mixture="repeat_time"), Counting(0)),
        "name": (config, {"statefull": Counting(0), "indexed": [], "stateless": []}),
        "several": (changed(config, "data", mixture=None), {"a": Counting(0), "b": Counting(0)}),
        "shards": (changed(config, "data", mixture=None), few),
    }
    return {name: _said(lambda case=case: initialize(config=case[0], dataset=case[1])) for name, case in cases.items()}


class Broken(Finite):
    """Yields some samples; then fails where a replica asks."""

    def __iter__(self):
        yield from self.samples
        if dist.get_rank() == 1:
            raise OSError("shard 7 is gone")
        yield from Counting(500)


class Stuck(Finite):
    """Yields some samples, then none on one replica until it is released."""

    released = threading.Event()

    def __iter__(self):
        yield from self.samples
        if dist.get_rank() == 1:
            self.released.wait()
        yield from Counting(500)


def failed(config):
    """What ranks hear of sources that fail while they are trained."""
    one = changed(changed(config, "data", mixture=None), "run", max_steps=MOST_STEPS)
    some = [sample(number) for number in range(60)]
    bad = sample(3) | {"labels": sample(4)["labels"][:2]}
    long = sample(3) | {name: sample(3)[name].repeat(20) for name in ("input_ids", "labels")}
    long["pixel_values"] = None if long["pixel_values"] is None else long["pixel_values"].repeat(20, 1, 1, 1)
    cases = {
        "empty": (one, Finite([])),
        "gone": (one, Broken(some)),
        "bad": (one, Finite([bad] * 4)),
        "long": (changed(one, "packing", oversized="error"), Finite([long] * 4)),
        "all": (changed(one, "packing", oversized="drop"), Finite([long] * 4)),
        "stuck": (one, Stuck(some)),
    }
    told = {name: _said(lambda case=case: _trained(*case)) for name, case in cases.items()}
    Stuck.released.set()
    return told


def _trained(config, dataset):
    engine, _, loader, _ = initialize(config=config, dataset=dataset)
    loader.feed.filling.warn_seconds, loader.feed.filling.wait_seconds = 0.05, 0.3
    for _ in range(MOST_STEPS):
        engine.train_batch()


def streamed_run(config):
    """A run of ``train`` on JSON lines that are read as streams."""
    engine = train(config)
    steps = read_metrics(Path(config["omnibal"]["run"]["output"]) / "metrics.jsonl").steps
    return engine.global_steps, engine.global_samples, steps


def streamed_weights(config):
    """Losses of a run of ``initialize`` on JSON lines, and this stage's weights behind it."""
    engine, *_ = initialize(config=config)
    losses = [engine.train_batch().item() for _ in range(3)]
    return {"losses": losses, "weights": weights_of(engine)}


def _said(work):
    try:
        work()
    except OmnibalError as error:
        return f"{type(error).__name__}: {error}"
    return None
