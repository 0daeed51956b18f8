"""Samples rearranged between phases: the gradients of plain transformers, sample by sample."""

import os
import re
import threading
from copy import deepcopy
from dataclasses import replace
from unittest.mock import Mock

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from omnibal.data.limits import PackLimits
from omnibal.dispatch.exchange import _exchange, exchange
from omnibal.dispatch.rearrangement import Rearrangement
from omnibal.dispatch.step_plan import Costs, Link, PhaseCosts
from omnibal.errors import ConfigError, DataError, InfeasibleError
from omnibal.integrations.rearranging import Passes, RearrangedModel
from omnibal.integrations.rearranging_loader import RearrangingLoader, carried_bytes, counted_costs, measured_link
from omnibal.packs.collator import FAMILIES, PackCollator, RowCollator, positions_of
from omnibal.packs.encoders import encoders_of
from omnibal.ranks import failures
from tests.engine.launch import RANKS_ON, ROOT, launch
from tests.families.models import small_config
from tests.integrations.items import UNPACKED, Collate, collated_backward, config_of, items_of, items_of_kinds
from tests.vlm.families import plain_backward, plain_family_model

PAGE = ROOT / "docs" / "rearranging.md"
LEARNING_RATE = 0.05
LEFT = "all ranks must take part in each step, got rank 1 left the loop while rank 0 went on"
EXACT = {"rtol": 1e-4, "atol": 2e-6}
BLANKS = {
    "lfm2_vl": {
        "pixel_values": torch.ones(1, 4, 48),
        "spatial_shapes": torch.full((1, 2), 2),
        "pixel_attention_mask": torch.ones(1, 4).long(),
    }
}
ON_DEVICES = {"rtol": 1e-3, "atol": 1e-5}
# Rank 1 draws texts alone; the last micro-batch leaves rank 0 without any.
DRAWN = [[[0, 2, 5], [1, 6]], [[4, 7], [9]], [[10, 8], []]]


def loader_of(family, batches, **options):
    packed, collate = family in FAMILIES, Collate(family)
    positions = positions_of(config_of(family))
    collator = PackCollator(collate, positions) if packed else RowCollator(collate, positions)
    encoders = encoders_of(plain_family_model(config_of(family)), blank=BLANKS.get(family))
    return RearrangingLoader(batches, collator, encoders=encoders, prints=False, **options)


def batches_of(family, rank):
    items = items_of(family)
    return [[items[sample] for sample in (*of_ranks, [], [])[rank]] for of_ranks in DRAWN]


def gradients(family):
    """On every rank: gradients of a step of three micro-batches, averaged over ranks as DDP does."""
    model = plain_family_model(config_of(family))
    begun = deepcopy(model.state_dict())
    model.to(device())
    rearranged = RearrangedModel(model, encoders=encoders_of(model, blank=BLANKS.get(family)))
    losses = [rearranged(drawn) for drawn in loader_of(family, batches_of(family, dist.get_rank()), micro_batches=3)]
    assert len(losses) == 3
    sum(losses).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    loss = torch.stack(losses).sum().detach()
    for value in (loss, *found.values()):
        dist.all_reduce(value)
        value.div_(dist.get_world_size())
    return loss.cpu(), {name: gradient.cpu() for name, gradient in found.items()}, begun


def device():
    return torch.device(get_accelerator().current_device_name())


def trained(family, host):
    """Weights after three steps, one micro-batch each, under a host."""
    model = plain_family_model(config_of(family))
    begun = deepcopy(model.state_dict())
    layers = (*model.model.language_model.layers, *vision_layers(model.model))
    loader = loader_of(family, batches_of(family, dist.get_rank()))
    return trained_under(host, RearrangedModel(model), loader, layers), begun


def trained_under(host, rearranged, loader, layers):
    """Weights after the steps of a loader; under FSDP layers are sharded one by one."""
    model = rearranged.model
    if host.startswith("zero"):
        stage = int(host[-1])
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        engine = deepspeed.initialize(model=rearranged, optimizer=optimizer, config=config)[0]
        for drawn in loader:
            engine.backward(engine(drawn))
            engine.step()
        with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=stage == 3):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if host == "fsdp":
        for layer in layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        wrapped = fully_shard(rearranged, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        wrapped = DistributedDataParallel(rearranged)
    optimizer = torch.optim.SGD(wrapped.parameters(), LEARNING_RATE)
    for drawn in loader:
        wrapped(drawn).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: getattr(weight, "full_tensor", weight.clone)() for name, weight in weights.items()}


