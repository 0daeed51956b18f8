"""The examples of launch/examples train what plain transformers would, and go on where they were stopped."""

import importlib
import json
import os
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from deepspeed.comm import init_distributed
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.demo import write_demo
from omnibal.errors import ConfigError, DataError
from omnibal.formats.conversations import open_dataset
from omnibal.integrations.lengths import samples_to_check
from omnibal.integrations.loops import balanced_loader, item_loads
from omnibal.packs.loading import PackSampler
from omnibal.vlm.attention import packed_attention
from tests.engine.launch import launch
from tests.families.models import save_folder
from tests.integrations.items import Collate, config_of, items_of
from tests.integrations.trainers import accelerate_afresh
from tests.vlm.families import plain_backward, plain_family_model

EXAMPLES = Path(__file__).parents[2] / "launch" / "examples"
RANKS, MICRO_BATCHES, FAMILY, LIMITS = 2, 2, "internvl", PackLimits(4, 40)
ADAM = {"lr": 0.01, "eps": 0.1, "weight_decay": 0.0}
"""With so large an epsilon the first steps follow the size of gradients, and not only their signs."""
STOPPED = 3
"""Steps of a run that is stopped; the second epoch begins within them."""


class Items(list):
    """A dataset that notes what is read."""

    def __init__(self):
        super().__init__(items_of(FAMILY))
        self.read = []

    def __getitem__(self, sample):
        self.read.append(sample)
        return super().__getitem__(sample)


def model_of(change=0.0):
    """The same model each time, or one whose weights a checkpoint must replace."""
    model = plain_family_model(config_of(FAMILY))
    for parameter in model.parameters():
        parameter.data.add_(change)
    return model


def plan(rank):
    """Packs of all ranks of each step of two epochs, and what a rank reads for them."""
    vision_units, llm_tokens, target_tokens = zip(*map(item_loads, items_of(FAMILY)), strict=True)
    lengths = SampleLengths(vision_units, llm_tokens, target_tokens=target_tokens)
    options = {"num_replicas": RANKS, "rank": rank, "micro_batches": MICRO_BATCHES, "image_in_every_pack": True}
    sampler = PackSampler(lengths, LIMITS, **options)
    steps, own = [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        steps += [sampler.packs_of_all_ranks(step) for step in range(sampler.num_steps)]
        own += [[*pack, *pack.fillers] for pack in sampler]
    before = [*range(rank, len(lengths), RANKS), *range(len(lengths)), *samples_to_check(lengths, is_known=True)]
    return steps, own, before


def plain_weights(steps):
    """Weights after each step of a plain loop over the same samples, one by one."""
    model, items = model_of(), items_of(FAMILY)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    after = []
    for packs in steps:
        plain_backward(model, [items[sample] for pack in packs for sample in pack])
        optimizer.step()
        optimizer.zero_grad()
        after.append(weights_of(model))
    return after


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def weights_of_fsdp(model):
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def weights_of_zero(model):
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return weights_of(model)


def run_generator(example, steps, *arguments):
    for _ in islice(example.train(*arguments, micro_batches=MICRO_BATCHES), steps):
        pass


def run_lightning(example, steps, *arguments):
    options = {"accelerator": "cpu", "devices": RANKS, "strategy": "ddp", "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    steps = -1 if steps is None else steps
    example.train(*arguments, micro_batches=MICRO_BATCHES, max_steps=steps, **options, **quiet)


def run_trl(example, steps, model, dataset, collate, limits, folder):
    words = Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="a")
    example.train(
        *(model, dataset, collate, limits, folder),
        tokenizer=tokenizer,
        micro_batches=MICRO_BATCHES,
        samples_per_step=6,  # two packs of each rank, as in the plan
        max_steps=-1 if steps is None else steps,
        ddp_find_unused_parameters=False,  # so every pack has an image, as in the plan
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 0, "disable_tqdm": True},
        **{"adam_epsilon": ADAM["eps"], "max_grad_norm": 0, "lr_scheduler_type": "constant", "logging_strategy": "no"},
    )


