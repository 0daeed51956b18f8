"""Zero-bubble decides when a weight gradient is computed, and about nothing else: every bit is that of 1F1B."""

from dataclasses import replace

import pytest
import torch

from tests.engine.launch import launch
from tests.engine.small import Case, save_small_model

pytestmark = pytest.mark.distributed


def summed(dtype):
    return {"data_types": {"grad_accum_dtype": dtype}}


BFLOAT16 = {"bf16": {"enabled": True}}
PRECISIONS = {
    "fp32, ZeRO 0": {"zero_stage": 0},
    "fp32, ZeRO 1": {"zero_stage": 1},
    "bf16, ZeRO 0": {"zero_stage": 0, "extra": BFLOAT16},
    "bf16, ZeRO 1": {"zero_stage": 1, "extra": BFLOAT16 | summed("bf16")},
    "bf16, ZeRO 1, summed in fp32": {"zero_stage": 1, "extra": BFLOAT16},  # by default
}
ONE_REPLICA = [[[0, 1], [2], [4, 7], [3, 5, 6], [], [1, 2]]]
LANGUAGE = ("text_embedding", "decoder_block", "final_norm", "head")
LEVELS = ("full", "none", "selective")  # repeated over the layers: each kind meets each level in some case
BUDGETS = (0, 30_000)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of an untied and a tied model."""
    folders = {tied: str(tmp_path_factory.mktemp(f"tied{tied}")) for tied in (False, True)}
    for tied, folder in folders.items():
        save_small_model(folder, tied=tied)
    return folders


def cases_of(models, boundaries, packs):
    """A case for each precision, with untied and tied models and other levels in turn."""
    return {
        precision: Case(
            boundaries, packs, models[number % 2 == 1], LEVELS[number % 3 :] + LEVELS[: number % 3], steps=2,
            schedule="zero-bubble", **settings,
        )
        for number, (precision, settings) in enumerate(PRECISIONS.items())
    }  # fmt: skip


@pytest.fixture(scope="module")
def two(models):
    """The cases of two processes, and what each process saw."""
    cases = cases_of(models, (0, 4, 10), ONE_REPLICA)
    for precision in ("fp32, ZeRO 0", "bf16, ZeRO 0"):
        cases[f"frozen, {precision}"] = replace(
            cases[precision], boundaries=(0, 6, 10), frozen=("patch_embedding", "vision_block")
        )
    cases["tied and frozen"] = replace(cases["bf16, ZeRO 0"], model=models[True], frozen=LANGUAGE)
    cases["lean"] = replace(cases["bf16, ZeRO 0"], schedule="zero-bubble-lean")
    arguments = [*cases.values()], cases["bf16, ZeRO 0"], BUDGETS
    return cases, launch(2, "tests.engine.deferred:two_processes", *arguments, ends=True)  # its last step fails


def check_both(cases, by_rank):
    for results in by_rank:
        for name, (plain, split) in zip(cases, results, strict=True):
            assert plain["losses"] == split["losses"], name
            assert plain["losses"][-1] < plain["losses"][0], name
            assert plain["gradients"], name
            assert is_same(plain["gradients"], split["gradients"]), name
            assert is_same(plain["weights"], split["weights"]), name
            assert plain["peak_bytes"] == 0, name
            assert (split["peak_bytes"] > 0) == (split["stage"] > 0), name
            assert split["left"] == (0, 0), name


def is_same(one, other):
    """Whether two dictionaries of tensors hold the same bits."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_every_bit_of_two_stages_is_that_of_one_f_one_b(two):
    cases, by_rank = two
    check_both(cases, [result["both"] for result in by_rank])


@pytest.mark.parametrize(
    "precisions",
    [
        ("fp32, ZeRO 1", "bf16, ZeRO 0"),
        pytest.param(("fp32, ZeRO 0", "bf16, ZeRO 1"), marks=pytest.mark.slow),  # two stages show these, too
    ],
)
def test_every_bit_of_four_stages_is_that_of_one_f_one_b(precisions, models):
    cases = {f"pp4, {name}": case for name, case in cases_of(models, (0, 2, 5, 7, 10), ONE_REPLICA).items()}
    cases = {name: case for name, case in cases.items() if name.removeprefix("pp4, ") in precisions}
    check_both(cases, launch(4, "tests.engine.deferred:train_both", [*cases.values()]))


def test_a_budget_changes_no_bit(two):
    cases, by_rank = two
    number = [*cases].index("bf16, ZeRO 0")
    for result in by_rank:
        plain, _ = result["both"][number]
        for budget, split in zip(BUDGETS, result["budgets"], strict=True):
            assert is_same(plain["weights"], split["weights"]), budget
            assert split["peak_bytes"] <= budget
    _, unlimited = by_rank[1]["both"][number]
    assert unlimited["peak_bytes"] > BUDGETS[-1]


def test_without_weight_gradients_nothing_would_be_the_same(two):
    cases, by_rank = two
    number = [*cases].index("bf16, ZeRO 0")
    for result in by_rank:
        plain, _ = result["both"][number]
        assert not is_same(plain["gradients"], result["no weights"]["gradients"])
        assert not is_same(plain["weights"], result["no weights"]["weights"])
        assert plain["losses"] != result["no weights"]["losses"]


def test_the_host_asks_for_values_once_a_micro_batch_at_most(two):
    _, by_rank = two
    # The second stage reads the description of what it receives; under zero-bubble that is a message between hosts.
    assert [result["reads"] for result in by_rank] == [[0, 0], [1, 1]]


def test_the_last_stage_holds_the_input_of_one_micro_batch(two):
    _, (_, last) = two
    assert last["inputs"] == [1, 1]


def test_an_evaluation_between_steps_changes_nothing(two):
    _, by_rank = two
    for result in by_rank:
        plain, evaluated = result["evaluated"]
        assert plain == evaluated


def test_a_stage_that_fails_stops_all_stages(two):
    _, (first, last) = two
    assert last["failed"] == "the layer fails"
    assert first["failed"]
