"""Whatever the model, the cut, the packs and the settings: training is what plain transformers makes of it."""

from functools import cache, partial
from math import inf

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.launch import launch
from tests.engine.random_runs import ADAM, STEPS, cases_of, train_all
from tests.engine.small import names_of, plain_training, save_small_model, small_samples

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("seed", "count", "num_processes"),
    [
        (1, 6, 4),
        *(
            pytest.param(seed, 25, num_processes, marks=pytest.mark.slow)
            for seed, num_processes in ((2, 2), (3, 3), (4, 4), (5, 4), (6, 6))
        ),
    ],
)
def test_random_runs_train_as_plain_transformers_does(seed, count, num_processes, tmp_path):
    def folder_of(options):
        folder = tmp_path / "-".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
        if not folder.exists():
            save_small_model(folder, **options)
        return str(folder)

    cases = cases_of(seed, count, num_processes, folder_of)
    by_rank = launch(num_processes, f"{train_all.__module__}:train_all", cases)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        try:
            check(case, results)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def check(case, results):
    """Compare what all ranks saw of a case with plain transformers."""
    dtype = torch.bfloat16 if "bf16" in case.extra else torch.float32
    clipping = case.extra["gradient_clipping"] or inf
    losses, norms, expected = trained(case.model, case.frozen, dtype, clipping)
    initial = {name: tensor.to(dtype) for name, tensor in load_file(f"{case.model}/model.safetensors").items()}
    found = {}
    for result in results:
        assert result["skipped"] == 0
        assert result["losses"] == pytest.approx(losses, rel=1e-4 if dtype == torch.float32 else 3e-2)
        if None not in result["norms"]:
            assert result["norms"] == pytest.approx(norms, rel=1e-3 if dtype == torch.float32 else 0.2)
        for name, weight in result["weights"].items():
            assert torch.equal(found.setdefault(name, weight), weight), f"{name} differs between ranks"
    assert found.keys() == expected.keys()
    frozen = names_of(case.model, case.frozen)
    assert all(torch.equal(found[name], initial[name]) for name in frozen)
    if dtype == torch.float32:
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=5e-6, msg=name)
    else:
        start, ours, plain = (together(weights, found.keys() - frozen) for weights in (initial, found, expected))
        assert (ours - plain).norm() < 0.5 * (plain - start).norm(), "weights went elsewhere"


def together(weights, names):
    """Weights as one vector."""
    return torch.cat([weights[name].float().flatten() for name in sorted(names)])


@cache
def trained(folder, frozen, dtype, clipping):
    """Losses, norms and weights of plain transformers."""
    return plain_training(
        folder,
        small_samples(),
        make_optimizer=partial(torch.optim.AdamW, **ADAM),
        make_scheduler=partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0),
        clipping=clipping,
        steps=STEPS,
        frozen=frozen,
        dtype=dtype,
    )
