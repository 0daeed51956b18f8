"""What ways to train are measured to do: counts are those of the samples that were trained, and nothing is left."""

import pytest
import torch
from rich.console import Console

pytest.importorskip("accelerate")

from transformers import EarlyStoppingCallback, Trainer

from omnibal.data.lengths import SampleLengths
from omnibal.errors import InfeasibleError
from omnibal.integrations.trainer import compare as comparing
from omnibal.integrations.trainer.clock import WARM_UP, Kernel, MeasuredWay, Timed, busy_seconds
from omnibal.integrations.trainer.compare import WAYS, spread, spread_batches, spread_packs
from omnibal.integrations.transformers import balance, compare
from omnibal.ranks import gather
from omnibal.report.compare import draw, table_of
from tests.integrations.items import Collate, items_of
from tests.integrations.trainers import LIMITS, Case, Items, trainer_of, weights_of

PACKS = {"limits": LIMITS["internvl"]}
SAVES = {"save_strategy": "steps", "save_steps": 1, "logging_strategy": "steps", "logging_steps": 1}
TOKENS = [len(item["input_ids"]) for item in items_of("internvl")]


class Reused(Case):
    """A model that a user makes once for all trainers."""

    def plain(self):
        vars(type(self)).get("made") or setattr(type(self), "made", super().plain())
        return self.made


def refuse_fullest(trainer, behind=0):
    """Let memory not suffice for the largest sample, behind so many steps."""

    def refuse(model, inputs, given):
        if given["input_ids"].numel() >= max(TOKENS) and trainer.state.global_step >= behind:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")

    trainer.model.register_forward_pre_hook(refuse, with_kwargs=True)


def fills(trainer):
    refuse_fullest(trainer)
    spread_batches(trainer, 9, SampleLengths([0] * len(TOKENS), TOKENS))


def test_each_way_counts_what_it_trains_and_leaves_nothing(tmp_path, capsys):
    trainers, samplers = [], []

    def make_trainer():
        trainer = trainer_of(Reused("internvl"), tmp_path / "out", weight_decay=0.1, optim="adamw_torch", **SAVES)
        trainer.add_callback(EarlyStoppingCallback())  # it refuses a training without evaluation
        trainers.append(trainer)
        return trainer

    def packs(trainer):
        samplers.append(balance(trainer, **PACKS))
        return samplers[0]

    lengths = comparing._lengths(make_trainer())
    before = weights_of(Reused.made)
    ways = {"as today": None, "group_by_length": "group_by_length", "packs": packs, "[full]": fills}
    ways["refused"] = {**PACKS, "loss_reduction": "none"}
    found = compare(make_trainer, 3, ways=ways, lengths=lengths, picture=tmp_path / "picture.png")

    today, grouped, packed, full, refused = found
    for measured, trainer in ((today, trainers[1]), (grouped, trainers[2])):
        timed = trainer.train_dataset.read[2 * WARM_UP :][:6]  # of batches of 1, two a step
        assert (measured.steps, measured.samples) == (3, 6)
        assert measured.tokens == sum(TOKENS[sample] for sample in timed) < measured.padded_tokens  # by the collator
    held = [sample for step in range(WARM_UP, WARM_UP + 3) for sample in samplers[0].packs_of_step(step).samples]
    assert (packed.samples, packed.tokens) == (len(held), sum(TOKENS[sample] for sample in held))
    assert packed.vision_units == sum(
        sum(lengths.vision_units[[*pack, *pack.fillers]])
        for step in range(WARM_UP, WARM_UP + 3)
        for pack in samplers[0].packs_of_all_ranks(step)
    )
    assert all(each.seconds > each.loading_seconds > 0 and each.error > 0 for each in found[:3])
    assert full.failed == "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert refused.failed.startswith("loss_reduction must be one of")
    for name, weight in weights_of(Reused.made).items():
        assert torch.equal(weight, before[name]), name
    assert all(parameter.grad is None for parameter in Reused.made.parameters())
    assert [*(tmp_path / "out").iterdir()] == []
    told = " ".join(capsys.readouterr().out.split())
    assert "[full] could not be measured: out of memory" in told
    assert "refused could not be measured: loss_reduction must be" in told
    assert (tmp_path / "picture.png").stat().st_size > 0


