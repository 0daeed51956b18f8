"""A model with several encoders, described by ``EncoderAdapter``: what plain training gives, sample by sample."""

import os

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from omnibal.cost import CostModel
from omnibal.data.packs import kinds_of
from omnibal.dispatch.step_plan import Costs, PhaseCosts
from omnibal.errors import ConfigError
from omnibal.integrations.rearranging import RearrangedModel
from omnibal.integrations.rearranging_loader import RearrangingLoader, _costs_of
from omnibal.packs.collator import PackCollator, arguments_of, positions_of
from omnibal.packs.encoders import blank_samples, encode_in_every_evaluation
from omnibal.packs.losses import loss_per_target
from tests.engine.launch import launch
from tests.integrations.items import Collate, config_of, items_of
from tests.integrations.test_rearranging import LEARNING_RATE, trained_under
from tests.vlm.families import plain_family_model

IMAGE, CLIP, SOUND, WORDS = 1, 2, 3, 4
PATCH, BAND, HIDDEN = 6, 5, 16
# Rank 1 draws texts alone first; the last micro-batch leaves all but one rank without a sample.
DRAWN = [[[0, 1, 2], [3, 4], [5], [6, 7]], [[8, 9], [10, 5], [11, 0], [2]], [[7, 10, 4], [], [], []]]
# Patches of an image, patches of a clip, frames of a sound, words.
CONTENTS = [
    *((8, 0, 6, 5), (0, 4, 0, 7), (4, 0, 0, 4), (0, 0, 0, 9), (0, 0, 0, 3), (0, 0, 20, 6)),
    *((2, 6, 2, 5), (0, 0, 8, 4), (12, 0, 0, 3), (0, 0, 4, 8), (0, 8, 10, 6), (6, 0, 2, 5)),
]


class SeeingAndHearing(nn.Module):
    """One encoder for images and clips, one for sounds, and an LLM that takes their features in place of tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.sight = nn.Sequential(nn.Linear(2 * PATCH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
        self.hearing = nn.Sequential(nn.Linear(2 * BAND, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        sizes = {"vocab_size": 32, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2}
        self.llm = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=None))

    def forward(self, input_ids, position_ids=None, features=None, use_cache=False):
        embedded = self.llm.get_input_embeddings()(input_ids)
        for token, values in (features or {}).items():
            embedded = embedded.masked_scatter((input_ids == token)[..., None], values)
        return self.llm(inputs_embeds=embedded, position_ids=position_ids, use_cache=use_cache)


class Pairs:
    """Two rows of a tensor make a feature."""

    def __init__(self, model, phase, part, name, token_id, width):
        self.model, self.phase, self.part, self.token_id = model, phase, part, token_id
        self.takes, self.width = (name,), width

    def units(self, sample):
        rows = len(sample.get(self.takes[0], ()))
        return rows, rows**2

    def blank(self):
        return {self.takes[0]: torch.ones(2, self.width)}

    def encode(self, tensors):
        rows = tensors[self.takes[0]]
        return {"features": getattr(self.model, self.part)(rows.reshape(-1, 2 * self.width))}

    def insert(self, arguments, features):
        placed = {**arguments.get("features", {}), self.token_id: features["features"]}
        return {**arguments, "features": placed}


def encoders_for(model):
    return {
        "image": Pairs(model, "vision", "sight", "patches", IMAGE, PATCH),
        "clip": Pairs(model, "vision", "sight", "clips", CLIP, PATCH),
        "sound": Pairs(model, "sound", "hearing", "frames", SOUND, BAND),
    }


def items():
    generator = torch.Generator().manual_seed(1)
    found = []
    for patches, clip, frames, words in CONTENTS:
        text = torch.randint(WORDS, 32, (words,), generator=generator)
        runs = [torch.full((rows // 2,), token) for rows, token in ((frames, SOUND), (clip, CLIP), (patches, IMAGE))]
        ids = torch.cat([text[:1], *runs, text[1:]])
        item = {"input_ids": ids[None], "labels": torch.where(ids < WORDS, -100, ids)[None]}
        tensors = {"patches": (patches, PATCH), "clips": (clip, PATCH), "frames": (frames, BAND)}
        item |= {name: torch.randn(shape, generator=generator) for name, shape in tensors.items() if shape[0]}
        found.append(item)
    return found


def plain_loss(model, drawn):
    """The mean over all targets of samples that run one by one, without any of this package's passes."""
    total = sum(int((item["labels"][:, 1:] != -100).sum()) for item in drawn)
    losses = []
    for item in drawn:
        features = {
            encoder.token_id: encoder.encode(item)["features"]
            for encoder in encoders_for(model).values()
            if encoder.takes[0] in item
        }
        losses.append(loss_per_target(model(item["input_ids"], features=features), item["labels"], total))
    return sum(losses)


METHODS = Costs(
    {
        "vision": PhaseCosts(CostModel(vision_units=1, vision_squared=0.1), method="differencing"),
        "sound": PhaseCosts(method="padded"),
    },
    PhaseCosts(CostModel(llm_tokens=1), limit=60),
)


def loader_for(model, rank, **options):
    samples = items()
    batches = [[samples[number] for number in of_ranks[rank]] for of_ranks in DRAWN]
    encoders = encoders_for(model)
    collator = PackCollator(lambda batch: batch[0], None, further=[name for e in encoders.values() for name in e.takes])
    return RearrangingLoader(batches, collator, encoders=encoders, costs=METHODS, prints=False, **options)


