"""Adapters of balanced_rows in trainers for reinforcement learning, in the trainers where they can be installed."""

import importlib
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from omnibal.errors import InfeasibleError
from omnibal.ranks import gather
from tests.engine.launch import launch
from tests.integrations.items import config_of, items_of
from tests.integrations.test_hosts import EXAMPLES
from tests.vlm.families import IMAGE_TOKEN, plain_family_model

FAMILY, EACH, STEPS = "qwen2_5_vl", 2, 4
"""Rollouts of a micro-batch, and micro-batches of a generation batch: two optimizer steps of two."""


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def generated(rank):
    """A rank's rollouts as GRPOTrainer makes them: prompts padded on the left, answers on the right."""
    generator = torch.Generator().manual_seed(7)
    count = 2 * EACH * STEPS
    answers = [torch.randint(4, IMAGE_TOKEN, (n,), generator=generator) for n in [3, 40, 5, 9, 17, 2, 30, 12] * 2]
    advantages = torch.randn(count, generator=generator)
    own = slice(rank * EACH * STEPS, (rank + 1) * EACH * STEPS)
    prompts = [items_of(FAMILY)[number % 11] for number in range(count)][own]
    texts = [prompt["input_ids"] for prompt in prompts]
    prompt_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_side="left")
    prompt_mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in texts], True, 0, "left")
    answer_ids = torch.nn.utils.rnn.pad_sequence(answers[own], batch_first=True)
    answer_mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in answers[own]], True)
    with_images = [prompt for prompt in prompts if prompt["pixel_values"] is not None]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": answer_ids,
        "completion_mask": answer_mask,
        "advantages": advantages[own],
        "num_items_in_batch": torch.tensor(sum(map(len, answers))),
        "pixel_values": torch.cat([prompt["pixel_values"] for prompt in with_images]),
        "image_grid_thw": torch.cat([prompt["image_grid_thw"] for prompt in with_images]),
        "num_images": [0 if p["pixel_values"] is None else len(p["image_grid_thw"]) for p in prompts],
        "mm_token_type_ids": (torch.cat([prompt_ids, answer_ids], dim=1) == IMAGE_TOKEN).long(),
    }


def trained(kind, folder, loss_type, steps, accumulated):
    """Weights of a real GRPOTrainer after its optimizer steps, and the micro-batches that this rank ran."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig

    ran = []

    class Trainer(kind):
        def _generate_and_score_completions(self, inputs):
            return generated(dist.get_rank())

        def compute_loss(self, model, inputs, **options):
            ran.append(inputs)
            return super().compute_loss(model, inputs, **options)

    words = Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    config = GRPOConfig(
        str(folder), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no", optim="sgd",
        logging_strategy="no", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, max_steps=steps,
        per_device_train_batch_size=EACH, gradient_accumulation_steps=accumulated, steps_per_generation=STEPS,
        num_generations=2, loss_type=loss_type, gradient_checkpointing=False, ddp_find_unused_parameters=True,
    )  # fmt: skip
    model = plain_family_model(config_of(FAMILY))
    trainer = Trainer(
        model=model,
        reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="a"),
    )
    trainer.train()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, ran


def train_grpo(folder, loss_type):
    """On each of two ranks: the weights of TRL's own trainer, from micro-batches that are even."""
    from trl import GRPOTrainer

    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("trl_grpo")
    rank, start = dist.get_rank(), dict(plain_family_model(config_of(FAMILY)).named_parameters())
    expected, _ = trained(GRPOTrainer, folder, loss_type, 1, STEPS)
    found, ran = trained(example.BalancedGRPOTrainer, folder, loss_type, 1, STEPS)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert any(not torch.equal(value, start[name]) for name, value in found.items())
    assert {len(batch["advantages"]) for batch in ran} == {EACH}
    check_even(ran, rank)
    if loss_type == "dapo":
        return True
    _, ran = trained(example.BalancedGRPOTrainer, folder, "dapo", 2, 2)
    first, second = gather(torch.cat([batch["advantages"] for batch in ran]).tolist())
    everything = torch.cat([generated(number)["advantages"] for number in range(2)])
    assert sorted(first + second) == sorted(everything.tolist()), "each rollout once in two steps"
    return True


def check_even(ran, rank):
    """Ranks run micro-batches of nearly one length together, and as many patches in all."""
    widths = [batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1] for batch in ran]
    patches = sum(int(batch["image_grid_thw"].prod(dim=1).sum()) for batch in ran if "image_grid_thw" in batch)
    (first, patches_first), (second, patches_second) = gather((widths, patches))
    own = generated(rank)
    assert max(*first, *second) <= own["prompt_ids"].shape[1] + 40
    assert sum(map(max, first, second)) < 0.8 * STEPS * max(first), "short rollouts are not padded to the longest"
    assert max(patches_first, patches_second) < 1.25 * (patches_first + patches_second) / 2


