import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from omnibal import passes as measure
from omnibal.cost import CostModel, Load
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES
from omnibal.errors import ConfigError
from omnibal.loss import targets_of
from omnibal.passes import MeasurementWarning, Timing, device_name, kept_bytes
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LEVELS, ModelProfile
from omnibal.vlm import load_model
from omnibal.vlm.measure import LayerRun, MadePack, _FirstRank, made_packs, measure_profile, measured_versions
from omnibal.vlm.payload import SentTensors, WeightGradients, defer_linears, run_layer
from omnibal.vlm.qwen_vl import patch_places
from omnibal.vlm.tensor import share_layer
from tests.families.models import small_config
from tests.vlm.families import TRAINED
from tests.vlm.models import IMAGE_TOKEN, PIXEL_SHAPE, TOKENS_PER_TILE, build_layers, tiny_config

MODEL = load_model(tiny_config())
LIMITS = PackLimits(4, 60)
FROZEN = ("patch_embedding", "vision_block")


def quick_profile(model=MODEL, limits=LIMITS, **options):
    """One pass of each kind: enough for everything but the times themselves."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(measure, "WARM_UP", 0)
        patch.setattr(measure, "STEPS", 1)
        warnings.simplefilter("ignore", MeasurementWarning)
        return measure_profile(model, limits, **options)


@pytest.fixture(scope="module")
def reported():
    return []


@pytest.fixture(scope="module")
def profile(reported):
    return quick_profile(report=reported.append)


@pytest.fixture(scope="module")
def frozen_profile():
    return quick_profile(frozen=FROZEN, dtype=torch.bfloat16)


def test_a_profile_fits_its_model_machine_and_software(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    loaded = ModelProfile.load(tmp_path / "profile.json")
    loaded.check_matches(
        records=MODEL.records,
        device=device_name(torch.device("cpu")),
        dtype="float32",
        versions=measured_versions(),
    )
    assert loaded == profile


def test_layers_of_one_kind_are_measured_once(profile, reported):
    assert reported == [
        "patch_embedding", "vision_block.0", "projector", "text_embedding", "decoder_block.0", "final_norm", "head",
    ]  # fmt: skip
    assert profile.layers[1].forward_seconds == profile.layers[2].forward_seconds


def test_every_pass_takes_time_and_depends_on_what_the_layer_sees(profile):
    load = MadePack(3, (40,)).load
    merge = next(i for i, layer in enumerate(profile.layers) if layer.kind == "text_embedding")
    for index, layer in enumerate(profile.layers):
        for cost in (layer.forward_seconds, layer.backward_seconds, layer.weight_seconds):
            assert cost.llm_tokens == cost.llm_tokens_squared == 0 or index >= merge
            assert cost.vision_units == 0 or index <= merge
            assert cost.llm_tokens_squared == 0 or layer.kind == "decoder_block"
        assert layer.forward_seconds(load) > 0
        assert layer.backward_seconds(load) + layer.weight_seconds(load) > 0
        assert layer.optimizer_seconds > 0


def test_whole_backward_passes_cost_what_they_took_and_split_ones_what_they_took_apart(monkeypatch):
    def slower(trial, of=LayerRun.measure):
        took = {"forward": 1.0, "backward": 10.0, "backward_split": 7.0, "weights": 5.0}
        return replace(of(trial), **{name: Timing(seconds, 0.0) for name, seconds in took.items()})

    monkeypatch.setattr(LayerRun, "measure", slower)
    for layer in quick_profile().layers:
        parts = layer.backward_seconds, layer.weight_seconds, layer.split_seconds
        load = MadePack(LIMITS.vision_units, (LIMITS.llm_tokens,)).load
        assert [part(load) for part in parts] == pytest.approx([5, 5, 2])


def test_the_gradient_of_a_convolution_does_not_wait(profile):
    assert profile.layers[0].weight_seconds == profile.layers[0].pending_bytes == CostModel()


@pytest.mark.parametrize("pack", [MadePack(3, (20, 17)), MadePack(0, (9, 9, 9, 9)), MadePack(7, (100,))])
def test_bytes_are_predicted_for_packs_that_were_not_measured(profile, pack):
    payload = with_targets(pack.payload(MODEL, dtype=torch.float32))
    for index, (layer, cost) in enumerate(zip(build_layers(MODEL), profile.layers, strict=True)):
        payload = payload.replace(hidden=payload.hidden.detach().requires_grad_(index > 0))
        run = partial(run_layer, layer, payload)
        free = [*layer.parameters(), *layer.buffers(), *payload.integers.values()]
        for level in LEVELS:
            kept = kept_bytes(lambda run=run, level=level: run(level).hidden, free=free)
            assert cost.saved_bytes[level](pack.load) == pytest.approx(kept, rel=0.01, abs=4), (cost.name, level)
        queue = WeightGradients()
        defer_linears(layer, queue)
        output = run("none").hidden
        output.backward(torch.ones_like(output))
        assert cost.pending_bytes(pack.load) == pytest.approx(queue.peak_bytes, rel=0.01, abs=4), cost.name
        payload = run("none")
        sent = sum(tensor.nbytes for tensor in (payload.hidden, payload.input_ids, payload.position_ids))
        assert cost.output_bytes(pack.load) == pytest.approx(sent, rel=1e-6)


def with_targets(payload):
    """Every token but the first is one, as a pack's load has it where it does not say otherwise."""
    return payload.with_integers(targets_of(payload.input_ids))