def trained(host, **options):
    model = SeeingAndHearing()
    loader = loader_for(model, dist.get_rank(), **options)
    rearranged = RearrangedModel(model, options.get("group"), encoders=loader._encoders)
    return trained_under(host, rearranged, loader, model.llm.model.layers)


def work(hosts):
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    plans = [drawn.plan for drawn in loader_for(SeeingAndHearing(), dist.get_rank())]
    moved = {name for plan in plans for name, move in plan.moves.items() if not move.is_still}
    found = {host: trained(host) for host in hosts}
    if dist.get_world_size() == 4:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        found["pairs"] = trained("ddp", group=pairs[dist.get_rank() // 2], replicas=dist.group.WORLD)
        with pytest.raises(ConfigError, match=r"replicas must have all ranks of group, got none of rank [02]"):
            loader_for(SeeingAndHearing(), 0, replicas=pairs[dist.get_rank() // 2])
    return found, moved


def check(num_ranks, hosts):
    plain, samples = SeeingAndHearing(), items()
    optimizer = torch.optim.SGD(plain.parameters(), LEARNING_RATE)
    for of_ranks in DRAWN:
        optimizer.zero_grad()
        plain_loss(plain, [samples[number] for drawn in of_ranks[:num_ranks] for number in drawn]).backward()
        optimizer.step()
    for found, moved in launch(num_ranks, "tests.packs.test_encoders:work", hosts):
        assert moved == {"vision", "sound", "llm"}
        assert found.keys() >= {*hosts}
        for host, weights in found.items():
            for name, weight in plain.named_parameters():
                torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-5, atol=1e-6, msg=f"{host}: {name}")


@pytest.mark.distributed
def test_several_encoders_train_as_plain_samples_do():
    check(2, ["ddp", "fsdp", "zero2", "zero3"])


@pytest.mark.slow
@pytest.mark.distributed
def test_several_encoders_train_as_plain_samples_do_on_four_ranks_and_on_pairs_of_them():
    check(4, ["ddp", "fsdp", "zero1", "zero3"])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_audio", "qwen2_5_omni_thinker"])
def test_blank_samples_run_each_encoder_and_change_nothing(family):
    model = plain_family_model(config_of(family)).double()
    collator = PackCollator(Collate(family), positions_of(model.config), arguments=arguments_of(model))
    text, blanks = collator.sample(items_of(family)[1]), blank_samples(model)
    kinds = [kinds_of(collator.loads(blank)) for blank in blanks]
    assert kinds == {"qwen2_audio": [0, 1], "qwen2_5_omni_thinker": [0, 4, 1]}.get(family, [0, 1, 2])
    found = []
    for samples in ([text], [text, *blanks]):
        pack = collator.pack(samples)
        loss_per_target(model(**pack), pack.pop("labels")).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained - found[1].keys() <= {"model.audio_tower.audio_bos_eos_token.weight"}  # which no sound reaches
    for name, gradient in found[1].items():
        expected = found[0].get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", ["internvl", "idefics3", "qwen2_5_vl", "qwen2_audio", "qwen2_5_omni_thinker"])
def test_an_evaluation_of_texts_runs_each_encoder_and_has_the_same_loss(family):
    model, ran = plain_family_model(config_of(family)).eval(), []
    batch = Collate(family)([items_of(family)[1]])
    assert not {"pixel_values", "input_features"} & batch.keys()
    with torch.no_grad():
        expected = model(**batch).loss
    encode_in_every_evaluation(model)
    for name in ("get_image_features", "get_video_features", "get_audio_features", "audio_tower"):
        if hasattr(model.model, name):
            monitored(model.model, name, ran)
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, expected)
    kinds = {"qwen2_5_vl": ["image", "video"], "qwen2_audio": ["audio"], "qwen2_5_omni_thinker": ["audio", "image"]}
    assert ran == kinds.get(family, ["image"])
    model.train()(**batch)
    model.eval()(**batch).loss.backward()
    assert len(ran) == len(kinds.get(family, ["image"])), "in an evaluation alone"


def monitored(model, name, ran):
    """Let a method or a module of a model note that it runs."""
    kind = next(kind for kind in ("image", "video", "audio") if kind in name)
    if isinstance(getattr(model, name), nn.Module):
        if not hasattr(model, "get_audio_features"):
            getattr(model, name).register_forward_pre_hook(lambda *_: ran.append(kind))
        return
    plain = getattr(model, name)
    vars(model)[name] = lambda *args, **options: (ran.append(kind), plain(*args, **options))[1]


def test_costs_are_of_the_encoders_there_are():
    assert [*_costs_of(["vision", "sound"], None, padded=False).encoders] == ["vision", "sound"]
    sound = {"sound": PhaseCosts(CostModel(vision_units=3))}
    assert _costs_of(["vision", "sound"], Costs(sound), padded=False).encoders["sound"] is sound["sound"]
    with pytest.raises(ConfigError, match=r"costs\.encoders must name phases of vision, got sound"):
        _costs_of(["vision"], Costs(sound), padded=False)
    with pytest.raises(ConfigError, match=r"must be 'padded' under a RowCollator .* got 'padded' under a PackC"):
        _costs_of(["vision"], Costs(llm=PhaseCosts(method="padded")), padded=False)
