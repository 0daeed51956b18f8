"""What the processes of the distributed tests run; each function returns plain data."""

import os
import resource
import runpy
import shutil
import signal
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from time import sleep

import pytest
import torch
import torch.distributed as dist

from omnibal.config import layout_of, read_config
from omnibal.cost import Load
from omnibal.data.epoch import Step
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.engine import module as module_file
from omnibal.engine.checkpoint import SavedFile, read_manifest, write_manifest
from omnibal.engine.initialize import build_engine, initialize
from omnibal.engine.module import ON_ALL_RANKS
from omnibal.engine.resolve import ResolvedRun, UserOptimizer
from omnibal.errors import DataError, OmnibalError
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.vlm import load_model
from tests.engine.deep import DeepModel
from tests.engine.small import IMAGE_TOKEN, small_samples
from tests.integrations.items import items_of_kinds
from tests.vlm.families import family_samples, pack_of
from tests.vlm.test_weights import Payload

SGD = {"type": "SGD", "params": {"lr": 0.1}}
RESUMED_COPIES = 3
"""Of the small samples in runs that are killed and go on: an epoch has three to five steps."""


class FixedPacks:
    """A loader that gives the same packs again and again."""

    steps_per_epoch = 1

    def __init__(self, steps, replica, reads, vlm, kinds=()):
        """Args: for each step the packs of every replica; which one this is, whether it reads anything; the model;
        kinds of samples with videos.
        """
        self.micro_batches = len(steps[0][replica])
        family = vlm.config.model_type
        samples = small_samples() if vlm.config.image_token_id == IMAGE_TOKEN else family_samples(family)
        samples = items_of_kinds(family, kinds) if kinds else samples
        self._steps = cycle(
            [pack_of(vlm, [samples[index] for index in pack]) for pack in packs[replica]] for packs in steps
        )
        self._reads = reads
        self._num_samples = sum(len(pack) for packs_of_rank in steps[0] for pack in packs_of_rank)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state  # every step has the same packs

    def next_step(self):
        step = Step(0, 0, self._num_samples, Load([1], [1]))
        batches = next(self._steps)
        return step, list(batches) if self._reads else []


def engine_of(case):
    num_stages = len(case.boundaries) - 1
    resolved, plan = run_of(case, num_replicas=len(case.packs))
    assert resolved.layout.num_devices == dist.get_world_size()
    stage, replica, _ = resolved.layout.position(dist.get_rank())
    steps = [_dealt(packs, resolved.layout.shape(stage)[0]) for packs in (case.packs, *case.later_packs)]
    loader = FixedPacks(steps, replica, stage in (0, num_stages - 1), resolved.vlm, case.kinds)
    return build_engine(resolved, plan, loader, case.steps, UserOptimizer(**case.own))


def run_of(case, *, num_replicas):
    """What a case resolves to, and its plan."""
    num_stages, micro_batches = len(case.boundaries) - 1, len(case.packs[0])
    content = {
        "gradient_accumulation_steps": micro_batches,
        "optimizer": SGD,
        "zero_optimization": {"stage": case.zero_stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "omnibal": {
            "model": {"path": case.model, "frozen": list(case.frozen), "lora": case.lora},
            "optimizer": case.grouped,
        },
    } | case.extra
    config, section = read_config(content)
    vlm = DeepModel(case.model) if case.deep else load_model(case.model, section.model.lora, case.frozen)
    layout = replace(layout_of(config, num_stages, num_replicas), encoder=case.encoder, num_tensor=case.num_tensor)
    resolved = ResolvedRun(config, section, Path(case.model), vlm, layout)
    recompute = tuple(islice(cycle(case.recompute), len(vlm.records)))
    predicted = None
    if case.pending_bytes is not None:
        stage_of_plan = StagePrediction(1.0, 2.0, 0.0, 0.1, case.pending_bytes, StageMemory(*range(9)))
        predicted = Prediction(1.0, 8.0, 0.1, (stage_of_plan,) * num_stages)
    plan = Plan(
        PackLimits(9, 99), micro_batches, Partition(case.boundaries), recompute, predicted, schedule=case.schedule,
        layout=layout,
    )  # fmt: skip
    return resolved, plan


def _dealt(packs, num_replicas):
    """The packs of the LLM's replicas as those of a stage with other replicas, which take them in turns."""
    numbered = [packs[number % len(packs)][number // len(packs)] for number in range(len(packs) * len(packs[0]))]
    return [numbered[replica::num_replicas] for replica in range(num_replicas)]


def weights_of(engine):
    """This stage's weights by their names on disk."""
    engine.settle_weights()
    module, found = engine.module, {}
    for index, layer in module.numbered_layers():
        names = module.vlm.weight_names(index)
        for name, parameter in layer.named_parameters():
            if name in names:
                found[names[name]] = parameter.detach().clone()
    return found


def one_step(cases):
    """Loss and gradients of the first step of each case, as this rank has them."""
    return [_first_step(case) for case in cases]


def _first_step(case):
    captured = {}
    own = {"on_gradient": lambda name, gradient: captured.update({name: gradient.clone()})}
    engine = engine_of(replace(case, own=own))
    loss = engine.train_batch().item()
    return {"loss": loss, "gradients": captured, "samples": engine.global_samples}


def several_steps(cases):
    """Losses, gradient norms and final weights of each case, as this rank has them."""
    return [_several_steps(case) for case in cases]


def _several_steps(case):
    read, load_layer = [], module_file.load_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_file, "load_layer", lambda *given: (read.append(given[1]), load_layer(*given)))
        engine = engine_of(case)
    losses, norms = [], []
    for _ in range(case.steps):
        losses.append(engine.train_batch().item())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))  # DeepSpeed takes none in fp32 under ZeRO 0
    return {"losses": losses, "norms": norms, "weights": weights_of(engine), "read": read}


