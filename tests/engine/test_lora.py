"""LoRA on the pipeline trains what peft trains on plain transformers, and exports what both can load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from omnibal.cluster import Encoder
from omnibal.config.section import LoraSection
from omnibal.engine.checkpoint import export
from omnibal.errors import ConfigError
from omnibal.vlm import load_model
from omnibal.vlm.tensor import part_of
from tests.engine.adapted import change
from tests.engine.launch import launch
from tests.engine.small import Case
from tests.families.models import small_config
from tests.vlm.families import (
    family_samples,
    plain_backward,
    plain_family_model,
    tied_config,
)
from tests.vlm.lora import adapted_model, named_in, theirs
from tests.vlm.tensor import slices_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.distributed

STEPS, CLIPPING = 3, 0.05
ADAM = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.01, "eps": 1e-3}
SETTINGS = {
    "optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}},
    "gradient_clipping": CLIPPING,
}
PACKS = [[[0, 1], [2, 6], [4], [3, 5]]]  # the third one has no image
# Of each family a configuration, LoRA's settings, what is frozen, where it is cut, and how it runs. The encoder of the
# last one, which sends features to decoder blocks, is on both ranks.
RUNS = {
    "internvl": (
        small_config("internvl"),
        {"rank": 3, "modules_to_save": ["projector", "embed_tokens"]},
        (),
        ("decoder_block", 2),
        ("zero-bubble", ("full", "none", "selective")),
    ),
    "llava_next": (
        tied_config("llava_next"),
        {"rank": 4, "alpha": 3, "targets": ["q_proj", "linear_1", "down_proj"], "modules_to_save": ["final_norm"]},
        (),
        ("vision_block", 2),
        ("1f1b", ("none",)),
    ),
    "internvl on tensor ranks": (
        small_config("internvl"),
        {"rank": 3, "targets": ["language", "vision", "head"], "modules_to_save": ["projector", "embed_tokens"]},
        (),
        None,
        ("zero-bubble", ("full", "none", "selective")),
    ),
    "qwen3_vl": (
        small_config("qwen3_vl"),
        {"rank": 2, "targets": ["language", "vision", "head"]},
        ("*.blocks.0.*",),
        ("decoder_block", 1),
        ("zero-bubble", ("none",)),
    ),
}
SPREAD = {"qwen3_vl": Encoder.on_all(2)}


def case_of(run, folder):
    config, lora, frozen, cut, (schedule, recompute) = RUNS[run]
    plain_family_model(config).save_pretrained(folder)
    kinds = [record.kind for record in load_model(folder).records]
    return Case(
        (0, len(kinds)) if cut is None else (0, kinds.index(cut[0]) + cut[1], len(kinds)),
        PACKS,
        str(folder),
        recompute,
        schedule=schedule,
        zero_stage=1,
        steps=STEPS,
        extra=SETTINGS,
        frozen=frozen,
        lora=lora,
        encoder=SPREAD.get(run),
        num_tensor=2 if cut is None else 1,
    )


def peft_model(case):
    """Peft's model on plain transformers, with our initial adapters; and our model."""
    model = load_model(case.model, LoraSection(**case.lora), case.frozen)
    plain = AutoModelForImageTextToText.from_pretrained(case.model, attn_implementation="sdpa", dtype=torch.float32)
    return adapted_model(plain, model), model


def plain_steps(adapted, model, samples):
    """Losses, norms, gradients of each step and final weights, by the names in peft's file."""
    named = {name: parameter for name, parameter in named_in(adapted).items() if parameter.requires_grad}
    optimizer, losses, norms, gradients = torch.optim.AdamW(named.values(), **ADAM), [], [], []
    for _ in range(STEPS):
        losses.append(plain_backward(adapted, samples)[0])
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), CLIPPING).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, {name: p.detach() for name, p in named.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of each run its case, what the ranks found, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("lora")
    cases = {run: case_of(run, folder / run) for run in RUNS}
    by_rank = launch(2, "tests.engine.adapted:train_and_resume", [*cases.values()], folder)
    return {
        run: (case, [found[number] for found in by_rank], folder / str(number))
        for number, (run, case) in enumerate(cases.items())
    }


@pytest.mark.parametrize("run", RUNS)
def test_training_is_that_of_peft_on_plain_transformers(runs, run):
    case, ranks, _ = runs[run]
    adapted, model = peft_model(case)
    losses, norms, gradients, weights = plain_steps(adapted, model, family_samples(model.config.model_type))
    assert min(norms) > 2 * CLIPPING  # every step is clipped
    base = {model.disk_name(name): weight for name, weight in load_file(f"{case.model}/model.safetensors").items()}
    trained, seen = set(), set()
    for place, rank in enumerate(ranks):
        own = own_part(model, case, place)
        assert rank["losses"] == pytest.approx(losses, rel=1e-4)
        assert rank["norms"] == pytest.approx(norms, rel=1e-3)
        assert rank["resumed_loss"] == rank["losses"][-1] and rank["resumed_alike"]
        names = [name for name, _ in rank["gradients"]]
        for number, (name, gradient) in enumerate(rank["gradients"]):
            expected = own(name, gradients[number // len(set(names))][theirs(model, name)])
            torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=2e-6, msg=name)
        for name, weight in rank["weights"].items():
            seen.add(name)
            if name in names:
                trained.add(theirs(model, name))
                expected = own(name, weights[theirs(model, name)])
                torch.testing.assert_close(weight, expected, rtol=1e-3, atol=2e-5, msg=name)
            else:
                assert torch.equal(weight, own(name, base[name])), name
    assert trained == weights.keys()
    assert seen == {name for index in range(len(model.records)) for name in model.weight_names(index).values()}


def own_part(model, case, rank):
    """From a weight's name on disk and the whole weight to what a rank holds of it."""
    slices = slices_of(model, case.num_tensor, rank)
    return lambda name, whole: part_of(whole, slices[name]) if name in slices else whole


@pytest.mark.parametrize("run", RUNS)
def test_a_checkpoint_is_exported_for_peft_and_merged(runs, run, tmp_path):
    case, ranks, folder = runs[run]
    adapted, model = peft_model(case)
    samples = family_samples(model.config.model_type)
    before = plain_backward(adapted, samples)[1]
    named = named_in(adapted)
    with torch.no_grad():
        for number, rank in enumerate(ranks):
            own = own_part(model, case, number)
            for name in dict(rank["gradients"]):
                own(name, named[theirs(model, name)]).copy_(rank["weights"][name])  # into a view: one range of each
    expected = plain_backward(adapted, samples)[1]
    export(folder / "end", tmp_path / "adapters")
    export(folder / "end", tmp_path / "merged", merged=True)
    assert not [*(tmp_path / "adapters").glob("model*.safetensors")]
    whole = Path(case.model) / "model.safetensors"
    content = whole.read_bytes()
    change(Path(case.model))
    with pytest.raises(ConfigError, match=r"must hold the weights that the adapters of .* were trained beside"):
        export(folder / "end", tmp_path / "other", merged=True)
    whole.write_bytes(content)
    original = AutoModelForImageTextToText.from_pretrained(case.model, attn_implementation="sdpa")
    loaded = peft.PeftModel.from_pretrained(original, tmp_path / "adapters")
    merged, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "merged", attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for ours in (plain_backward(loaded, samples)[1], plain_backward(merged, samples)[1]):
        for logits, without, trained in zip(ours, before, expected, strict=True):
            torch.testing.assert_close(logits, trained, rtol=1e-3, atol=1e-4)
            assert not torch.allclose(trained, without, rtol=1e-2, atol=1e-3)
