from dataclasses import FrozenInstanceError

import pytest
import torch

from omnibal.profile.records import LEVELS
from omnibal.vlm.measure import LayerRun
from omnibal.vlm.payload import Payload, SentTensors, run_layer
from tests.vlm.models import PIXEL_SHAPE, make_pack, make_sample

PACK = make_pack([make_sample(1, tiles=(1,)), make_sample(2)])
GRID = torch.tensor([[1, 4, 6]])


def rich():
    """With what later families need: two features, and an image grid."""
    payload = Payload.of_pack(PACK | {"image_grid": GRID})
    return payload.replace(features={"deep.0": torch.ones(3, 2), "deep.1": torch.zeros(3, 2)})


def test_the_first_layer_gets_a_packs_pixels_and_integers():
    payload = Payload.of_pack(PACK, torch.bfloat16)
    assert (payload.hidden.dtype, payload.hidden.shape) == (torch.bfloat16, (1, *PIXEL_SHAPE))
    assert list(payload.integers) == ["input_ids", "position_ids", "cu_seq_lens"]
    for name in payload.integers:
        assert getattr(payload, name) is PACK[name]
    assert not payload.features


def test_a_change_leaves_the_rest_and_the_original():
    payload = rich()
    changed = payload.replace(hidden=torch.zeros(1))
    assert changed.hidden.shape == (1,) and payload.hidden.shape == (1, *PIXEL_SHAPE)
    assert changed.integers is payload.integers and changed.features is payload.features
    with pytest.raises(FrozenInstanceError):
        payload.hidden = changed.hidden
    with pytest.raises(TypeError, match="pixels"):
        payload.replace(pixels=changed.hidden)


def test_floats_are_sent_first_and_bounds_last():
    payload = rich()
    layout = SentTensors.of(payload)
    assert layout == SentTensors(("deep.0", "deep.1"), ("input_ids", "position_ids", "image_grid", "cu_seq_lens"))
    tensors = layout.flatten(payload)
    assert [tensor.is_floating_point() for tensor in tensors] == [True] * 3 + [False] * 4
    assert tensors[-1] is payload.cu_seq_lens


def test_built_again_it_is_the_same():
    payload = rich()
    layout = SentTensors.of(payload)
    again = layout.build(layout.flatten(payload))
    assert again.hidden is payload.hidden
    for mine, other in ((again.features, payload.features), (again.integers, payload.integers)):
        assert mine.keys() == other.keys() and all(mine[name] is other[name] for name in other)


def test_what_nobody_reads_is_not_sent():
    layout = SentTensors(features=("deep.1",))
    again = layout.build(layout.flatten(rich()))
    assert list(again.features) == ["deep.1"]
    assert list(again.integers) == ["input_ids", "position_ids", "cu_seq_lens"]


def test_without_what_the_layout_wants_nothing_is_sent():
    with pytest.raises(KeyError, match=r"deep\.2"):
        SentTensors(features=("deep.2",)).flatten(rich())
    with pytest.raises(AssertionError, match="layout"):
        SentTensors().build(SentTensors.of(rich()).flatten(rich()))


class Adds(torch.nn.Module):
    """Reads a feature and puts out another one."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, payload):
        hidden = self.linear(payload.hidden) + payload.features["read"].exp()
        return payload.replace(hidden=hidden, features=payload.features | {"made": hidden.tanh()})


def test_a_layers_costs_contain_its_features():
    """It reads one feature, makes another one, and hands on a third one, which is no work of its own."""
    torch.manual_seed(0)
    layer = Adds()
    given = Payload(
        torch.ones(3, 2), Payload.of_pack(PACK).integers, {"read": torch.ones(3, 2), "handed on": torch.ones(9, 2)}
    )
    run = LayerRun(layer, given, SentTensors(("made", "handed on")), from_pixels=False)
    found = run.measure()
    assert found.sent_bytes == 4 * (3 * 2 + 3 * 2 + 9 * 2)
    assert found.kept_bytes["none"] == 4 * (3 * 2) * 3  # the product's input, what exp and tanh put out
    # Gradients come from both outputs of each of the passes that were timed and measured.
    gradient = layer.linear.weight.grad
    before = gradient.clone()
    torch.autograd.backward(run._outputs("none"), [torch.ones(3, 2)] * 2)
    step = gradient - before
    torch.testing.assert_close(before / step, torch.full((2, 2), round(float(before[0, 0] / step[0, 0])) * 1.0))


def test_features_take_part_in_every_recompute_level():
    torch.manual_seed(0)
    layer, found = Adds(), []
    for level in LEVELS:
        hidden, read = (torch.arange(6.0).view(3, 2).requires_grad_() for _ in range(2))
        after = run_layer(layer, Payload(hidden, Payload.of_pack(PACK).integers, {"read": read}), level)
        (after.hidden.sum() + after.features["made"].sum()).backward()
        found.append((after.hidden, after.features["made"], hidden.grad, read.grad))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
    assert all(gradient.count_nonzero() for gradient in found[0][2:])