def steps_until_killed(case, rank, folder):
    """Train without end; this rank is killed in the second step. Each rank leaves a file behind the first one."""
    engine = engine_of(case)
    engine.train_batch()
    (Path(folder) / str(dist.get_rank())).touch()
    while True:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_batch()


def steps_with_a_resume(cases, folder):
    """Of each case what `several_steps` gives, and what a run gives that resumes before the last step."""
    found = []
    for number, case in enumerate(cases):
        engines, both = [engine_of(case), engine_of(case)], []
        for resumes, engine in enumerate(engines):
            losses, norms = [], []
            if resumes:
                engine.load_checkpoint(Path(folder) / str(number))
            while engine.global_steps < case.steps:
                losses.append(engine.train_batch().item())
                norms.append(engine.get_global_grad_norm())
                if engine.global_steps == case.steps - 1 and not resumes:
                    engine.save_checkpoint(Path(folder) / str(number))
            norms = [None if norm is None else float(norm) for norm in norms]
            both.append({"losses": losses, "norms": norms, "weights": weights_of(engine)})
        found.append(both)
    return found


def optimizer_shares(cases):
    """Of each case the parameters that this rank updates of a spread encoder's, and of its stage's."""
    found = []
    for case in cases:
        groups, shares = engine_of(case).basic_optimizer.param_groups, {True: 0, False: 0}
        for group in groups:
            shares[group.get(ON_ALL_RANKS, False)] += sum(parameter.numel() for parameter in group["params"])
        found.append((shares[True], shares[False]))
    return found


def evaluated_and_saved(cases, folder):
    """What an evaluation of each case's packs says behind its steps, and weights; a checkpoint goes into the folder."""
    found = []
    for number, case in enumerate(cases):
        engine = engine_of(case)
        for _ in range(case.steps):
            engine.train_batch()
        evaluation = engine.evaluate(engine_of(case).loader)
        engine.save_checkpoint(Path(folder) / str(number), "end")
        found.append({"evaluation": evaluation, "weights": weights_of(engine)})
    return found


class SmallDataset:
    """The small samples, several times over, as initialize takes a dataset."""

    def __init__(self, copies=4):
        self._samples = small_samples() * copies
        self.decoded = 0

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        self.decoded += self._samples[index]["pixel_values"] is not None
        return self._samples[index]

    def text(self, index):
        return {**self._samples[index], "pixel_values": None}

    def lengths(self):
        tiles = [0 if s["pixel_values"] is None else len(s["pixel_values"]) for s in self._samples]
        sources = [number % 2 for number in range(len(tiles))]
        return SampleLengths(tiles, [len(s["input_ids"]) for s in self._samples], source=sources)


class FlawedDataset(SmallDataset):
    """The small samples, of which one breaks what a dataset promises."""

    def __init__(self, flaw, index):
        super().__init__()
        self._flaw, self._index = flaw, index

    def __getitem__(self, index):
        if self._flaw == "unreadable" and index == self._index:
            raise DataError(f"image must be decodable, got picture.png (train.jsonl, line {index + 1})")
        if self._flaw == "slow" and index == self._index:
            sleep(0.3)
        return super().__getitem__(index)

    def text(self, index):
        sample = super().text(index)
        if index == self._index and self._flaw == "short text":
            return sample | {"labels": sample["labels"][:-1]}
        if index == self._index and self._flaw == "other text":
            return sample | {"labels": torch.full_like(sample["labels"], -100)}
        return sample

    def lengths(self):
        lengths = super().lengths()
        return lengths.take(range(len(lengths) - 1)) if self._flaw == "short lengths" else lengths


