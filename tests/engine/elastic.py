"""What the processes of test_elastic.py run: from a checkpoint on in other places."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR

from omnibal.engine import checkpointed
from omnibal.engine.initialize import initialize
from omnibal.errors import ConfigError
from omnibal.vlm.weights import whole_state
from tests.engine.cases import SmallDataset, _write, weights_of

SAVED_AT, LAST_STEP, COPIES = 3, 5, 6


def moves_and_more(pairs, third, batches, folder):
    """Everything that two processes are needed for, as this rank sees it."""
    folder = Path(folder)
    moved = [_moved(*configs, folder / str(number), comes_back=True) for number, configs in enumerate(pairs)]
    moved[0].append(_trained(_resumed(third, folder / "0" / "there"), LAST_STEP))
    return {"moved": moved, "batches": other_batches(batches, folder / "0" / "there")}


def moves(pairs, folder):
    """Of each pair of configurations a run that stays under the first one, and one that goes on under the second."""
    return [_moved(*configs, Path(folder) / str(number)) for number, configs in enumerate(pairs)]


def _moved(config, other_config, folder, *, comes_back=False):
    """A run that stays, one that goes on under another configuration, and one that comes back from there."""
    engine = _begun(config)
    before = _trained(engine, SAVED_AT)["samples"]
    copies = _copies_of(engine)
    engine.save_checkpoint(folder / "there")
    stayed = _trained(engine, LAST_STEP) | {"copies": copies, "before": before}
    other = _resumed(other_config, folder / "there")
    copies = _copies_of(other)
    _trained(other, SAVED_AT + 1)
    other.save_checkpoint(folder / "back")
    there = _trained(other, LAST_STEP) | {"copies": copies}
    if not comes_back:  # DeepSpeed's p2p knows the stages of the engine that was made last
        return [stayed, there]
    engine.load_checkpoint(folder / "back")
    return [stayed, there, _trained(engine, LAST_STEP)]


def _begun(config):
    """The engine of a run; without DeepSpeed's schedule it has one of torch's, which keeps rates by place."""
    own = {} if "scheduler" in config else {"lr_scheduler": partial(StepLR, step_size=2, gamma=0.5)}
    return initialize(config=config, dataset=SmallDataset(COPIES), **own)[0]


def _resumed(config, folder):
    engine = _begun(config)
    engine.load_checkpoint(folder)
    assert engine.global_steps == SAVED_AT
    return engine


def _trained(engine, until):
    losses, samples = [], []
    while engine.global_steps < until:
        losses.append(engine.train_batch().item())
        packs = engine.loader.feed.sampler.step(engine.last_step.index).packs
        samples.append((engine.last_step.epoch, sorted(packs.samples.tolist())))
    rates = {group["name"]: group["lr"] for group in engine.basic_optimizer.param_groups}
    return {"losses": losses, "samples": samples, "rates": rates, "weights": _joined(engine, weights_of(engine))}


def _copies_of(engine):
    """Whole float32 copies of this stage's weights, where the optimizer has some."""
    places = engine.module.disk_names().items()
    copies = {name: each.get_full_hp_param() for each, (name, _) in places if hasattr(each, "get_full_hp_param")}
    return _joined(engine, copies)


def _joined(engine, weights):
    """This stage's whole weights, of which each tensor rank has a part."""
    ranks, vlm, found = engine.module.ranks, engine.module.vlm, {}
    if ranks.size == 1:
        return weights
    of_ranks = [None] * ranks.size
    dist.all_gather_object(of_ranks, weights, group=ranks.group)
    for index, _ in engine.module.numbered_layers():
        names = {name: on_disk for name, on_disk in vlm.weight_names(index).items() if on_disk in weights}
        states = [{name: own[on_disk] for name, on_disk in names.items()} for own in of_ranks]
        found |= {names[name]: whole for name, whole in whole_state(vlm, index, states).items()}
    return found


def other_batches(config, folder):
    """What a run of other micro-batches says and trains to the end of its epoch, and what is said to damaged files."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointed.LOG, "warning", lambda message, *values: told.append(message % values))
        engine = _resumed(config, folder)
    total = engine.lr_scheduler.total_num_steps
    found = {"told": told, "steps": (total, engine.global_steps + engine.loader.steps_left(4))}
    found["samples"] = _trained(engine, engine.loader.feed.sampler.epoch_steps)["samples"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match="round_robin_gradients must be false"):
        patch.setattr(engine, "zero_round_robin_gradients", lambda: True)
        engine.load_checkpoint(folder)
    (path,) = folder.glob("*/zero_pp_rank_0_mp_rank_01_optim_states.pt")
    content = torch.load(path, weights_only=False)
    found["refused"] = [_refused(engine, folder, path, damage(content)) for damage in (_without_a_weight, _in_blocks)]
    return found


def _refused(engine, folder, path, content):
    dist.barrier()  # the other rank has read the file
    if dist.get_rank() == 0:
        _write(path, content)
    dist.barrier()
    with pytest.raises(ConfigError) as caught:
        engine.load_checkpoint(folder)
    return str(caught.value)


def _without_a_weight(content):
    (mapping,) = content["optimizer_state_dict"]["param_slice_mappings"]
    others = dict(list(mapping.items())[1:])
    return content | {"optimizer_state_dict": content["optimizer_state_dict"] | {"param_slice_mappings": [others]}}


def _in_blocks(content):
    """The state of an optimizer that keeps a number for each block of weights."""
    states = content["optimizer_state_dict"]
    base = states["base_optimizer_state"]
    blocks = {0: base["state"][0] | {"exp_avg": base["state"][0]["exp_avg"][::64]}}
    return content | {"optimizer_state_dict": states | {"base_optimizer_state": base | {"state": blocks}}}