@pytest.mark.parametrize("loss_type", ["dapo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_trl_grpo_trains_the_same_weights_from_even_micro_batches(tmp_path, loss_type):
    pytest.importorskip("trl")
    assert launch(2, "tests.integrations.test_rollouts:train_grpo", tmp_path, loss_type) == [True, True]


def micro_batches_of_verl():
    """On each of two ranks, in verl's own function: as many micro-batches, none over the budget, even in patches."""
    import verl.utils.tensordict_utils as tu
    from verl.workers.engine import utils

    sys.path.insert(0, str(EXAMPLES))
    verl_rows = importlib.import_module("verl_rows")
    verl_rows.install("Qwen2.5-VL-7B")
    verl_rows.get_device_name = lambda: "cpu"  # verl knows no platform but those of GPUs
    rank = dist.get_rank()
    generator = np.random.default_rng(rank)
    tokens = generator.integers(20, 400, 24 + 8 * rank)
    grids = [torch.tensor([[1, 2 * int(side), 8]]) for side in generator.integers(1, 90, len(tokens))]
    ids = torch.nested.as_nested_tensor([torch.arange(int(count)) for count in tokens], layout=torch.jagged)
    images = [{"image_grid_thw": grid} for grid in grids]
    batch = tu.get_tensordict({"input_ids": ids, "multi_modal_inputs": images}, {"max_token_len_per_gpu": 1500})
    group = dist.group.WORLD
    micro_batches, places = utils.prepare_micro_batches(batch, dp_group=group)
    first, second = gather(len(places))
    assert first == second >= 4
    assert sorted(itertools.chain(*places)) == list(range(len(tokens)))
    held = [int(part["input_ids"].offsets()[-1]) for part in micro_batches]
    assert held == [int(tokens[place].sum()) for place in places]
    assert max(held) <= 1500
    patches = np.array([sum(int(grids[n].prod()) for n in place) for place in places])
    assert patches.max() < 1.15 * patches.mean()
    with pytest.raises(InfeasibleError, match=r"rollouts must be no longer than token_budget|another rank's rollouts"):
        tu.assign_non_tensor(batch, max_token_len_per_gpu=500 if rank else int(tokens.max()) - 1)
        utils.prepare_micro_batches(batch, dp_group=group)
    return True


def test_verl_cuts_each_rank_into_as_many_micro_batches():
    pytest.importorskip("verl")
    assert launch(2, "tests.integrations.test_rollouts:micro_batches_of_verl") == [True, True]


@pytest.mark.parametrize("keep_minibatch", [False, True])
def test_verl_deals_a_batch_to_ranks(example, keep_minibatch):
    protocol = pytest.importorskip("verl.protocol")
    ray_trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    example("verl_rows").install("Qwen2.5-VL-7B")
    generator = np.random.default_rng(0)
    tokens, sides = generator.integers(50, 900, 64), generator.integers(0, 60, 64)
    images = [{"image_grid_thw": torch.tensor([[1, 2 * int(side), 16]])} if side else {} for side in sides]
    batch = protocol.DataProto.from_dict(
        tensors={
            "attention_mask": (torch.arange(900) < torch.tensor(tokens)[:, None]).long(),
            "number": torch.arange(64),
        },
        non_tensors={"multi_modal_inputs": np.array(images, dtype=object)},
    )
    trainer = SimpleNamespace(
        _get_dp_size=lambda *_: 4,
        actor_rollout_wg=None,
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor={"ppo_mini_batch_size": 32})),
    )
    metrics = {}
    ray_trainer.RayPPOTrainer._balance_batch(trainer, batch, metrics, keep_minibatch=keep_minibatch)
    numbers = batch.batch["number"].numpy()
    assert sorted(numbers) == list(range(64))
    for load in (tokens, sides):
        of_ranks = load[numbers].reshape(4, 16).sum(axis=1)
        assert of_ranks.max() < 1.03 * of_ranks.mean()
    assert metrics["global_seqlen/balanced_max"] == tokens[numbers].reshape(4, 16).sum(axis=1).max()
    if keep_minibatch:  # each rank's n-th part of its rollouts is of the n-th mini-batch
        assert ((numbers.reshape(4, 2, 8) // 32) == np.arange(2)[:, None]).all()


def test_micro_batches_as_prime_rl_has_them_are_dealt_by_images_too(example):
    """Stand-ins for prime-rl's records, which cannot be installed here: its fields, and how it calls the function."""
    generator = np.random.default_rng(0)
    group = []
    for side in generator.integers(1, 60, 24):
        grid = np.array([[1, 2 * side, 16]])
        encoded = SimpleNamespace(dtype="int64", shape=[1, 3], data=grid.tobytes())
        tokens = 8 * side + int(generator.integers(20, 300))
        group.append(SimpleNamespace(input_ids=[1] * tokens, mm_kwargs={"image_grid_thw": encoded}, side=side))
    distribute = example("prime_rl_rows").distributor("Qwen3-VL-4B")
    dealt = distribute(group, 4, sum)
    assert [len(of_trainer) for of_trainer in dealt] == [6] * 4
    assert {id(one) for of_trainer in dealt for one in of_trainer} == {id(one) for one in group}
    in_order = [group[first : first + 4] for first in range(0, 24, 4)]
    waits, before = (
        sum(max(len(one.input_ids) for one in together) for together in steps)
        for steps in (zip(*dealt, strict=True), in_order)
    )
    assert waits < 0.8 * before, "micro-batches that run together are of nearly one length"
    of_trainers = [sum(one.side for one in of_trainer) for of_trainer in dealt]
    assert max(of_trainers) < 1.1 * np.mean(of_trainers)
    text = [SimpleNamespace(input_ids=[1] * count, mm_kwargs=None) for count in (5, 9, 2, 4)]
    assert [len(of_trainer) for of_trainer in distribute(text, 2, sum)] == [2, 2]
    assert distribute([], 3, sum) == [[], [], []]