def test_arguments_that_a_user_shares_among_trainers_stay(tmp_path):
    args, made = trainer_of("internvl", tmp_path, **SAVES).args, []
    before = args.to_dict()

    def make_trainer():
        data = {"train_dataset": Items("internvl"), "data_collator": Collate("internvl")}
        made.append(Trainer(Case("internvl").plain(), args, **data))
        return made[-1]

    found = compare(make_trainer, 2, ways={"packs": PACKS, "as today": None}, picture=None)
    assert [each.failed for each in found] == [None, None]
    assert args.to_dict() == before
    assert [(each.args.save_strategy, each.args.max_steps) for each in made] == [("no", 2 + WARM_UP)] * 2


def test_where_one_rank_alone_runs_out_of_memory_all_end(tmp_path, monkeypatch):
    def later(trainer):
        refuse_fullest(trainer, behind=WARM_UP)

    monkeypatch.setattr(comparing, "rank_and_size", lambda: (1, 2))
    with pytest.raises(InfeasibleError, match=r"later must fit on all ranks, got out of memory .* on rank 1 alone"):
        compare(lambda: trainer_of("internvl", tmp_path), 20, ways={"later": later}, picture=None)


def test_a_training_that_ends_early_says_so(tmp_path):
    ways = {"ends": lambda trainer: trainer.add_callback(Ends())}
    (found,) = compare(lambda: trainer_of("internvl", tmp_path), 5, ways=ways, picture=None)
    assert found.failed == "its training ended after 1 of 5 steps"


class Ends(EarlyStoppingCallback):
    def on_train_begin(self, *arguments, **others):
        """Ask for no evaluation."""

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = state.global_step == WARM_UP + 1


def test_steps_of_packs_are_spread_behind_the_fullest(tmp_path):
    sampler = balance(trainer_of("internvl", tmp_path), **PACKS)
    steps = range(sampler.num_steps)
    planned = [[pack.tolist() for pack in sampler.packs_of_step(step)] for step in steps]
    loads = [sampler.load(step) for step in steps]
    spread_packs(sampler)
    turns = spread(sampler.num_steps)
    for step, column in zip(range(WARM_UP), ("llm_tokens", "vision_units", "llm_tokens"), strict=True):
        packs = [pack.tolist() for pack in sampler.packs_of_step(step)]
        assert packs[:-1] == planned[turns[step]][:-1]
        most = max(getattr(each, column).max() for each in loads)
        assert getattr(sampler.load(step), column)[0, -1] == most  # beside gradients of the packs before it
        assert sampler.step(step).llm_tokens == sum(TOKENS[sample] for pack in packs for sample in pack)
    packs = [[*pack] for pack in sampler]
    assert packs == [pack.tolist() for step in steps for pack in sampler.packs_of_step(step)]
    behind = [[pack.tolist() for pack in sampler.packs_of_step(step)] for step in steps[WARM_UP:]]
    assert behind == [planned[turn] for turn in turns[: len(behind)]] != []


def test_fullest_batches_come_first_on_all_ranks():
    units, tokens = [0, 0, 1, 3, 0, 0, 1, 1], [99, 5, 7, 6, 99, 8, 70, 9]
    lengths, epoch = SampleLengths(units, tokens), torch.arange(8).numpy()
    order = comparing._ordered(epoch, lengths, (1, 2, 2), 3)
    # The fullest with an image, that with most images, and the first one again; two steps of four samples by turns.
    assert order == [6, 7, 6, 7, 2, 3, 2, 3, 6, 7, 6, 7, *range(8), *range(4)]
    # One rank has them behind another micro-batch.
    order = comparing._ordered(epoch, lengths, (2, 1, 2), 2)
    assert order == [0, 1, 6, 7, 4, 5, 2, 3, 0, 1, 6, 7, *range(8)]
    assert comparing._ordered(epoch, lengths, (3, 2, 2), 3) == []