def test_what_waits_is_what_counting_says(profile):
    counted = analytic_profile(MODEL.records, DEVICES["A100-80GB"], dtype="float32")
    load = MadePack(3, (40,)).load
    for measured, analytic in zip(profile.layers, counted.layers, strict=True):
        assert measured.pending_bytes(load) == pytest.approx(analytic.pending_bytes(load), rel=0.01), measured.name
        assert (measured.weight_seconds(load) > 0) == (measured.pending_bytes(load) > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "vision", [{}, {"norm_type": "rms_norm"}, {"use_qk_norm": True}, {"norm_type": "rms_norm", "use_qk_norm": True}]
)
def test_what_blocks_keep_is_what_counting_says(vision, text, dtype):
    wide = {"hidden_size": 256, "intermediate_size": 512}
    model = load_model(tiny_config(text=text, vision_options=vision | wide, text_options=wide | {"head_dim": 64}))
    pack = MadePack(2, (30,))
    payload = pack.payload(model, dtype=dtype)
    counted = analytic_profile(model.records, DEVICES["A100-80GB"], dtype=str(dtype).removeprefix("torch."))
    # On a CPU attention's output is copied, and each block keeps its own rotary tables: cosines and sines.
    heads, head_dim = 4, 64
    beyond = {"vision_block": 0, "decoder_block": pack.tokens * (heads + 2) * head_dim * dtype.itemsize}
    for layer, cost in zip(build_layers(model, dtype=dtype), counted.layers, strict=True):
        if cost.kind in beyond:
            hidden = payload.hidden.detach().requires_grad_()
            run = partial(run_layer, layer, payload.replace(hidden=hidden), "none")
            free = [*layer.parameters(), *layer.buffers(), *payload.integers.values()]
            kept = kept_bytes(lambda run=run: run().hidden, free=free)
            assert kept == pytest.approx(cost.saved_bytes["none"](pack.load) + beyond[cost.kind], rel=0.01), cost.name
        with torch.no_grad():
            payload = layer(payload)


