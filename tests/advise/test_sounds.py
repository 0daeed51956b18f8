"""Advice on models that hear: waits for others' sounds."""

import json

import numpy as np
import pytest
import soundfile

from omnibal.advise.estimate import SOUND
from omnibal.advise.present import Present
from omnibal.advise.question import Question
from omnibal.cluster import Cluster
from omnibal.report.advise import Report
from omnibal.report.layouts import LayoutReport


@pytest.fixture(scope="module", params=["Qwen2-Audio-7B", "Qwen2.5-Omni-7B"])
def question(request, tmp_path_factory):
    """Six texts, sounds of 1, 2, 10 and 29 seconds."""
    folder = tmp_path_factory.mktemp("sounds")
    records = [{"query": "What is this?", "response": "A ball."}] * 6
    for seconds in (1, 2, 10, 29):
        soundfile.write(folder / f"{seconds}.flac", np.zeros(8_000 * seconds), 8_000)
        records.append({"query": "<audio>What is said?", "response": "A word.", "audio": f"{seconds}.flac"})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    present = Present(sharding="zero3", batch=2)
    return Question.read(folder / "data.jsonl", Cluster.parse("8xA100-80GB"), present, model=request.param)


def test_sounds_bring_their_tokens(question):
    lengths = question.measured.lengths
    assert lengths.llm_tokens[9] - lengths.llm_tokens[8] == 25 * 19


def test_waits_for_sounds_are_told_and_layouts_refused(question):
    advice, name = question.answer(), question.model.name
    shares = advice.today.shares
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[SOUND] > 0.01
    hears_alone = "Audio" in name
    assert not hears_alone or shares["waiting for others' ViT"] < 0.001
    assert question.model.units == ("windows" if hears_alone else "patches")
    assert any(f"% {SOUND}" in line for line in Report(question, advice).lines())


def test_of_layouts_zero_alone_is_weighed(question):
    answer = question.layouts()
    found = {each.kind: each for each in answer.candidates}
    assert set(found) == {"zero", "rearranged"} and not answer.missing_bytes
    for each in found.values():
        assert sum(each.shares.values()) == pytest.approx(1)
    lines = LayoutReport(answer, question.scenario).lines()
    assert "not weighed: pipelines, a spread encoder and units, which know no encoder of sound" in lines