def settings(model, *, num_stages, zero_stage=1, extra=None):
    """A ds_config as a user would write it."""
    return {
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": 1.0 if zero_stage else 0.0,
        "omnibal": {
            "model": {"path": str(model), "seed": 3},
            "data": {"workers": 0},
            "packing": {"vision_units": 4, "llm_tokens": 48, "method": "isf"},
            "pipeline": {"num_stages": num_stages, "recompute": "full"},
            "run": {"epochs": 4},
        },
    } | (extra or {})


def changed(config, section, **values):
    """A configuration with some keys of one part of its section changed."""
    omnibal = config["omnibal"]
    return config | {"omnibal": omnibal | {section: omnibal.get(section, {}) | values}}


def train(config, first_step, last_step, folder, save_at=None):
    """Train from one step to another; losses, learning rates, weights, and what an evaluation says that has gone on.

    A run that saves on its way is to be killed, and says nothing.
    """
    dataset = SmallDataset(RESUMED_COPIES)
    engine, _, loader, scheduler = initialize(config=config, dataset=dataset)
    epochs, sampler = config["omnibal"]["run"]["epochs"], loader.feed.sampler
    assert scheduler.total_num_steps == loader.steps_left(epochs)
    if first_step:
        engine.load_checkpoint(folder)
    assert engine.global_steps == first_step
    losses, rates, samples = [], [], []
    while engine.global_steps < last_step:
        losses.append(engine.train_batch().item())
        rates.append(scheduler.get_last_lr()[0])
        samples.append((engine.last_step.epoch, engine.last_step.index, engine.last_step.num_samples))
        if engine.global_steps == save_at:
            engine.save_checkpoint(folder)
    if save_at is not None:
        return None
    held_out = None
    if first_step:
        held_out = engine.evaluate(engine.held_out_loader(dataset))
        engine.save_checkpoint(folder / "end")
    return {
        "losses": losses,
        "rates": rates,
        "samples": samples,
        "weights": weights_of(engine),
        "held_out": held_out,
        "seen": engine.global_samples,
        "decoded": dataset.decoded,
        "steps_of_epochs": [sampler.steps_of(epoch) for epoch in range(epochs)],
        "steps_left": loader.steps_left(epochs),
    }


def train_units(config, steps):
    """Losses, weights and decoded samples of a run on a dataset."""
    dataset = SmallDataset()
    engine, *_ = initialize(config=config, dataset=dataset)
    losses = [engine.train_batch().item() for _ in range(steps)]
    decoded, evaluation = dataset.decoded, engine.evaluate(engine.held_out_loader(SmallDataset(1)))
    return {"losses": losses, "weights": weights_of(engine), "decoded": decoded, "evaluation": evaluation}


def spread_by_key(whole, apart, refused, folder):
    """What runs give that differ in the placement of the encoder, and what is said to others."""
    steps = whole["omnibal"]["run"]["max_steps"]
    found = {"refused": early_refusals(refused), "whole": train_units(whole, steps)}
    dataset = SmallDataset()
    engine, *_ = initialize(config=apart, dataset=dataset)
    losses = [engine.train_batch().item() for _ in range(steps)]
    engine.save_checkpoint(Path(folder))
    cut = changed(whole, "pipeline", partition=list(engine.module.parts))
    pipeline, *_ = initialize(config=cut, dataset=dataset)
    found["apart"] = {"losses": losses, "weights": weights_of(engine)}
    return found | {"resumed": _refusal(lambda: pipeline.load_checkpoint(Path(folder)))}


def train_and_save(configs, steps, folder):
    """Losses of each configuration's own data, and weights; a checkpoint of each goes into a folder of its number."""
    found = []
    for number, config in enumerate(configs):
        engine, *_ = initialize(config=config)
        losses = [engine.train_batch().item() for _ in range(steps)]
        engine.save_checkpoint(Path(folder) / str(number), "end")
        found.append({"losses": losses, "weights": weights_of(engine)})
    return found