def vision_layers(inner):
    tower = getattr(inner, "vision_tower", None)
    return inner.visual.blocks if tower is None else tower.encoder.layer


def moves_there_and_back():
    """Two exchanges and their composition bring the same bits; gradients come back to where values were."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    num_ranks = dist.get_world_size()
    places = np.random.default_rng(0).integers(0, num_ranks, (3, 9))
    drawn, encoder, llm = np.sort(places[0]), places[1], places[2]
    rows = {"pixels": np.arange(9) % 4, "ids": np.arange(9)[::-1].copy()}
    to_encoder, to_llm = Rearrangement(drawn, encoder, num_ranks), Rearrangement(drawn, llm, num_ranks)
    held = to_encoder.held_by(rank)
    tensors = {
        "pixels": torch.randn(rows["pixels"][held].sum(), 3, 2, generator=generator).to(device()).requires_grad_(),
        "ids": torch.randint(99, (rows["ids"][held].sum(),), generator=generator).to(device()),
    }
    encoded = exchange(tensors, rows, to_encoder)
    there = exchange(exchange(encoded, rows, to_encoder.inverse()), rows, to_llm)
    at_once = exchange(encoded, rows, to_llm.after(to_encoder.inverse()))
    for name in tensors:
        assert torch.equal(there[name], at_once[name])
    back = exchange(encoded, rows, to_encoder.inverse())
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)
    (at_once["pixels"] * 3).sum().backward()
    assert torch.equal(tensors["pixels"].grad, torch.full_like(tensors["pixels"], 3))
    # Summed over ranks, nothing was lost.
    total = torch.stack([tensor["pixels"].detach().double().sum() for tensor in (tensors, at_once)])
    dist.all_reduce(total)
    torch.testing.assert_close(total[0], total[1])
    with pytest.raises(ConfigError, match=r"ids must have the .* rows of its samples"):
        exchange({"ids": torch.zeros(99)}, rows, to_encoder)


def the_documented_loop_trains():
    """Word by word."""
    (loop,) = re.findall(r"```python\n(from omnibal.packs.encoders.*?)```", PAGE.read_text(), re.DOTALL)
    model = plain_family_model(small_config("internvl"))
    begun = model.lm_head.weight.detach().clone()
    names = {"model": model, "batches": batches_of("internvl", dist.get_rank()), "collate": Collate("internvl")}
    names["optimizer"] = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    exec(loop, names | {"DistributedDataParallel": DistributedDataParallel})
    trained = model.lm_head.weight.detach()
    theirs = trained.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(theirs, trained)
    assert not torch.equal(trained, begun)


def videos_move_beside_images(family):
    """In one phase; where a rank alone lacks one of both it encodes a blank, and the last micro-batch has no video."""
    rank, items = dist.get_rank(), items_of_kinds(family, ("image", "video", "", "image+video", "video"))
    drawn = [[[0, 3, 2], [1]], [[], [4, 2]], [[2], [0]]]
    model = plain_family_model(config_of(family))
    plain, rearranged = deepcopy(model), RearrangedModel(model)
    batches = [[items[number] for number in (*of_ranks, [], [])[rank]] for of_ranks in drawn]
    sum(rearranged(of) for of in loader_of(family, batches, micro_batches=3)).backward()
    collated_backward(plain, [items[number] for of_ranks in drawn for of in of_ranks for number in of], family)
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        found = parameter.grad / dist.get_world_size()
        torch.testing.assert_close(
            found, expected.grad, rtol=1e-4, atol=1e-5 * float(expected.grad.abs().max()), msg=name
        )


def frozen_encoder_sends_nothing_back():
    """Pixels and tokens travel together, features after them; with a frozen encoder no gradient does."""
    sent = {}
    for frozen in (False, True):
        model = plain_family_model(small_config("internvl"))
        inner = model.model
        for part in (inner.vision_tower, inner.multi_modal_projector):
            part.requires_grad_(not frozen)
        (drawn, *_) = loader_of("internvl", batches_of("internvl", dist.get_rank()))
        with CommDebugMode() as counted:
            RearrangedModel(model)(drawn).backward()
        sent[frozen] = counted.get_total_counts()
    assert sent == {False: 3, True: 2}


class Numbers:
    """A source that never ends, and can be resumed."""

    def __init__(self, family, rank):
        self.items, self.next, self.rank = items_of(family), 0, rank

    def __iter__(self):
        while True:
            drawn = [self.items[(5 * self.rank + self.next + number) % len(self.items)] for number in range(2)]
            self.next += 2
            yield drawn

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def resumes(family="internvl"):
    """Stopped after a step and resumed, the samples are those that would have followed; no rank waits for another."""
    rank = dist.get_rank()

    def tokens(loader, steps):
        found = []
        for drawn in loader:
            found.append(drawn.tokens[:, 0].tolist())
            if len(found) == 2 * steps:
                return found, loader.state_dict()
        return found, loader.state_dict()

    whole, _ = tokens(loader_of(family, Numbers(family, rank), micro_batches=2), 4)
    first, state = tokens(loader_of(family, Numbers(family, rank), micro_batches=2), 2)
    again = loader_of(family, Numbers(family, rank), micro_batches=2)
    again.load_state_dict(state)
    assert first + tokens(again, 2)[0] == whole
    # A list has no state: what was trained is drawn again and left out.
    batches = batches_of(family, rank)
    loader = loader_of(family, batches)
    next(iter(loader))
    again = loader_of(family, batches)
    again.load_state_dict(loader.state_dict())
    rest = [drawn.tokens for drawn in again]
    assert [len(tokens) for tokens in rest] == [len(drawn.tokens) for drawn in loader_of(family, batches)][1:]
    with pytest.raises(ConfigError, match=r"state must be of a run on \d ranks, got 9"):
        again.load_state_dict(state | {"num_ranks": 9})


def what_costs_more_than_it_saves_does_not_move(family="internvl"):
    """Then nothing is sent but the plan, and the first line says why."""
    link = Link(1e9, 1e9, {"vision": 1.0}, {"vision": 1.0}, 1.0)
    loader = loader_of(family, batches_of(family, dist.get_rank()), costs=Costs(link=link))
    drawn = next(iter(loader))
    assert drawn.plan.moves["vision"].is_still
    assert drawn.plan.moves["llm"].is_still
    assert drawn.plan.describe().count("as drawn (to move would save ") == 2
    with CommDebugMode() as counted:
        RearrangedModel(plain_family_model(config_of(family)))(drawn).backward()
    assert counted.get_total_counts() == 0


def links_are_measured():
    """The same on all ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, measured_link(None, device()), group=dist.new_group(backend="gloo"))
    assert len(set(found)) == 1
    assert all(value > 0 for value in found[0])


