"""What each trainer does with samples over its limit, as its code does it."""

import json

import numpy as np
import pytest
from PIL import Image as Picture

from omnibal.advise.measuring import measure
from omnibal.advise.models import Model
from omnibal.advise.present import Overlong, Present, read_present
from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError, DataError

NAMED = Model.known("InternVL3-1B")
SWIFT, TRAINER = {"train_type": "full", "max_length": 1000}, {"learning_rate": 1e-5}
INTERNVL = {**TRAINER, "max_seq_length": 1000}
QWEN = {**TRAINER, "model_max_length": 1000}
FACTORY = {"finetuning_type": "full", "cutoff_len": 1000}
# Tiles, tokens and targets: short; a long answer; a long question; an image and a long answer; images over the limit.
SAMPLES = [(0, 500, 100), (0, 3000, 2900), (0, 3000, 100), (1, 2256, 1000), (5, 1400, 50)]


@pytest.fixture
def folder(tmp_path):
    """The samples above, as lengths of two sources."""
    columns = np.array(SAMPLES).T
    lengths = SampleLengths(*columns[:2], target_tokens=columns[2], source=[0, 0, 1, 1, 1], source_names=["a", "b"])
    lengths.save(tmp_path / "lengths")
    return tmp_path / "lengths"


def measured(folder, content):
    return measure([folder], NAMED, read_present(content))


@pytest.mark.parametrize(
    ("content", "left", "words"),
    [
        # ms-swift deletes by default; images stay whole where samples are cut.
        (SWIFT, [(500, 100)], "4 of 5 samples are over 1,000 tokens (truncation_strategy delete) and left out"),
        ({**SWIFT, "truncation_strategy": "right"},
         [(500, 100), (1000, 900), (1000, 0), (1000, 0), (1280, 0)], "80.0% are cut at 1,000 tokens"),
        # LLaMA-Factory shares the limit between question and answer.
        (FACTORY, [(500, 100), (1000, 900), (1000, 100), (1000, 443), (1280, 50)], "20.0% have more image tokens than"),
        # TRL, InternVL, LLaVA and Qwen-VL cut the end.
        ({**TRAINER, "max_length": 1000}, [(500, 100), (1000, 900), (1000, 0), (1000, 0), (1280, 0)], "(max_length)"),
        ({**TRAINER, "dataset_text_field": "text", "max_length": None},
         [(500, 100), (3000, 2900), (3000, 100), (2256, 1000), (1400, 50)], ""),
        ({**TRAINER, "dataset_text_field": "text"},
         [(500, 100), (1024, 924), (1024, 0), (1024, 0), (1280, 0)], "1,024 tokens (max_length, by TRL's default)"),
        (QWEN, [(500, 100), (1000, 900), (1000, 0), (1000, 0), (1280, 0)], "which ends most runs: raise it"),
        ({**QWEN, "data_flatten": True}, [(500, 100), (3000, 2900), (3000, 100), (2256, 1000), (1400, 50)], ""),
        (INTERNVL, [(500, 100), (1000, 900), (1000, 0), (1000, 0), (1280, 0)], "(max_seq_length)"),
        (TRAINER, [(500, 100), (3000, 2900), (3000, 100), (2256, 1000), (1400, 50)], ""),
    ],
)  # fmt: skip
def test_each_trainer_has_its_own_way_with_long_samples(folder, content, left, words):
    found = measured(folder, content)
    lengths = found.lengths
    assert list(zip(lengths.llm_tokens.tolist(), lengths.target_tokens.tolist(), strict=True)) == left
    assert words in found.said
    # Whoever says how many tokens there are at most is told that it was read, or what became of the samples.
    present = read_present(content)
    limits = ("max_length", "max_seq_length", "model_max_length", "cutoff_len")
    assert all(key in present.said for key in limits if content.get(key))


def test_ms_swifts_packs_leave_out_what_is_longer_too(folder):
    found = measured(folder, {**SWIFT, "packing": True})
    assert found.lengths.llm_tokens.tolist() == [500] and found.lengths.source_names == ("a", "b")


def test_a_strategy_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="must be one of delete, raise, left, right, split, got 'no'"):
        read_present({**SWIFT, "truncation_strategy": "no"})
    assert read_present({"truncation_strategy": "left", "max_length": 100}).host == "ms-swift"


def test_a_limit_that_leaves_nothing_is_refused(folder):
    with pytest.raises(DataError, match="strategy delete must leave samples to train on, got 10: 5 of 5 samples are"):
        measured(folder, {**SWIFT, "max_length": 10})


def test_axolotls_files_are_refused_by_name():
    with pytest.raises(ConfigError, match="got one of axolotl; say --today zero3"):
        read_present({"base_model": "a", "sequence_len": 2048, "micro_batch_size": 1, "learning_rate": 1})


@pytest.mark.parametrize("seed", range(20))
def test_llama_factorys_shares_are_those_of_its_rule(seed):
    def shares(question, answer, limit):
        if answer * 2 < limit:
            most = limit
        elif question * 2 < limit:
            most = limit - question
        else:
            most = int(limit * (answer / (question + answer)))
        answer = min(most, answer)
        return min(max(limit - answer, 0), question), answer

    rng = np.random.default_rng(seed)
    questions, answers = rng.integers(0, 500, (2, 200))
    limit = int(rng.integers(1, 600))
    kept = Overlong("cutoff_len", "question and answer").targets(questions, answers, np.full(200, limit))
    for question, answer, targets in zip(questions, answers, np.clip(kept, 0, answers), strict=True):
        if question + answer > limit:
            assert targets == pytest.approx(shares(int(question), int(answer), limit)[1], abs=1)


def test_images_that_were_measured_keep_their_tokens(tmp_path):
    Picture.new("RGB", (448, 448)).save(tmp_path / "a.jpg")
    text = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "word " * 900}]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"messages": text, "images": ["a.jpg"]}) for _ in range(9)))
    for strategy, tokens in (("right", 400), ("left", 400)):
        present = read_present({**SWIFT, "max_length": 400, "truncation_strategy": strategy})
        found = measure([tmp_path / "d.jsonl"], NAMED, present)
        assert found.lengths.llm_tokens.tolist() == [tokens] * 9 and found.image_tokens.tolist() == [256] * 9
        assert (found.lengths.target_tokens > 0).all() and (found.lengths.target_tokens <= 144).all()
    assert measure([tmp_path / "d.jsonl"], NAMED, Present(cutoff=300)).lengths.llm_tokens.tolist() == [300] * 9
