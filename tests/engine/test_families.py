"""Every family that can be trained: exactness in bfloat16, a frozen ViT on several stages, exports and answers."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from omnibal.demo import write_demo
from omnibal.engine.checkpoint import export
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.vlm import Answerer, load_model
from tests.engine.cases import changed
from tests.engine.launch import launch
from tests.engine.small import Case
from tests.families.models import save_folder, small_config
from tests.families.outside import MODULE, registered
from tests.integrations.items import items_of_kinds
from tests.vlm.families import (
    TRAINED,
    family_samples,
    named_on_disk,
    plain_backward,
    plain_family_model,
    plain_steps,
)

pytestmark = pytest.mark.distributed

STEPS, CLIPPING = 3, 0.05
# Adam divides by the size of a gradient: its usual epsilon would make full steps of a zero that rounding blurs.
ADAM = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.01, "eps": 1e-3}
SETTINGS = {
    "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}},
    "gradient_clipping": CLIPPING,
}
TEXTS = [[[1], [4], [4, 1], []]]
MOST_OFF = 1.5
# Each kind of ViT, of rules for images and of positions once; processes train the others where time allows.
COVERING = ("internvl", "llava_onevision", "qwen2_5_vl", "qwen3_vl")
covering = pytest.mark.parametrize(
    "families",
    [
        pytest.param(COVERING, id="covering"),
        pytest.param([name for name in TRAINED if name not in COVERING], id="others", marks=pytest.mark.slow),
    ],
)
PACKS = [[[0, 1], [2, 6], [4], [3, 5]]]  # the third one has no image


def cases_of(family, folder):
    """A cut in the ViT and one in the language model, under both schedules, with none and some recomputed."""
    kinds = [record.kind for record in load_model(folder).records]
    in_vit, in_llm = (kinds.index(kind) + 2 for kind in ("vision_block", "decoder_block"))
    for cut, schedule, recompute in [
        (in_vit, "1f1b", ("none",)),
        (in_llm, "zero-bubble", ("full", "none", "selective")),
    ]:
        yield Case(
            (0, cut, len(kinds)),
            PACKS,
            str(folder),
            recompute,
            schedule=schedule,
            zero_stage=1,
            steps=STEPS,
            extra=SETTINGS,
        )


KINDS = ("video", "", "image+video", "video+image", "image", "video+video")
VIDEO_PACKS = [[[0, 1], [2, 3], [], [4, 5]]]


def video_cases(family, folder, *, stages):
    """With videos: cuts in the ViT and in the language model, and what plain transformers makes of all samples."""
    plain_family_model(small_config(family)).save_pretrained(folder)
    kinds = [record.kind for record in load_model(folder).records]
    in_vit, in_llm = (kinds.index(kind) + 2 for kind in ("vision_block", "decoder_block"))
    cuts = {1: [()], 2: [(in_vit,), (in_llm,)], 3: [(in_vit, in_llm)]}[stages]
    settings = {"schedule": "1f1b", "zero_stage": 1, "steps": STEPS, "extra": SETTINGS, "kinds": KINDS}
    found = plain_steps(folder, [items_of_kinds(family, KINDS)] * STEPS, clipping=CLIPPING, **ADAM)
    return [(Case((0, *cut, len(kinds)), VIDEO_PACKS, str(folder), **settings), found) for cut in cuts]


def check_steps(cases, expected, ranks):
    for results in launch(ranks, "tests.engine.cases:several_steps", cases):
        for case, result, (losses, norms, weights) in zip(cases, results, expected, strict=True):
            assert result["losses"] == pytest.approx(losses, rel=1e-4), case
            assert result["norms"] == pytest.approx(norms, rel=1e-3), case
            assert result["weights"]
            for name, weight in result["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=f"{name} in {case}")


@pytest.mark.parametrize("stages", [2, *(pytest.param(stages, marks=pytest.mark.slow) for stages in (1, 3))])
def test_videos_train_as_plain_transformers(tmp_path, stages):
    families = ("qwen2_5_vl", "qwen3_vl") if stages == 2 else ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    found = [pair for family in families for pair in video_cases(family, tmp_path / family, stages=stages)]
    check_steps(*map(list, zip(*found, strict=True)), stages)


@covering
def test_gradients_in_bfloat16_are_as_exact_as_those_of_transformers(families, tmp_path):
    """Each module's are off from float32's by at most MOST_OFF times what transformers' own in bfloat16 are."""
    cases, expected = [], []
    for family in families:
        folder, samples = tmp_path / family, family_samples(family)
        plain_family_model(small_config(family)).save_pretrained(folder)
        by_dtype = [plain_gradients(folder, samples, dtype) for dtype in (torch.float32, torch.bfloat16)]
        case = next(cases_of(family, folder))
        cases.append(replace(case, steps=1, recompute=("none", "selective"), extra={"bf16": {"enabled": True}}))
        expected.append(by_dtype)
    by_rank = launch(2, "tests.engine.cases:one_step", cases)
    for case, (exact, theirs), *results in zip(cases, expected, *by_rank, strict=True):
        assert [result["loss"] for result in results] == pytest.approx([exact[0]] * 2, rel=0.02), case
        ours = {name: gradient for result in results for name, gradient in result["gradients"].items()}
        model = load_model(case.model)
        for module in ("vision", "projector", "language"):
            records = [index for index, record in enumerate(model.records) if record.module == module]
            names = {name for index in records for name in model.weight_names(index).values()} & exact[1].keys()
            assert names <= ours.keys()
            off, their_off = (
                sum((found[name] - exact[1][name]).square().sum() for name in names).sqrt()
                for found in (ours, theirs[1])
            )
            assert off <= MOST_OFF * their_off, (case.model, module, float(off / their_off))