def on_devices(families, _):
    """What a GPU and NCCL may do otherwise than a processor and gloo."""
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cudnn.allow_tf32 = False
    moves_there_and_back()
    assert next(iter(loader_of("internvl", batches_of("internvl", dist.get_rank())))).tokens.is_pinned()
    num, sent = dist.get_world_size(), torch.arange(6.0, device=device()).requires_grad_()
    to_itself = Rearrangement(np.arange(num), np.arange(num), num)
    (arrived,) = _exchange([sent], [np.full(num, 6)], [to_itself], None)
    arrived.sum().backward()
    assert torch.equal(arrived, sent)
    assert torch.equal(sent.grad, torch.ones_like(sent))
    if num > 1:
        links_are_measured()
    return {family: gradients(family) for family in families}, {}


def other_settings_end_all_ranks():
    """And so do images of other sizes, which could not be exchanged."""
    rank = dist.get_rank()
    with pytest.raises(
        ConfigError, match=r"rank 1: micro_batches must be the same on all ranks, got 2 where rank 0 has"
    ):
        loader_of("internvl", batches_of("internvl", rank), micro_batches=1 + (rank == 1))
    image = items_of("internvl")[0]
    other = image | {"pixel_values": image["pixel_values"].double()}
    for on_rank_1 in ([other], [image, other]):
        with pytest.raises(DataError, match="rank 1: rows of pixel_values must be alike in all samples"):
            next(iter(loader_of("internvl", [on_rank_1 if rank else [image]])))


