"""Advice on videos that exceed a pack: which limit of frames makes them fit."""

import json

import pytest

from omnibal.advise.measuring import FRAMES, frames_that_fit, measure
from omnibal.advise.models import read_model
from omnibal.advise.present import Present
from omnibal.data.limits import PackLimits
from omnibal.families.base import VideoHeader
from tests.families.videos import make_clip

NAMED = read_model("Qwen3-VL-2B")


@pytest.fixture
def measured(tmp_path):
    """Eight texts, a clip of five seconds, one of a minute."""
    make_clip(tmp_path / "short.mp4", 128, 96, 20, 4)
    make_clip(tmp_path / "long.mp4", 128, 96, 240, 4)
    texts = [{"query": "What is this?", "response": "A ball."}] * 8
    videos = [{"query": "What moves?", "response": "A ball.", "video": f"{name}.mp4"} for name in ("short", "long")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, texts + videos)))
    return measure([tmp_path / "data.jsonl"], NAMED, Present())


def test_limits_of_videos_are_the_largest_that_fit(measured):
    assert sorted(measured.videos.values()) == [(VideoHeader(128, 96, 20, 4.0),), (VideoHeader(128, 96, 240, 4.0),)]
    rule = NAMED.video_rule()
    short, long = (rule(VideoHeader(128, 96, frames, 4.0)) for frames in (20, 240))
    assert (len(short.numbers), len(long.numbers)) == (10, 120)
    per_slice = long.vision_units // 60
    told = frames_that_fit(NAMED, measured, PackLimits(30 * per_slice, 10_000))
    frames = max(each for each in FRAMES if each // 2 * per_slice <= 30 * per_slice)
    assert told == f"videos: 10.0% of the samples exceed these limits; max_frames {frames} would make them fit"
    assert frames == 48
    assert frames_that_fit(NAMED, measured, PackLimits(10**6, 10**6)) == ""
    tokens = frames_that_fit(NAMED, measured, PackLimits(10**6, 40))
    assert tokens == "videos: 20.0% of the samples exceed these limits, whatever max_frames is"