HOSTS = {
    "ddp": (run_generator, weights_of),
    "fsdp2": (run_generator, weights_of_fsdp),
    "zero3": (run_generator, weights_of_zero),
    "accelerate_loop": (run_generator, weights_of),
    "lightning_module": (run_lightning, weights_of),
    "trl_sft": (run_trl, weights_of),
}

KEEPS_LENGTHS = ("trl_sft",)
"""For the next start, in the folder that it writes to."""


def check_host(name, folder, rank):
    """Weights of plain transformers after three steps; stopped there and resumed within epoch 1, also at the end."""
    run, weights = HOSTS[name]
    example = importlib.import_module(name)
    example.ADAM = ADAM
    steps, own, before = plan(rank)
    assert sorted(s for packs in steps[: len(steps) // 2] for pack in packs for s in pack) == list(range(11))
    assert len(steps) // 2 < STOPPED < len(steps)
    expected = plain_weights(steps)
    for change, stop, drawn in ((0.0, STOPPED, own[: STOPPED * 2]), (0.5, None, own[STOPPED * 2 :])):
        model, dataset = model_of(change), Items()
        run(example, stop, model, dataset, Collate(FAMILY), LIMITS, folder)
        if name in KEEPS_LENGTHS and stop is None:  # compared in place of counted
            before = before[-13:]
        assert dataset.read == before + [sample for pack in drawn for sample in pack], name
        after, found = expected[-1 if stop is None else stop - 1], weights(model)
        assert found.keys() == after.keys()
        for parameter, value in found.items():
            message = partial("{}, {}: {}".format, name, parameter)
            torch.testing.assert_close(value, after[parameter], rtol=1e-4, atol=2e-5, msg=message)


def check_unlike_data(rank):
    """What differs between ranks ends all of them, none waits."""
    items = items_of(FAMILY)
    loader = partial(balanced_loader, items, Collate(FAMILY), LIMITS, model=model_of())
    with pytest.raises(ConfigError, match=r"rank 1: .* must be the same on all ranks"):
        lengths = SampleLengths([1] * 11, [20 + rank] * 11, target_tokens=[1] * 11)
        loader(lengths=lengths, absorb_other_lengths=True)
    with pytest.raises(DataError, match=r"rank 0: sample 0 must have the planned .*, \(1, 9, 4\), got \(7, 36, 3\)"):
        loader(lengths=SampleLengths([1] * 11, [9] * 11, target_tokens=[4] * 11))
    if rank:
        items[2] = items[3]
    with pytest.raises(DataError, match=r"rank 1: sample 2 must have .* ranks hold different data"):
        loader()
    if rank:
        items.pop()
    with pytest.raises(DataError, match="the dataset must have as many samples on all ranks"):
        loader()


def check_mesh(rank):
    """Ranks of a group get the same packs, of which each runs a part of the sequence by DeepSpeed's Ulysses."""
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicas", "shares"))
    for name, place in (("replicas", (0, 1)), ("shares", (rank, RANKS))):
        sampler = balanced_loader(items_of(FAMILY), list, LIMITS, weigh_tokens=False, mesh=mesh[name]).pack_sampler
        assert (sampler.rank, sampler.num_replicas) == place
    items, model, plain = items_of(FAMILY), model_of(), model_of()
    loader = balanced_loader(items, Collate(FAMILY), PackLimits(16, 100), model=model, mesh=mesh["replicas"])
    batch, pack = next(iter(loader)), loader.pack_sampler.packs_of_all_ranks(0)[0]
    assert len(pack) > 2
    split_sequence(model, batch, mesh["shares"])
    plain_backward(plain, [items[sample] for sample in pack])
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.distributed.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


def split_sequence(model, batch, mesh):
    """Each rank's share of a pack's gradients: the ViT's and embeddings' of its tokens, and of its rows of the head."""
    init_distributed("gloo", verbose=False)
    config, part = model.config.text_config, mesh.get_local_rank()
    attention = UlyssesSPAttentionHF(
        packed_attention, 1, config.num_attention_heads, config.hidden_size // config.num_attention_heads,
        config.num_key_value_heads, config.num_hidden_layers, mesh.get_group(), seq_length_is_variable=True,
    )  # fmt: skip
    AttentionInterface.register("ulysses_packed", attention)
    model.set_attn_implementation({"text_config": "ulysses_packed", "vision_config": "sdpa"})
    even = -batch["labels"].shape[1] % mesh.size()  # a sample of its own without targets
    ids, labels, positions = (
        functional.pad(batch[name], (0, even), value=value)
        for name, value in (("input_ids", 0), ("labels", -100), ("position_ids", 0))
    )
    images = torch.cat([*model.get_image_features(batch["pixel_values"]).pooler_output])
    embedded = model.get_input_embeddings()(ids)
    is_image = (ids == model.config.image_token_id)[..., None]
    embedded = embedded.masked_scatter(is_image, images).chunk(mesh.size(), dim=1)[part]
    positions = positions.chunk(mesh.size(), dim=1)[part]
    hidden = model.model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)[0]
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    rows = targets.chunk(mesh.size(), dim=1)[part][0]
    loss = functional.cross_entropy(model.lm_head(hidden)[0], rows, reduction="sum")
    (loss / (targets != -100).sum()).backward()


def train_in_hosts(folder):
    """On each process."""
    sys.path.insert(0, str(EXAMPLES))
    rank = torch.distributed.get_rank()
    with accelerate_afresh():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        for name in HOSTS:
            (folder / name).mkdir(exist_ok=True)
            check_host(name, folder / name, rank)
        check_unlike_data(rank)
        check_mesh(rank)
    return True


@pytest.mark.distributed
def test_two_processes_of_every_host_train_what_plain_transformers_would(tmp_path):
    for package in ("accelerate", "lightning", "trl"):
        pytest.importorskip(package)
    assert launch(2, "tests.integrations.test_hosts:train_in_hosts", tmp_path) == [True, True]


@pytest.mark.parametrize("family", ["internvl", "qwen2_5_vl"])
def test_the_page_for_beginners_trains_and_goes_on(family, tmp_path, monkeypatch, capsys):
    """docs/finetune.md: a folder of weights and annotations, to checkpoints from which the same command goes on."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("finetune")
    demo = write_demo(tmp_path / "demo", samples=24, held_out=20)
    folder = demo.model if family == "internvl" else tmp_path / "model"
    if family == "internvl":
        AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    else:
        save_folder(family, folder, demo.model, weights=True)
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 1, "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 20}
    for max_steps in (2, 3):
        args = TrainingArguments(str(tmp_path / "out"), max_steps=max_steps, **settings)
        example.main(example.Job(str(folder), str(demo.meta), str(demo.held_out_meta)), args)
        assert "samples in packs of at most" in capsys.readouterr().out
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == [1, 2, 3]
    # The collator pads held-out samples: their loss is that of each sample alone.
    *_, found = (row["eval_loss"] for row in state["log_history"] if "eval_loss" in row)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    assert found == pytest.approx(loss_of_each(model, open_dataset(demo.held_out_meta, folder)), rel=1e-4)


@torch.no_grad()
def loss_of_each(model, dataset):
    """The mean loss of all target tokens, samples one by one."""
    losses, targets = 0.0, 0
    for item in map(dataset.__getitem__, range(len(dataset))):
        fields = {name: item[name][None] for name in ("input_ids", "labels")}
        fields |= {name: item[name] for name in ("pixel_values", "image_grid_thw") if item.get(name) is not None}
        fields["mm_token_type_ids"] = (fields["input_ids"] == model.config.image_token_id).long()
        count = int((fields["labels"][:, 1:] != -100).sum())
        losses, targets = losses + float(model(**fields).loss) * count, targets + count
    return losses / targets
