"""Made-up clips, and transformers' video processors with what they need of torchvision made here."""

from fractions import Fraction

import av
import numpy as np
import torch
from transformers.image_processing_backends import TorchvisionBackend
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import load_video

from tests.families.models import PROCESSORS, video_processor

CODECS = {"mp4": "mpeg4", "avi": "mpeg4", "mov": "mjpeg", "webm": "libvpx-vp9", "mkv": "ffv1"}
RATES = (Fraction(30000, 1001), Fraction(25), Fraction(10), Fraction(24000, 1001), Fraction(7, 2), Fraction(60))


def make_clip(path, width, height, frames, fps):
    """A clip whose frames change, in the container that the name's suffix says."""
    codec = CODECS[path.suffix[1:]]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        shade = np.linspace(0, 200, width, dtype=np.uint8)[None, :, None]
        for number in range(frames):
            picture = np.broadcast_to(shade + number % 50, (height, width, 3))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())
    return path


def random_shape(rng):
    """Width, height, frames and rate of a clip."""
    width, height = (int(side) for side in rng.integers(16, 120, 2))
    return width, height, int(rng.integers(2, 60)), RATES[rng.integers(len(RATES))]


def whole_video_processor(monkeypatch, model_type, tokenizer=None, **options):
    """A whole processor of transformers, and its video processor, which reads files by PyAV.

    torchvision alone is missing: of the video processor, colours, resizing and normalising are made by torch.
    """

    def resized(self, image, size, **others):
        frames = image.flatten(0, -4).float()
        resized = torch.nn.functional.interpolate(frames, (size.height, size.width), mode="bicubic", antialias=True)
        return resized.clamp(0, 255).round().view(*image.shape[:-2], size.height, size.width)

    def normalised(self, images, do_rescale, rescale_factor, do_normalize, image_mean, image_std):
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (image_mean, image_std))
        return (images * rescale_factor - mean) / std

    def fetched(self, videos, sample_indices_fn=None):
        read = [load_video(video, backend="pyav", sample_indices_fn=all_frames) for video in videos]
        for metadata in (metadata for _, metadata in read if sample_indices_fn is not None):
            found = [number for number in sample_indices_fn(metadata=metadata) if number < metadata.total_num_frames]
            metadata.frames_indices = np.array(found)
        return [frames[metadata.frames_indices] for frames, metadata in read], [metadata for _, metadata in read]

    def all_frames(metadata, **others):
        metadata.total_num_frames = metadata.total_num_frames or 17  # a container without a count is of that many here
        return np.arange(metadata.total_num_frames)

    monkeypatch.setattr(TorchvisionBackend, "resize", resized)
    monkeypatch.setattr(TorchvisionBackend, "rescale_and_normalize", normalised)
    monkeypatch.setattr(BaseVideoProcessor, "convert_to_rgb", lambda self, video: video)
    monkeypatch.setattr(BaseVideoProcessor, "fetch_videos", fetched)
    videos, whole = video_processor(model_type, **options), object.__new__(PROCESSORS[model_type])
    vars(whole).update(video_processor=videos, tokenizer=tokenizer, video_token="<|video_pad|>", image_token="?")
    vars(whole).update(vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>")
    return whole, videos
