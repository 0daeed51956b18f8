"""Whatever layout, settings, family and data meet in a run: it trains what plain transformers trains."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
import torch

from omnibal.vlm.tensor import part_of
from tests.engine.launch import launch
from tests.engine.matrix import ADAM, ALL, DROP_INS, FEW, LAYOUTS, RULES, Cell, drop_in_items, train
from tests.families.models import small_config
from tests.integrations.trainers import LEARNING_RATE
from tests.vlm.families import family_samples, plain_backward, plain_family_model, tied_config
from tests.vlm.lora import named_in, theirs
from tests.vlm.tensor import slices_of

pytestmark = pytest.mark.distributed

COVERING, IMPOSSIBLE = FEW.covering(seed=3)
NUM_RANDOM = 300


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """From a family, and whether its head is tied, to a folder with its weights."""
    base = tmp_path_factory.mktemp("models")

    def saved(family, tied):
        folder = base / f"{family}-{tied}"
        if not folder.exists():
            plain_family_model((tied_config if tied else small_config)(family)).save_pretrained(folder)
        return str(folder)

    return saved


def run(cell, folder_of, tmp_path):
    known = replace(cell, folder=folder_of(cell.family, cell.tied))
    check(known, launch(cell.num_processes, f"{train.__module__}:train", known, str(tmp_path)))


@pytest.mark.cluster(4)
@pytest.mark.parametrize("cell", [Cell(**values, seed=number) for number, values in enumerate(COVERING)])
def test_every_pair_of_settings_trains_as_plain_transformers_does(cell, folder_of, tmp_path):
    run(cell, folder_of, tmp_path)


def test_all_pairs_but_those_that_are_refused_are_covered():
    covered = {part for part in FEW.parts() for values in COVERING if part <= values.items()}
    assert not any(
        all(values[name] in refused for name, refused in rule.items()) for values in COVERING for rule in RULES
    )
    assert {*FEW.parts()} - covered == {*IMPOSSIBLE} == {frozenset({("zero", 0), ("dtype", "bfloat16")})}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_random_settings_train_as_plain_transformers_does(seed, folder_of, tmp_path):
    run(Cell(**ALL.completed({}, Random(seed)), seed=seed), folder_of, tmp_path)


def check(cell, results):
    """Compare what all ranks saw of a cell with plain transformers."""
    losses, gradients, norms, weights, initial, name_of, vlm = trained(cell, results[0])
    is_exact, found = cell.dtype == "float32", {"gradients": {}, "weights": {}}
    for result in results:
        assert result["skipped"] == 0
        assert result["losses"] == pytest.approx(losses, rel=1e-4 if is_exact else 3e-2, abs=1e-5)
        if None not in result["norms"]:
            assert result["norms"] == pytest.approx(norms, rel=1e-3 if is_exact else 0.2, abs=1e-6)
        for kind, of_kind in found.items():
            for name, value in result[kind].items():
                kept = of_kind.setdefault((name, result.get("tensor", 0)), value)
                assert torch.equal(kept, value), f"{kind} of {name} differ between ranks"
    num_tensor = 1 if cell.layout in DROP_INS else LAYOUTS[cell.layout].num_tensor
    slices = [slices_of(vlm, num_tensor, rank) if num_tensor > 1 else {} for rank in range(num_tensor)]

    def own(key, whole):
        (name, rank), value = key, whole[name_of[key[0]]]
        return part_of(value, slices[rank][name]) if name in slices[rank] else value

    assert {name_of[name] for name, _ in found["weights"]} >= gradients.keys()
    if cell.layout not in DROP_INS:
        assert {name_of[name] for name, _ in found["gradients"]} == gradients.keys()
    for key, value in found["weights"].items():
        if name_of[key[0]] not in gradients:
            assert torch.equal(value.float(), own(key, initial)), f"{key} is frozen and changed"
    kept = {key: value for key, value in found["gradients"].items() if name_of[key[0]] in gradients}
    ours = {key: value for key, value in found["weights"].items() if name_of[key[0]] in gradients}
    if is_exact:
        for key, value in kept.items():
            expected = own(key, gradients).view_as(value)
            atol = max(5e-6, 1e-5 * float(expected.abs().max()))
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=atol, msg=tell(f"gradient of {key}"))
        for key, value in ours.items():
            expected = own(key, weights).view_as(value)
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=2e-5, msg=tell(f"weight {key}"))
        return
    for kind, off_most, values, whole, start in (
        ("gradients", 0.3, {} if cell.layout in DROP_INS else kept, gradients, None),
        ("weights", 0.5, ours, weights, initial),
    ):
        if values:
            mine = torch.cat([value.float().flatten() for value in values.values()])
            plain = torch.cat([own(key, whole).flatten() for key in values])
            base = 0 if start is None else torch.cat([own(key, start).flatten() for key in values])
            rounding = 2**-10 * plain.norm() if kind == "weights" else 1e-6  # a weight is rounded to bfloat16
            assert (mine - plain).norm() <= off_most * (plain - base).norm() + rounding, f"{kind} went elsewhere"


def tell(name):
    return lambda said: f"{name}: {said}"


def trained(cell, result):
    """Losses, first gradients, norms and weights of plain transformers on a cell's samples, by names in its model."""
    plain, vlm = cell.plain_model()
    parameters = named_in(plain) if cell.lora else dict(plain.named_parameters())
    trains = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    initial = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    if cell.layout in DROP_INS:
        items = drop_in_items(cell.family, cell.data)
        steps = [[items[sample] for sample in step] for step in result["samples"]]
        optimizer = torch.optim.SGD(trains.values(), lr=LEARNING_RATE)
        name_of = dict(zip(dict(plain.named_parameters()), parameters, strict=True))
    else:
        samples, case = family_samples(cell.family), cell.case()
        steps = [
            [samples[number] for replica in packs for pack in replica for number in pack]
            for packs in (case.packs, *case.later_packs)
        ]
        optimizer = torch.optim.AdamW(trains.values(), **ADAM)
        name_of = names_on_disk(vlm, parameters)
    losses, norms, gradients = [], [], {}
    for samples in steps:
        losses.append(plain_backward(plain, samples)[0])
        for parameter in trains.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        raw = {name: parameter.grad.clone() for name, parameter in trains.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(trains.values(), cell.clipping or inf).item())
        if not gradients:  # a trainer's are those that the first step was made of
            gradients = {n: p.grad.clone() for n, p in trains.items()} if cell.layout in DROP_INS else raw
        optimizer.step()
        optimizer.zero_grad()
    if cell.layout not in DROP_INS:
        gradients = {name: gradient for name, gradient in gradients.items() if name in {*name_of.values()}}
    return losses, gradients, norms, {n: p.detach() for n, p in parameters.items()}, initial, name_of, vlm


def names_on_disk(vlm, parameters):
    """From names on disk to names in plain transformers' model, which peft may have wrapped."""
    paths = {vlm.disk_name(path): path for index in range(len(vlm.records)) for path in vlm.paths(index).values()}
    found = {}
    for name in {name for index in range(len(vlm.records)) for name in vlm.weight_names(index).values()}:
        owner, _, leaf = paths.get(name, name).rpartition(".")
        possible = (
            f"{owner}.{leaf}",
            f"base_model.model.{owner}.{leaf}",
            f"base_model.model.{owner}.base_layer.{leaf}",
        )
        found[name] = next((path for path in possible if path in parameters), None) or theirs(vlm, name)
    return found