def steps_that_ranks_run_unlike_end_all():
    """A step that one rank skips, in whole or in part, and a plan that another rank does not hold."""
    rank, rearranged = dist.get_rank(), RearrangedModel(plain_family_model(small_config("internvl")))

    def passes():
        return iter(loader_of("internvl", batches_of("internvl", rank)))

    def refused(on_rank_0, on_rank_1):
        names = f"the {on_rank_0}, micro-batch 0.* on rank 0 and the {on_rank_1}, micro-batch 0.* on rank 1; a"
        return pytest.raises(ConfigError, match=f"all ranks must run the same pass, got {names}")

    drawn = passes()
    if rank == 1:
        next(drawn)
    with refused("forward pass of step 0", "forward pass of step 1"):
        rearranged(next(drawn))
    if rank != 1:
        next(drawn)  # ranks leave together
    drawn = passes()
    loss = rearranged(next(drawn))
    with refused("backward pass of step 0", "forward pass of step 1"):
        loss.backward() if rank != 1 else rearranged(next(drawn))
    if rank != 1:
        next(drawn)
    drawn = next(passes())
    other = replace(drawn, check=replace(drawn.check, digest=drawn.check.digest ^ (rank == 1)))
    with pytest.raises(ConfigError, match="all ranks must plan alike, got another plan of the forward pass of step 0"):
        rearranged(other)


def ranks_of_a_group_share_their_samples(size):
    """And no others; what their losses are divided by is the group's."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([*range(first, first + size)]) for first in range(0, num_ranks, size)]
    group, items = groups[rank // size], items_of("internvl")
    model = plain_family_model(config_of("internvl"))
    plain = deepcopy(model)
    loader = loader_of("internvl", [[items[number] for number in (rank, rank + 4)]], group=group)
    (drawn,) = loader
    assert loader.state_dict()["num_ranks"] == drawn.plan.moves["llm"].num_ranks == size
    with pytest.raises(ConfigError, match=f"group must be that of the loader, of {size} ranks, got one of {num_ranks}"):
        RearrangedModel(model)(drawn)
    loss = RearrangedModel(model, group)(drawn)
    loss.backward()
    of_group = [
        items[number]
        for other in range(size)
        for number in (rank - rank % size + other, rank - rank % size + other + 4)
    ]
    expected = plain_backward(plain, of_group)[0]
    for value in (loss.detach(), model.lm_head.weight.grad):
        dist.all_reduce(value, group=group)
    assert float(loss) / size == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(model.lm_head.weight.grad / size, plain.lm_head.weight.grad, **EXACT)


def ranks_hear_the_lengths_of_all_samples():
    """Also where ranks draw unlike numbers of samples, or none."""
    rank, items = dist.get_rank(), items_of("internvl")
    numbers = [[0], [1, 2, 3, 4, 5] if rank else [6], [], [7, 8, 9]]
    drawn = [*loader_of("internvl", [[items[number] for number in of_step] for of_step in numbers])]
    num_ranks, lengths = dist.get_world_size(), [len(item["input_ids"]) for item in items]
    assert [len(of.plan.moves["llm"]) for of in drawn] == [num_ranks, 1 + 5 * (num_ranks - 1), 0, 3 * num_ranks]
    assert drawn[1].plan.sizes["llm_tokens"].tolist() == [lengths[6], *(lengths[1:6] * (num_ranks - 1))]


class Broken:
    """A source that does not even begin."""

    def __iter__(self):
        raise OSError("no such disk")


def faults_end_all_ranks():
    """What a source, a collator or a family's rule for positions raises on rank 1, and a sample that no rank holds."""
    rank = dist.get_rank()

    def ends(error, message, batches, family="internvl", **options):
        with pytest.raises(error, match=message):
            for _ in loader_of(family, batches, **options):
                pass

    ends(DataError, "^rank 1: no such disk$", Broken() if rank == 1 else batches_of("internvl", rank))
    batches, other_grids = batches_of("internvl", rank), batches_of("qwen3_vl", rank)
    if rank == 1:
        batches[1][0] = None
        other_grids[0][1] = other_grids[0][1] | {"image_grid_thw": 2 * other_grids[0][1]["image_grid_thw"]}
    ends(DataError, "^rank 1: TypeError", batches)
    ends(DataError, "^rank 1: .*image", other_grids, "qwen3_vl")
    costs = Costs(llm=PhaseCosts(limit=20))
    ends(
        InfeasibleError,
        r"^sizes must fit within limits .* of at most 20 \(sample",
        batches_of("internvl", rank),
        costs=costs,
    )


