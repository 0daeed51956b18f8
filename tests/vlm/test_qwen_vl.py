"""What is particular to Qwen-VL: places of patches and tokens, windows, deep-stack features, names on disk."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.testing import assert_close

from omnibal.cost import Load
from omnibal.device import DEVICES
from omnibal.engine.transfers import describe, read_description
from omnibal.errors import ConfigError, DataError
from omnibal.formats.collate import GRIDS, VIDEO_GRIDS, MropeRule, mrope_positions
from omnibal.profile.counted import analytic_profile
from omnibal.vlm import Payload, load_model
from omnibal.vlm.payload import PackCounts, note_counts
from omnibal.vlm.weights import save_model
from tests.vlm.families import pack_of
from tests.vlm.models import build_layers, run_layers
from tests.vlm.qwen import CLASSES, IMAGE_TOKEN, VIDEO_TOKEN, make_sample, tiny_qwen

SAMPLES = [
    make_sample(3, answer=5),
    make_sample(2, grids=((2, 2), (10, 14))),
    make_sample(4, question=2, answer=1),
    make_sample(1, grids=((8, 8),)),
    make_sample(7, grids=((2, 12), (6, 2), (4, 4))),
]
TEXTS = [SAMPLES[0], SAMPLES[2]]
SIDES = st.integers(1, 9).map(lambda side: 2 * side)


def shaken_layers(model):
    """With weights that all matter."""
    layers, generator = build_layers(model), torch.Generator().manual_seed(9)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return layers


@given(
    st.lists(st.tuples(SIDES, SIDES), max_size=4),
    st.lists(st.tuples(st.integers(1, 4), SIDES, SIDES), max_size=3),
    st.integers(1, 5),
    st.sampled_from(list(CLASSES)),
)
def test_positions_are_those_of_transformers(grids, videos, question, family):
    sample = make_sample(0, grids=tuple(grids), question=question, videos=tuple(videos), family=family)
    ids = sample["input_ids"]
    found = mrope_positions(ids, sample, MropeRule.of(PLAIN[family].config))
    if not grids and not videos:
        assert found.tolist() == [list(range(len(ids)))] * 3
        return
    types = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    grids, seconds = [sample.get(name) for name in (GRIDS, VIDEO_GRIDS)], sample.get("second_per_grid_ts")
    if seconds is not None:
        seconds = seconds.tolist() if question % 2 else seconds  # as the processor gives them, or a collator
        sample = sample | {"second_per_grid_ts": torch.as_tensor(seconds)}
    options = {} if seconds is None else {"second_per_grid_ts": seconds}
    expected, _ = PLAIN[family].get_rope_index(ids[None], types[None], *grids, **options)
    assert torch.equal(found, expected[:, 0])


with torch.device("meta"):
    PLAIN = {family: CLASSES[family]._from_config(tiny_qwen(family)).model for family in CLASSES}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({GRIDS: torch.tensor([[2, 4, 4]])}, "got one of 2 frames: a video"),
        ({GRIDS: torch.tensor([[1, 4, 6]])}, r"runs of \[6\], one for each grid .* got runs of \[4\]"),
        ({GRIDS: torch.tensor([[1, 4, 4], [1, 2, 2]])}, r"runs of \[4, 1\]"),
        ({"pixel_values": torch.zeros(15, 24)}, "must be the 16 patches of image_grid_thw, got 15"),
    ],
)
def test_images_that_do_not_fit_their_tokens_are_refused(change, message):
    sample = make_sample(0, grids=((4, 4),)) | change
    with pytest.raises(DataError, match=message):
        mrope_positions(sample["input_ids"], sample, MropeRule(IMAGE_TOKEN, 2))


def test_a_deep_feature_goes_as_far_as_the_layer_that_adds_it():
    model = load_model(tiny_qwen("qwen3_vl"))
    names = [record.name for record in model.records]
    features = {names[boundary - 1]: model.sent_tensors(boundary).features for boundary in range(1, len(names) + 1)}
    first, second, third = "deepstack.0", "deepstack.1", "deepstack.2"
    assert {name: found for name, found in features.items() if found} == {
        "vision_block.0": (first,),
        "vision_block.1": (first, second),
        **dict.fromkeys(("vision_block.2", "vision_block.3"), (first, second, third)),
        **dict.fromkeys(("projector", "text_embedding"), (first, second, third)),
        "decoder_block.0": (second, third),
        "decoder_block.1": (third,),
    }
    carried = [record.sizes["carried"] for record in model.records]  # what the planner counts
    assert carried == [len(features[name]) for name in names]


@pytest.mark.parametrize("family", CLASSES)
def test_counted_bytes_of_a_cut_are_those_that_it_sends(family):
    model = load_model(tiny_qwen(family))
    payload = Payload.of_pack(pack_of(model, SAMPLES))
    counted = analytic_profile(model.records, DEVICES["A100-80GB"], dtype="float32").layers
    load = Load(len(payload.hidden), payload.input_ids.shape[1])
    for boundary, layer in enumerate(build_layers(model), start=1):
        payload = layer(payload)
        sent = [*model.sent_tensors(boundary).floats(payload), payload.input_ids, payload.position_ids]
        if boundary < len(counted):  # behind the head no cut can lie
            assert counted[boundary - 1].output_bytes(load) == sum(tensor.nbytes for tensor in sent), boundary


@pytest.mark.parametrize(
    ("indexes", "message"),
    [
        ([1, 1], "must be different ones of the ViT's 4 blocks, got .1, 1."),
        ([4], "must be different ones"),
        ([0, 1, 2, 3], "at most as many as decoder layers, 3, got 4"),
    ],
)
def test_deep_features_that_no_layer_makes_or_reads_are_refused(indexes, message):
    config = tiny_qwen("qwen3_vl", vision={"deepstack_visual_indexes": indexes}, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=message):
        load_model(config)


@pytest.mark.parametrize(("family", "key"), [("qwen2_vl", "hidden_size"), ("qwen3_vl", "out_hidden_size")])
def test_features_of_another_width_than_the_language_model_are_refused(family, key):
    with pytest.raises(ConfigError, match=f"vision_config.{key} must be text_config's hidden_size 32, got 28"):
        load_model(tiny_qwen(family, vision={key: 28}))


def test_counts_of_grids_reach_the_next_stage():
    tensors = [torch.zeros(2), torch.zeros(2, dtype=torch.int32)]
    for integers in ({}, {GRIDS: [[1, 4, 6], [1, 2, 2]]}, {GRIDS: [], "batch_num_images": [2, 1]}):
        note_counts(tensors, PackCounts(7, (4, 5), integers))
        assert read_description(describe(tensors))[1] == PackCounts(7, (4, 5), integers)


@pytest.mark.parametrize("family", CLASSES)
def test_frequencies_stay_float32_in_a_bfloat16_run(family):
    model = load_model(tiny_qwen(family))
    exact, rounded = (build_layers(model, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for one, other in zip(exact, rounded, strict=True):
        for name, buffer in one.named_buffers():
            assert other.get_buffer(name).dtype == torch.float32
            assert torch.equal(other.get_buffer(name), buffer)
    pack = pack_of(model, SAMPLES)
    assert_close(run_layers(rounded, pack).float(), run_layers(exact, pack), rtol=0, atol=0.15)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CLASSES)
def test_names_on_disk_are_those_that_transformers_writes(family, tied, tmp_path):
    CLASSES[family](tiny_qwen(family, tied=tied)).save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    layers = build_layers(model)
    save_model(model, lambda index: layers[index].state_dict(), tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: tensor.shape for n, tensor in theirs.items()}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_configuration_with_the_text_at_its_top_loads(family, tmp_path):
    config = tiny_qwen(family, tied=True)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    text = content.pop("text_config")
    rope = text.pop("rope_parameters")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    path.write_text(json.dumps(text | old | content))
    ours, theirs = load_model(tmp_path), load_model(config)
    assert ours.records == theirs.records
    assert [record.sizes for record in ours.records] == [record.sizes for record in theirs.records]
    pack = pack_of(theirs, SAMPLES)
    assert torch.equal(*(run_layers(build_layers(model), pack) for model in (ours, theirs)))