def test_ranks_are_put_together():
    first = Timed([1.0, 2.0], [0.1, 0.1], [(1, 10, 20, 3), (1, 30, 40, 3)], 2**30, 0.2)
    other = Timed([2.0, 1.0], [0.5, 0.3], [(2, 30, 30, 1), (0, 10, 10, 1)], 2**31, 0.4)
    found = MeasuredWay.of("packs", [first, other])
    assert (found.steps, found.seconds, found.samples, found.tokens, found.vision_units) == (2, 4.0, 4, 80, 8)
    assert (found.tokens_per_second, found.real_tokens, found.peak_gib) == (20.0, 0.8, 2.0)
    assert (found.waited, found.loading_seconds, found.error) == pytest.approx((0.3, 0.4, 0.0))
    assert MeasuredWay.of("shared", [first, first], sharing=2).tokens == 40  # two ranks that share each batch
    assert MeasuredWay.of("one", [first]).waited is None


def test_a_table_has_the_columns_that_are_known(tmp_path):
    one = Timed([1.0, 1.0], [0.1, 0.1], [(1, 10, 20, 3), (1, 30, 40, 3)], 0, None)
    found = [
        MeasuredWay.of("as today", [one]),
        MeasuredWay.of("packs with a long name", [one]),
        MeasuredWay("none", "too large"),
    ]
    console = Console(width=66)
    with console.capture() as shown:
        console.print(table_of(found))
    assert [line.split() for line in shown.get().splitlines() if line.strip(" ─")] == [
        ["samples", "tokens", "×", "real", "loading"],
        ["way", "/s", "/s", "±", "row", "1", "tokens", "ms/step"],
        ["as", "today", "1.00", "20", "50.0%", "1.00", "67%", "100.0"],
        ["packs", "with", "a", "1.00", "20", "50.0%", "1.00", "67%", "100.0"],
        ["long", "name"],
        ["none", *["–"] * 6],
    ]
    console = Console(width=80)  # all columns of the usual ways fit it
    busy = Timed([1.0, 1.0], [0.1, 0.1], [(1, 10000, 20000, 3), (1, 30000, 40000, 3)], 141 * 2**30, 0.3)
    whole = [MeasuredWay.of(way, [busy, busy]) for way in WAYS]
    with console.capture() as shown:
        console.print(table_of(whole))
    first = next(line for line in shown.get().splitlines() if line.lstrip().startswith("as today"))
    assert first.split() == ["as", "today", "2.00", "40,000", "50.0%", "1.00", "141.0", "67%", "30%", "100.0"]
    draw(whole, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0


def test_seconds_of_kernels_that_overlap_count_once():
    assert busy_seconds([Kernel("b", 3, 5), Kernel("a", 0, 4), Kernel("c", 7, 8), Kernel("d", 1, 2)]) == 6


def check_compare(folder):
    """On two ranks: ranks wait, all find the same, and a batch that does not fit on any of them is a row."""
    ways = {"as today": None, "full": fills, "packs": PACKS}
    found = compare(lambda: trainer_of("internvl", folder), 2, ways=ways, picture=None)
    # Under ZeRO 3 plain batches would hang: one rank has an image and the other one none. A user may share arguments.
    first = trainer_of(case := Case("internvl", "zero3", options={"gradient_accumulation_steps": 1}), folder)
    data = {"train_dataset": first.train_dataset, "data_collator": first.data_collator}
    ways = {"zero3": PACKS, "more samples": {**PACKS, "samples_per_step": 11}}
    found += compare(lambda: Trainer(case.model(), first.args, **data), 2, ways=ways, picture=None)
    assert found[1].failed == "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. (rank 0)"
    assert found[0].samples == 8  # two steps of two batches of one on each of two ranks
    for each in (found[0], *found[2:]):
        assert each.failed is None and each.steps == 2 and 0 < each.waited < 1, each
    assert gather(found) == [found, found]
