"""Frozen modules, kinds of layers and single weights: wherever the cut falls, also around stages that train nothing."""

import pytest
import torch
from safetensors.torch import load_file

from omnibal.engine.module import Attached
from omnibal.vlm.payload import Payload
from tests.engine.cases import changed, settings
from tests.engine.launch import launch
from tests.engine.small import names_of, save_small_model

pytestmark = pytest.mark.distributed

VISION = ("vision",)
LANGUAGE = ("text_embedding", "decoder_block", "final_norm", "head")
PARTS = ("patch_embedding", "vision_tower.*.layer.[01].*", "*.q_proj.weight", "*.bias", "head")
STEPS = 4
# The first cut of each pair leaves both stages a layer to train, the second one does not.
CUTS = {"vision": (VISION, [0, 5, 10], [0, 4, 10]), "language": (LANGUAGE, [0, 4, 10], [0, 5, 10])}
CUTS["parts"] = (PARTS, [0, 5, 10], [0, 3, 10])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_small_model(folder)
    return folder


def test_whatever_a_stage_sends_depends_on_its_placeholders():
    sent = Payload(torch.ones(2, 3), {}, {"trained": torch.ones(4, requires_grad=True), "frozen": torch.ones(5)})
    placeholders = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    attached = sent.with_floats(lambda tensor: Attached.apply(tensor, *placeholders))
    floats = [attached.hidden, *attached.features.values()]
    torch.autograd.backward(floats, [torch.full_like(tensor, 7) for tensor in floats])
    assert [tensor.tolist() for tensor in floats] == [[[1] * 3] * 2, [1] * 4, [1] * 5]
    assert sent.features["trained"].grad.tolist() == [7] * 4
    assert [placeholder.grad.tolist() for placeholder in placeholders] == [[0], [0]]


def test_a_stage_that_trains_nothing_changes_nothing(model):
    configs = {}
    for name, (frozen, *cuts) in CUTS.items():
        for precision, extra in {"float32": {}, "bfloat16": {"bf16": {"enabled": True}}}.items():
            # Clipping would add up the norm's parts in another order.
            config = settings(model, num_stages=2, extra={"gradient_clipping": 0.0} | extra)
            config = changed(config, "model", frozen=frozen)
            configs |= {
                (name, precision, number): changed(config, "pipeline", partition=cut) for number, cut in enumerate(cuts)
            }
    by_rank = launch(2, "tests.engine.cases:train_under", [*configs.values()], STEPS)
    found = dict(zip(configs, zip(*by_rank, strict=True), strict=True))
    for name, precision, _ in configs:
        both, empty = found[name, precision, 0], found[name, precision, 1]
        assert both[0]["losses"][-1] < both[0]["losses"][0]
        assert [stage["losses"] for stage in both] == [stage["losses"] for stage in empty]
        ours, theirs = ({k: v for stage in run for k, v in stage["weights"].items()} for run in (both, empty))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(weight, theirs[key]) for key, weight in ours.items())
        initial = load_file(model / "model.safetensors")
        unchanged = {key for key, weight in ours.items() if torch.equal(weight, initial[key].to(weight.dtype))}
        assert names_of(model, CUTS[name][0]) <= unchanged < ours.keys()
