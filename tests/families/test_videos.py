"""Videos' lengths from their headers, against transformers' video processors and the clips themselves."""

import numpy as np
import pytest
import torch
from PIL import Image

from omnibal.errors import ConfigError
from omnibal.families import family_of
from omnibal.families.base import VideoHeader, VideoLoad
from omnibal.formats.media import load_frames, video_header
from tests.families.models import VIDEO_PROCESSORS, small_config, video_processor
from tests.families.videos import CODECS, make_clip, random_shape, whole_video_processor

SAMPLINGS = [
    {},
    {"fps": 1, "min_frames": 4, "max_frames": 7},
    {"fps": None, "num_frames": 6},
    {"do_sample_frames": False},
    {"fps": 5, "max_frames": 30},
]


def rule_of(model_type, processor):
    config = small_config(model_type).to_dict()
    return family_of(config).video_rule(config, processor.to_dict())


def test_slices_have_runs_of_their_own_behind_their_times():
    header = VideoHeader(80, 40, 50, 10.0)
    second = rule_of("qwen2_5_vl", video_processor("qwen2_5_vl"))(header)
    assert second == VideoLoad([0, 5, 10, 15, 20, 25, 30, 35, 40, 45], (5, 10, 20), (250,))
    assert (second.vision_units, second.llm_tokens, second.vision_squared) == (1000, 250, 5 * 200**2)
    third = rule_of("qwen3_vl", video_processor("qwen3_vl"))(header)
    assert third.runs == (21,) * 5 and third.grid == (5, 6, 14)
    assert third.seconds == pytest.approx((0.25, 1.35, 2.45, 3.55, 4.65), abs=0.06)


@pytest.mark.parametrize("model_type", VIDEO_PROCESSORS)
def test_lengths_are_those_of_the_processor(model_type, tmp_path, monkeypatch):
    check_clips(model_type, tmp_path, monkeypatch, 10)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", VIDEO_PROCESSORS)
def test_lengths_of_500_clips_are_those_of_the_processor(model_type, tmp_path, monkeypatch):
    check_clips(model_type, tmp_path, monkeypatch, 500)


def check_clips(model_type, folder, monkeypatch, count):
    rng = np.random.default_rng(0)
    refused = 0
    for number in range(count):
        options = SAMPLINGS[number % len(SAMPLINGS)]
        whole, processor = whole_video_processor(monkeypatch, model_type, **options)
        path = make_clip(folder / f"{number}.{['mp4', 'avi', 'mov'][number % 3]}", *random_shape(rng))
        header, rule = video_header(path), rule_of(model_type, processor)
        try:
            load = rule(header)
        except ValueError:
            refused += 1
            with pytest.raises((ValueError, ZeroDivisionError)):
                processor([str(path)])
            continue
        made = processor([str(path)], return_metadata=True)
        assert tuple(made["video_grid_thw"][0].tolist()) == load.grid, (header, options)
        assert list(made["video_metadata"][0].frames_indices) == list(load.numbers), (header, options)
        text = whole.replace_video_token(made, 0)
        assert sum(load.runs) == text.count("<|video_pad|>")
        times = [f"<{seconds:.1f} seconds>" for seconds in load.seconds]
        assert [part.partition("<|vision")[0] for part in text.split("<|vision_end|>")[:-1]] == times
    assert refused < count / 2


def test_a_rule_says_what_it_does_not_know():
    processor = video_processor("qwen3_vl").to_dict()
    config = small_config("qwen3_vl").to_dict()
    for change, message in (
        ({"use_token_compression": True}, "use_token_compression of the video processor must be false"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame of the video processor must be false"),
        ({"num_frames": 3}, r"must name one of fps and num_frames to sample by, got \[2, 3\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            family_of(config).video_rule(config, processor | change)
    with pytest.raises(ValueError, match="at least 2 frames, got 1"):
        rule_of("qwen3_vl", video_processor("qwen3_vl"))(VideoHeader(64, 64, 1, 10.0))
    with pytest.raises(ValueError, match="must have frames to sample 2 of, got 1"):
        rule_of("qwen2_vl", video_processor("qwen2_vl"))(VideoHeader(64, 64, 1, 10.0))


@pytest.mark.parametrize("suffix", CODECS)
def test_headers_tell_what_decoding_finds(suffix, tmp_path):
    path = make_clip(tmp_path / f"clip.{suffix}", 36, 50, 13, 12)
    assert video_header(path) == VideoHeader(36, 50, 13, 12.0) == video_header(path.read_bytes())
    frames = load_frames(path, [0, 5, 12])
    assert [frame.size for frame in frames] == [(36, 50)] * 3
    brightness = [np.asarray(frame)[:, 1].mean() for frame in frames]
    assert brightness == sorted(brightness) and brightness[2] > brightness[0] + 5
    with pytest.raises(ValueError, match="must hold frame 13, as its header says, got fewer in"):
        load_frames(path, [13])


def test_broken_videos_are_named(tmp_path):
    for name, content, message in (
        ("none.mp4", None, "video must exist, got"),
        ("text.mp4", b"no video at all", "video must have a readable header, got .*text.mp4"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            video_header(tmp_path / name)
    with pytest.raises(ValueError, match="frame of a video must have at most 100 pixels, got 36 x 50"):
        video_header(make_clip(tmp_path / "large.mp4", 36, 50, 3, 12), 100)


def test_images_are_frames(tmp_path):
    for number, size in enumerate([(30, 20), (30, 20), (20, 20)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    frames = tuple(tmp_path / f"{number}.png" for number in range(3))
    assert video_header(frames[:2]) == VideoHeader(30, 20, 2, None)
    assert len(load_frames(frames, [0, 1])) == 2
    with pytest.raises(ValueError, match=r"must be of one size, got \[\(20, 20\), \(30, 20\)\] in 3 frames from"):
        video_header(frames)


@pytest.mark.parametrize("model_type", VIDEO_PROCESSORS)
def test_attention_stays_within_a_temporal_slice(model_type):
    """By transformers' own ViT: a change in one slice changes no other, so vision_squared is a sum over slices."""
    from tests.vlm.families import plain_family_model

    visual = plain_family_model(small_config(model_type)).model.visual.eval()
    grid = torch.tensor([[3, 4, 6]])
    pixels = torch.randn(72, visual.patch_embed.proj.weight[0].numel(), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = visual(pixels, grid_thw=grid).pooler_output.view(3, 6, -1)
        pixels[24:48] += 1
        after = visual(pixels, grid_thw=grid).pooler_output.view(3, 6, -1)
    changed = (before - after).abs().amax((1, 2)) > 1e-6
    assert changed.tolist() == [False, True, False]