def plain_gradients(folder, samples, dtype):
    """Loss and float32 gradients of plain transformers that computes in a dtype."""
    plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
    samples = [
        {name: value.to(dtype) if name == "pixel_values" and value is not None else value for name, value in s.items()}
        for s in samples
    ]
    loss, _ = plain_backward(plain, samples)
    named = named_on_disk(load_model(folder), plain)
    return loss, {name: parameter.grad.float() for name, parameter in named.items() if parameter.grad is not None}


def wide_cases_of(number, family, folder):
    """Over four stages, all trained and with a frozen ViT that lies on two of them; settings take turns."""
    records = load_model(folder).records
    front = [record.module for record in records].index("projector")
    in_llm = [record.kind for record in records].index("decoder_block") + 2
    schedule, other = list(SCHEDULES)[number % 3], list(SCHEDULES)[(number + 1) % 3]
    case = Case(
        (0, 2, front - number % 2, in_llm, len(records)),
        PACKS,
        str(folder),
        ("none", "full", "selective"),
        schedule=schedule,
        zero_stage=1,
        steps=2,
        extra=SETTINGS,
        later_packs=[TEXTS],
    )
    return case, replace(case, schedule=other, frozen=("vision",))


# Features of Qwen3-VL's ViT that decoder blocks read cross borders forward alone; the matrix freezes others, too.
@pytest.mark.parametrize(
    "families",
    [
        pytest.param(["qwen3_vl"], id="qwen3_vl"),
        pytest.param([name for name in TRAINED if name != "qwen3_vl"], id="others", marks=pytest.mark.slow),
    ],
)
def test_a_frozen_vit_on_several_stages_runs_forward_only(families, tmp_path):
    """Over four stages; the second step has no image at all."""
    cases, expected = [], []
    for number, family in enumerate(families):
        folder, samples = tmp_path / family, family_samples(family)
        plain_family_model(small_config(family)).save_pretrained(folder)
        texts = [samples[index] for pack in TEXTS[0] for index in pack]
        for case in wide_cases_of(number, family, folder):
            kinds = {record.kind for record in load_model(folder).records if record.module in case.frozen}
            cases.append(case)
            expected.append(plain_steps(folder, [samples, texts], clipping=CLIPPING, frozen=kinds, **ADAM))
    for stage, results in enumerate(launch(4, "tests.engine.front:watched_steps", cases)):
        for case, result, (losses, norms, weights) in zip(cases, results, expected, strict=True):
            assert result["losses"] == pytest.approx(losses, rel=1e-4), case
            assert result["norms"] == pytest.approx(norms, rel=1e-3), case
            for name, weight in result["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5, msg=f"{name} in {case}")
            runs = not case.frozen or stage >= 2
            assert result["backward"] == (8 if runs else 0), case
            assert (result["kept"] > 0) == runs, case
            assert (result["sent up"] > 0) == (stage > (2 if case.frozen else 0)), case


@pytest.fixture
def from_outside():
    """The families of the ds_configs that name the module of the one that is registered from outside."""
    with registered():
        yield {"deepseek_vl": {"family": MODULE}}


@covering
def test_a_folder_is_trained_exported_and_asked(families, tmp_path, from_outside):
    """Families (InternVL is the quickstart's) and one from outside, from pictures to what transformers loads."""
    demo = write_demo(tmp_path / "demo", samples=60, held_out=20)
    folders = {family: tmp_path / family for family in (*families, *from_outside) if family != "internvl"}
    for family, folder in folders.items():
        save_folder(family, folder, demo.model, weights=True)
    configs = [
        {
            "gradient_accumulation_steps": 2,
            "optimizer": SETTINGS["optimizer"],
            "zero_optimization": {"stage": 1},
            "omnibal": {
                "model": {"path": str(folder)} | from_outside.get(family, {}),
                "data": {"train": str(demo.meta), "workers": 0},
                "packing": {"vision_units": 2000, "llm_tokens": 1500},
                "pipeline": {"num_stages": 2, "partition": [0, 3, len(load_model(folder).records)]},
                "run": {"output": str(tmp_path / "runs" / family), "epochs": 9},
            },
        }
        for family, folder in folders.items()
    ]
    configs.append(changed(configs[1], "model", lora={}))
    by_rank = launch(2, "tests.engine.cases:train_and_save", configs, 3, tmp_path / "checkpoints")
    whole = [found[: len(folders)] for found in by_rank]
    for number, (folder, *trained) in enumerate(zip(folders.values(), *whole, strict=True)):
        exported = tmp_path / f"exported{number}"
        export(tmp_path / "checkpoints" / str(number) / "end", exported)
        assert trained[0]["losses"] == trained[1]["losses"]
        theirs, report = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        before = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        model = load_model(folder)
        weights = trained[0]["weights"] | trained[1]["weights"]
        for name, value in theirs.state_dict().items():
            on_disk = model.disk_name(name)
            assert value.equal(before[name] if on_disk in model.spare_names else weights[on_disk]), name
            assert value.equal(before[name]) == (on_disk in model.spare_names), name
        assert names_in(exported) == names_in(folder)
        assert not [*exported.glob("spare*")]
        image = next((demo.meta.parent / "images").rglob("*.png"))
        assert Answerer(exported).answer("What is this?", [image], max_new_tokens=3) is not None
    checkpoint, answers = tmp_path / "checkpoints" / str(len(folders)) / "end", []
    for merged in (False, True):
        exported = tmp_path / f"adapters{merged}"
        export(checkpoint, exported, merged=merged)
        answers.append(Answerer(exported).answer("What is this?", [image], max_new_tokens=8))
    assert answers[0] == answers[1]
    assert sum(path.stat().st_size for path in checkpoint.glob("layer_*")) < 2e5  # without the model's own weights


def names_in(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())