def fails_in_the_middle(where):
    """Rank 1 fails and does not end; nothing but a message can end rank 0, which waits for it."""
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    rank, model = dist.get_rank(), plain_family_model(small_config("internvl"))
    rearranged = RearrangedModel(model)
    if rank == 1:
        threading.Thread(target=threading.Event().wait).start()  # as threads of a real program may
        if where == "forward":
            model.model.get_image_features = fail
        elif "leaves" not in where:
            model.lm_head.weight.register_hook(fail)
    failures.PATIENCE_SECONDS = 0 if where == "leaves before a pass" else failures.PATIENCE_SECONDS
    for drawn in loader_of("internvl", batches_of("internvl", rank)):
        if where == "leaves before a pass" and rank == 1:
            break
        try:
            rearranged(drawn).backward()
        except MemoryError:
            if where == "forward":
                threading.Event().wait()
            if where == "backward":
                raise
        if where == "leaves" and rank == 1:
            break
    threading.Event().wait()


def fail(*_, **__):
    raise MemoryError("no memory")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("where", "cause"),
    [
        ("forward", "rank 1 failed: MemoryError: no memory"),
        pytest.param("backward", "rank 1 failed: MemoryError: no memory", marks=pytest.mark.slow),
        pytest.param("caught", "rank 1 failed: each backward pass must end, got an error", marks=pytest.mark.slow),
        ("leaves", LEFT),
        pytest.param("leaves before a pass", LEFT, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_or_leaves_is_heard_by_the_others_which_end(where, cause):
    heard = re.compile(rf"rank (\d):\n.*omnibal: rank \1 ends, for {cause}", re.DOTALL)
    with pytest.raises(AssertionError, match=heard):
        launch(2, "tests.integrations.test_rearranging:fails_in_the_middle", where, ends=True)


def work(families, hosts):
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    moves_there_and_back()
    the_documented_loop_trains()
    for family in ("qwen2_5_vl", "qwen3_vl"):
        videos_move_beside_images(family)
    frozen_encoder_sends_nothing_back()
    resumes()
    faults_end_all_ranks()
    what_costs_more_than_it_saves_does_not_move()
    links_are_measured()
    other_settings_end_all_ranks()
    steps_that_ranks_run_unlike_end_all()
    ranks_of_a_group_share_their_samples(dist.get_world_size() // 2)
    ranks_hear_the_lengths_of_all_samples()
    return {family: gradients(family) for family in families}, {host: trained(*host) for host in hosts}


@pytest.mark.distributed
def test_gradients_are_those_of_plain_transformers():
    families = ["internvl", "llava", "llava_next", "llava_onevision", "idefics3", "qwen2_5_vl", "qwen3_vl", "mistral3"]
    families.append("qwen2_audio")
    check(families, [("internvl", "zero2"), ("internvl", "zero3"), ("qwen3_vl", "fsdp")])


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_are_those_of_plain_transformers_on_four_processes_and_under_all_hosts():
    hosts = [(family, host) for family in ("internvl", "qwen3_vl") for host in ("ddp", "fsdp")]
    hosts += [(family, f"zero{stage}") for family in ("internvl", "qwen3_vl") for stage in range(4)]
    check([], hosts)
    families = [*FAMILIES, *UNPACKED]
    check(families, [("qwen3_vl", "zero3")], num_ranks=4)


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_exchange_over_nccl():
    """Two ranks, which share a device if there is no other."""
    check(["internvl", "llava_next", "qwen3_vl"], [], function="on_devices", accelerator="cuda")


def check(families, hosts, num_ranks=2, *, function="work", accelerator=RANKS_ON):
    name = f"tests.integrations.test_rearranging:{function}"
    results = launch(num_ranks, name, families, hosts, accelerator=accelerator)
    for family in families:
        items, plain = items_of(family), plain_family_model(config_of(family))
        plain.load_state_dict(results[0][0][family][2])
        drawn = [items[sample] for of_ranks in DRAWN for samples in of_ranks[:num_ranks] for sample in samples]
        loss = collated_backward(plain, drawn, family)
        expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
        tolerance = EXACT if accelerator == "cpu" else ON_DEVICES
        for found_loss, found, _ in (of_families[family] for of_families, _ in results):
            assert float(found_loss) == pytest.approx(float(loss), rel=1e-5), family
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():  # large ones round in all their numbers
                atol = max(tolerance["atol"], 1e-5 * float(gradient.abs().max()))
                torch.testing.assert_close(found[name], gradient, rtol=tolerance["rtol"], atol=atol)
    for family in {family for family, _ in hosts}:
        items, plain = items_of(family), plain_family_model(config_of(family))
        plain.load_state_dict(next(results[0][1][host][1] for host in hosts if host[0] == family))
        optimizer = torch.optim.SGD(plain.parameters(), LEARNING_RATE)
        for of_ranks in DRAWN:
            optimizer.zero_grad()
            plain_backward(plain, [items[sample] for samples in of_ranks for sample in samples])
            optimizer.step()
        expected = dict(plain.named_parameters())
        for host in (host for host in hosts if host[0] == family):
            for _, of_hosts in results:
                assert of_hosts[host][0].keys() == expected.keys()
                for name, weight in expected.items():
                    torch.testing.assert_close(of_hosts[host][0][name], weight.detach(), rtol=1e-4, atol=2e-6)


def test_a_model_that_takes_no_encoded_images_is_refused():
    with pytest.raises(
        ConfigError, match=r"model must take mm_encoder_outputs .* got Linear; describe its encoders by"
    ):
        RearrangedModel(torch.nn.Linear(2, 2))


def test_a_model_whose_images_nobody_knows_is_told_what_they_are():
    model = plain_family_model(config_of("lfm2_vl"))
    needed = "blank must be a small image of pixel_values, spatial_shapes, pixel_attention_mask, as Lfm2VlFor"
    with pytest.raises(ConfigError, match=needed):
        RearrangedModel(model)
    encoder = encoders_of(model, blank=BLANKS["lfm2_vl"])["image"]
    with pytest.raises(
        ConfigError, match=r"images must come as pixel_values, .* as Lfm2VlFor.*, got image_grid_thw too"
    ):
        encoder.encode({"pixel_values": torch.ones(1, 4, 48), "image_grid_thw": torch.ones(1, 3)})


def test_what_travels_is_weighed():
    model = plain_family_model(small_config("internvl"))
    hidden, vision = model.config.text_config.hidden_size, model.config.vision_config
    height, width = vision.image_size
    bytes_of = {
        "unit_bytes": {"vision": 3 * height * width * 4},
        "feature_bytes": {"vision": 2 * hidden * 4},
        "token_bytes": 32,
    }
    assert carried_bytes(model, 1) == bytes_of
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        part.requires_grad_(False)
    assert carried_bytes(model, 1) == bytes_of | {"feature_bytes": {"vision": hidden * 4}}  # no gradient comes back
    deep = plain_family_model(small_config("qwen3_vl"))
    layers = 1 + len(deep.config.vision_config.deepstack_visual_indexes)
    assert layers > 1
    assert carried_bytes(deep, 4)["feature_bytes"]["vision"] == 2 * layers * deep.config.text_config.hidden_size * 4
    for family, windows in (("qwen2_audio", 1), ("qwen2_5_omni_thinker", 30)):  # beside images a unit is a position
        heard, size = plain_family_model(config_of(family)), 4 * 8 * 60
        assert carried_bytes(heard, 1)["unit_bytes"]["sound"] == size / windows
        costs = counted_costs(heard, limits=PackLimits(7, 60, sound_units=9))
        limits = {"sound": 7} if windows == 1 else {"sound": 9, "vision": 7}
        assert {phase: each.limit for phase, each in costs.encoders.items()} == limits
        assert all(each.cost.vision_units > 0 == each.cost.sound_units for each in costs.encoders.values())
    costs = counted_costs(model)
    assert costs.link is None  # nobody counts a processor's seconds
    assert costs.encoders["vision"].cost.vision_units > 0
    assert costs.llm.cost.llm_tokens_squared > 0
    assert costs.llm.cost.fixed == 0


def test_a_rank_goes_on_after_whole_backward_passes_alone():
    weight, check = torch.ones(1, requires_grad=True), Mock(place=(3, 0))
    passes = Passes()
    loss = (2 * weight).sum()
    passes.compare_backward(loss, check)
    loss.backward()
    passes.begin_forward(check)
    assert [call.kwargs["backward"] for call in check.compare.call_args_list] == [True, False]
    interrupted = 2 * weight
    interrupted.register_hook(fail)
    loss = interrupted.sum()
    passes.compare_backward(loss, check)
    with pytest.raises(MemoryError):
        loss.backward()
    assert passes._unfinished is check
