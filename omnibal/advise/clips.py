"""Which limit of frames, pixels or seconds makes videos or sounds fit into packs, and how many samples it cuts."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Final

from omnibal.advise.measuring import MeasuredLengths, estimated_tokens, tokens_of
from omnibal.advise.models import Model
from omnibal.data.limits import PackLimits
from omnibal.families.base import SoundHeader, VideoHeader

FRAMES: Final = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4)
SIDES: Final = (1280, 1024, 896, 768, 672, 560, 448, 392, 336, 280, 224, 168, 112)
"""Of the square that has as many pixels as a limit allows."""
SECONDS: Final = (600, 300, 180, 120, 90, 60, 45, 30, 20, 15, 10, 5, 2)

Loads = Callable[[Any], Any]  # from a header to a load, of videos or of sounds


def clip_limits(model: Model, measured: MeasuredLengths, limits: PackLimits) -> list[str]:
    """In words, of videos and of sounds: the largest limits of each kind under which those of all samples fit."""
    found = list[str]()
    if measured.videos:
        tokens = partial(tokens_of, count=estimated_tokens)
        video = model.video_rule()
        found.append(_limits("videos", measured.videos, video, _of_videos(model, video), tokens, measured, limits))
    if measured.sounds:
        sound, of_sound = model.sound_rule(), attrgetter("llm_tokens")
        rules = _of_seconds(sound, "sounds")
        found.append(_limits("sounds", measured.sounds, sound, rules, of_sound, measured, limits))
    return [text for text in found if text]


def _limits(
    kind: str,
    clips: Mapping[int, tuple[Any, ...]],
    rule: Loads,
    rules: Iterator[tuple[str, Loads]],
    tokens_of_clip: Callable[[Any], int],
    measured: MeasuredLengths,
    limits: PackLimits,
) -> str:
    """What to say of videos or sounds; ``rule`` is today's, ``rules`` have limits, of each kind the largest first."""
    lengths = measured.lengths
    over = [sample for sample in limits.oversized(lengths).tolist() if sample in clips]
    if not over:
        return ""
    today = {sample: [rule(header) for header in headers] for sample, headers in clips.items()}

    def fits(loads: Loads, sample: int) -> bool:
        changed, before = [loads(header) for header in clips[sample]], today[sample]
        units = sum(load.vision_units for load in changed) - sum(load.vision_units for load in before)
        tokens = sum(map(tokens_of_clip, changed)) - sum(map(tokens_of_clip, before))
        within = lengths.vision_units[sample] + units <= limits.vision_units
        return bool(within and lengths.llm_tokens[sample] + tokens <= limits.llm_tokens)

    found = list[tuple[str, float]]()
    for name, loads in rules:
        if name.split()[0] not in {other.split()[0] for other, _ in found} and all(fits(loads, each) for each in over):
            cut = [s for s, headers in clips.items() if [loads(header) for header in headers] != today[s]]
            found.append((name, len(cut) / len(lengths)))
    exceed = f"{kind}: {len(over) / len(lengths):.1%} of the samples exceed these limits"
    if not found:
        return f"{exceed}, whatever {kind} are cut to"
    told = "; ".join(f"{name} would make them fit and cut {share:.1%} of the samples" for name, share in found)
    return f"{exceed}: {told}"


def _of_videos(model: Model, rule: Loads) -> Iterator[tuple[str, Loads]]:
    for frames in FRAMES:
        yield f"max_frames {frames}", model.video_rule(max_frames=frames, min_frames=min(frames, 4))
    for side in SIDES:
        size: Mapping[str, int] = {"longest_edge": side**2, "shortest_edge": 28**2}
        yield f"longest_edge {side**2:,} (pixels)", model.video_rule(size=size)
    yield from _of_seconds(rule, "clips")


def _of_seconds(rule: Loads, kind: str) -> Iterator[tuple[str, Loads]]:
    for seconds in SECONDS:
        yield f"{kind} of {seconds} seconds", partial(_cut, rule, seconds)


def _cut(rule: Loads, seconds: int, header: VideoHeader | SoundHeader) -> Any:
    if isinstance(header, SoundHeader):
        return rule(header._replace(samples=min(header.samples, seconds * header.rate)))
    frames = header.frames if header.fps is None else min(header.frames, max(int(seconds * header.fps), 2))
    return rule(header._replace(frames=frames))