WIDE = {"hidden_size": 256, "intermediate_size": 512}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}}
SHARED = {
    "internvl": (
        tiny_config(text="qwen3", vision_options=WIDE, text_options=WIDE | {"head_dim": 64}),
        MadePack(2, (30,)),
    ),
    "qwen2_5_vl": (
        small_config(
            "qwen2_5_vl", vision=WIDE | {"out_hidden_size": 256, "num_heads": 4}, text=WIDE | MROPE | {"head_dim": 64}
        ),
        MadePack(64, (30,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_what_blocks_of_tensor_ranks_keep_is_what_counting_says(name, monkeypatch):
    monkeypatch.setattr(measure, "WARM_UP", 0)
    monkeypatch.setattr(measure, "STEPS", 1)
    config, pack = SHARED[name]
    model, beyond = load_model(config), {}
    for size in (1, 2):
        profile = analytic_profile(model.records, DEVICES["A100-80GB"], dtype="float32", tensor_parallel=size)
        payload = with_targets(pack.payload(model, dtype=torch.float32))
        for index, cost in enumerate(profile.layers[:-2]):
            layer = model.build_layer(index, seed=0)
            share_layer(model, index, layer, _FirstRank(0, size))
            if cost.kind.endswith("_block"):
                found = LayerRun(layer, payload, model.sent_tensors(index + 1), from_pixels=False).measure()
                assert found.kept_bytes["full"] == cost.saved_bytes["full"](pack.load)
                assert found.pending_bytes == cost.pending_bytes(pack.load)
                # On a CPU attention's output is copied, and tables of places are a block's own.
                more = found.kept_bytes["none"] - cost.saved_bytes["none"](pack.load)
                assert 0 <= more <= beyond.setdefault(cost.name, more)
            with torch.no_grad():
                payload = layer(payload)
    assert len(beyond) == sum(record.kind.endswith("_block") for record in model.records)


def test_parameters_in_bytes(profile, frozen_profile):
    layers = build_layers(MODEL)
    for layer, single, half in zip(layers, profile.layers, frozen_profile.layers, strict=True):
        number = sum(parameter.numel() for parameter in layer.parameters())
        trained = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
        assert (single.parameter_bytes, half.parameter_bytes) == (4 * number, 2 * number)
        assert (single.gradient_bytes, single.optimizer_bytes) == (4 * trained, 8 * trained)
        if half.trainable:
            assert (half.gradient_bytes, half.optimizer_bytes) == (2 * trained, 12 * trained)


def test_the_first_of_two_tensor_ranks_has_its_part_of_each_layer(profile):
    shared = quick_profile(num_tensor=2)
    assert shared.num_tensor == 2
    for index, (part, whole) in enumerate(zip(shared.layers, profile.layers, strict=True)):
        slices, state = MODEL.slices(index, 2, 0), build_layers(MODEL)[index].state_dict()
        spared = sum(state[name].numel() * (1 - own.width / state[name].shape[own.dim]) for name, own in slices.items())
        assert whole.parameter_bytes - part.parameter_bytes == 4 * round(spared)
        assert part.output_bytes == whole.output_bytes
        assert (part.gradient_bytes < whole.gradient_bytes) == bool(slices)


def test_frozen_layers_run_backward_to_their_inputs_only(profile, frozen_profile):
    load = MadePack(3, (40,)).load
    for layer, trained in zip(frozen_profile.layers, profile.layers, strict=True):
        assert layer.trainable == (layer.kind not in FROZEN)
        if not layer.trainable:
            assert layer.weight_seconds == CostModel()
            assert layer.gradient_bytes == layer.optimizer_bytes == layer.optimizer_seconds == 0
            assert (layer.backward_seconds(load) > 0) == (layer.kind == "vision_block")
            assert layer.saved_bytes["none"](load) <= trained.saved_bytes["none"](load)
    assert frozen_profile.dtype == "bfloat16"


def test_doubtful_measurements_come_with_a_warning(monkeypatch):
    monkeypatch.setattr(measure, "STEPS", 2)
    monkeypatch.setattr("omnibal.vlm.measure.MAX_SPREAD", -9.0)
    with pytest.warns(MeasurementWarning) as warned:
        measure_profile(MODEL, PackLimits(1, 20))
    (message,) = [str(warning.message) for warning in warned if warning.category is MeasurementWarning]
    assert "repeated passes should differ by at most -900%, got" in message


def test_frozen_kinds_must_occur():
    with pytest.raises(ConfigError, match=r"frozen must hold kinds of the model's layers.*got 'visoin'"):
        measure_profile(MODEL, LIMITS, frozen=["visoin"])


# What the costs of each family must be told from: units and tokens that no measured pack has.
UNSEEN = [
    MadePack(0, (9, 9, 9, 9)),
    MadePack(4 * 16, (60, 40), 1),
    MadePack(2 * 36, (90, 70), 2),
    MadePack(144, (150,)),
]


@pytest.mark.parametrize("family", [family for family in TRAINED if family != "internvl"])
def test_families_whose_images_are_cut_otherwise_are_measured(family):
    """What they keep and send is predicted for other packs; of canvases, whose rows end, about."""
    model = load_model(small_config(family))
    has_patches = "qwen" in family
    profile = quick_profile(model=model, limits=PackLimits(400, 200) if has_patches else PackLimits(10, 400))
    assert [layer.name for layer in profile.layers] == [record.name for record in model.records]
    packs = UNSEEN if has_patches else [MadePack(0, (9, 9)), *made_packs(model, PackLimits(8, 300))]
    for pack in packs:
        payload = with_targets(pack.payload(model, dtype=torch.float32))
        if has_patches:  # tables of places are made once for a pack, and kept with it
            patch_places(payload, model.config.vision_config)
        for index, cost in enumerate(profile.layers):
            layer = model.build_layer(index, seed=0)
            payload = payload.with_floats(lambda tensor, index=index: tensor.detach().requires_grad_(index > 0))
            run = partial(run_layer, layer, payload)
            kept = kept_bytes(lambda run=run: _made(run("none")), free=_free(layer, payload))
            near = partial(pytest.approx, **({"rel": 0.02, "abs": 200} if has_patches else {"rel": 0.15, "abs": 900}))
            assert cost.saved_bytes["none"](pack.load) == near(kept), (cost.name, pack)
            payload = run("none")
            layout = model.sent_tensors(index + 1)
            sent = sum(tensor.nbytes for tensor in (*layout.floats(payload), payload.input_ids, payload.position_ids))
            assert cost.output_bytes(pack.load) == near(sent), (cost.name, pack)


def _made(payload):
    return [payload.hidden, *(feature for feature in payload.features.values() if not feature.is_leaf)]


def _free(layer, payload):
    return [*layer.parameters(), *layer.buffers(), *payload.integers.values()]


TINY = load_model(tiny_config())


def test_packs_are_shares_of_the_limits_with_and_without_images():
    packs = made_packs(TINY, PackLimits(8, 120))
    assert packs == [
        MadePack(0, (8, 8, 7, 7)),
        MadePack(2, (30,)),
        MadePack(0, (15,) * 4),
        MadePack(4, (60,)),
        MadePack(0, (30,) * 4),
        MadePack(8, (120,)),
    ]


def test_no_sample_is_longer_than_the_models_positions():
    # max_position_embeddings is 128
    assert made_packs(TINY, PackLimits(0, 1000))[-1] == MadePack(0, (125,) * 8)


def test_images_fit_into_the_tokens():
    packs = made_packs(TINY, PackLimits(50, 10))
    assert max(pack.units for pack in packs) == 10 // TOKENS_PER_TILE
    assert made_packs(TINY, PackLimits(0, 1))[0] == MadePack(0, (1,))


def test_the_load_of_a_pack():
    assert MadePack(3, (4, 2)).load == Load(3, 6, 20, 9, 5)
    assert MadePack(8, (4, 2), 2).load == Load(8, 6, 20, 32, 5)


def test_images_of_any_size_are_one_and_four_to_a_pack():
    """As many patches as square images can have; no more tokens than a sample."""
    packs = made_packs(load_model(small_config("qwen2_vl")), PackLimits(420, 90))[-3:]
    assert packs == [MadePack(0, (23, 23, 22, 22)), MadePack(4 * 64, (23, 23, 22, 22), 4), MadePack(18 * 18, (90,))]


def test_canvases_are_as_large_as_the_units_allow():
    model = load_model(small_config("llava_next"))  # canvases of up to 36 tiles, and the whole image once more
    assert [pack.units for pack in made_packs(model, PackLimits(80, 4000))[1::2]] == [19, 37, 74]
    assert [pack.units for pack in made_packs(model, PackLimits(2, 4000))[1::2]] == [0, 0, 2]


@pytest.mark.parametrize("pack", made_packs(TINY, PackLimits(8, 120)))
def test_a_payload_runs_through_the_model(pack):
    payload = pack.payload(TINY, dtype=torch.bfloat16)
    pixels, ids, positions, bounds = SentTensors().flatten(payload)
    assert pixels.shape == (pack.units, *PIXEL_SHAPE)
    assert pixels.dtype == torch.bfloat16
    assert (ids == IMAGE_TOKEN).sum() == pack.units * TOKENS_PER_TILE
    assert bounds.tolist() == [sum(pack.lengths[:i]) for i in range(len(pack.lengths) + 1)]
    assert positions[0, bounds[:-1].long()].tolist() == [0] * len(pack.lengths)
    assert [tensor.dtype for tensor in (ids, positions, bounds)] == [torch.int64, torch.int64, torch.int32]
    for index in range(len(TINY.records)):
        payload = TINY.build_layer(index, seed=0, dtype=torch.bfloat16)(payload)
    assert payload.hidden.shape[1] == pack.tokens