def run_script(words, folder):
    """Run a script, with its arguments, as a launcher does in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")


def train_all(configs, *arguments):
    """As train, for several configurations after another."""
    return [train(config, *steps, Path(folder), *arguments) for config, *steps, folder in configs]


def refusals(configs):
    """What initialize says to each configuration, as this rank hears it; None where it accepts."""
    return [_refusal(lambda config=config: initialize(config=config, dataset=SmallDataset())) for config in configs]


class Unmeasured(SmallDataset):
    """The small samples, whose lengths nobody may ask for yet."""

    def lengths(self):
        raise RuntimeError("samples are measured")


def early_refusals(configs):
    """As refusals, of what must be refused before samples are measured."""
    return [_refusal(lambda config=config: initialize(config=config, dataset=Unmeasured())) for config in configs]


def flawed_datasets(config, flaws, index):
    """What an epoch says about a sample with each flaw, as this rank hears it; its longest wait with a slow one."""
    said = [_refusal(lambda flaw=flaw: _epoch(config, FlawedDataset(flaw, index))) for flaw in flaws]
    return said, _epoch(config, FlawedDataset("slow", index))


def _epoch(config, dataset):
    engine, _, loader, _ = initialize(config=config, dataset=dataset)
    longest = 0.0
    for _ in range(loader.steps_per_epoch):
        engine.train_batch()
        longest = max(longest, engine.data_seconds)
    return longest


def checkpoint_troubles(config, other_configs, folder):
    """What this rank hears when checkpoints cannot be saved or loaded, and whether it then goes on from a whole one."""
    rank, said, folder = dist.get_rank(), {}, Path(folder)
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    engine.train_batch()
    engine.save_checkpoint(folder, "a")
    weights = weights_of(engine)
    engine.train_batch()
    said["another tag"] = _refusal(lambda: engine.save_checkpoint(folder, f"rank{rank}"))
    said["no name"] = _refusal(lambda: engine.save_checkpoint(folder, "a/b"))
    with _full_disk() if rank == 1 else nullcontext():
        said["full disk"] = _refusal(lambda: engine.save_checkpoint(folder, "a"))
    dist.barrier()
    said["left"] = sorted(path.name for path in folder.iterdir() if path.is_dir())
    with _vanishing_folder(engine) if rank == 1 else nullcontext():
        said["vanished"] = _refusal(lambda: engine.save_checkpoint(folder / "other", "a"))
    engine.save_checkpoint(folder, "b")
    for name, other in other_configs.items():
        foreign, *_ = initialize(config=other, dataset=SmallDataset())
        said[name] = _refusal(lambda foreign=foreign: foreign.load_checkpoint(folder))
    said["nothing"] = _refusal(lambda: engine.load_checkpoint(folder / "no"))
    said["objects"] = _refusal(lambda: engine.save_checkpoint(folder, "c", client_state={"mine": Payload("")}))
    state = Path(engine._get_zero_ckpt_name(folder, "b"))
    if rank == 1:
        whole = state.read_bytes()
        _write(state, Payload(folder / "ran"))
    dist.barrier()
    said["code"], said["ran"] = _refusal(lambda: engine.load_checkpoint(folder)), (folder / "ran").exists()
    if rank == 1:
        _write(state, whole)
    dist.barrier()
    engine.load_checkpoint(folder)
    layer = Path(engine.module.ckpt_layer_path_list(folder / "b", 0)[0])
    if rank == 1:
        flip(layer, layer.stat().st_size // 2)
    dist.barrier()
    said["damaged"] = _refusal(lambda: engine.load_checkpoint(folder))
    if rank == 1:
        os.truncate(engine._get_zero_ckpt_name(folder, "b"), 1000)
    dist.barrier()
    said["cut off"] = _refusal(lambda: engine.load_checkpoint(folder))
    engine.load_checkpoint(folder, fall_back=True)
    said["went on"] = engine.global_steps, all(weights[name].equal(value) for name, value in weights_of(engine).items())
    return said


def _write(path, content):
    """Another content of a checkpoint's file, of which the manifest knows."""
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    manifest = read_manifest(path.parent)
    files = manifest.pop("files")
    write_manifest(path.parent, manifest, {**files, path.name: SavedFile.of(path, files[path.name].rank)})


@contextmanager
def _vanishing_folder(engine):
    """Let the folder of checkpoints vanish before this process writes a file."""
    save = engine.checkpoint_engine.save

    def lost(state, path):
        shutil.rmtree(Path(path).parents[1], ignore_errors=True)
        save(state, path)

    engine.checkpoint_engine.save = lost
    try:
        yield
    finally:
        engine.checkpoint_engine.save = save


@contextmanager
def _full_disk():
    """Let no file of this process grow beyond some bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def train_under(configs, steps):
    """Boundaries in use, losses and final weights of this stage, for each configuration."""
    return [_train_under(config, steps) for config in configs]


def _train_under(config, steps):
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    losses = [engine.train_batch().item() for _ in range(steps)]
    return {"boundaries": tuple(engine.module.parts), "losses": losses, "weights": weights_of(engine)}


def levels_used(config):
    """Which levels this rank's layers ran under in a step's packs, by the packs' tokens."""
    used, run_layer = {}, module_file.run_layer

    def recorded(layer, payload, level):
        used.setdefault(payload.input_ids.shape[1], set()).add(level)
        return run_layer(layer, payload, level)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_file, "run_layer", recorded)
        _epoch(config, SmallDataset())
    return used


def _refusal(work):
    try:
        work()
    except OmnibalError as error:
        return f"{type(error).__name__}: {error}"
    return None


def flip(path, place):
    """Another lowest bit of one byte; a negative place counts from the end."""
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
