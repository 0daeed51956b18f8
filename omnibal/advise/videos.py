"""Which limit of frames, pixels or seconds makes videos fit into packs, and how many samples it cuts."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from omnibal.advise.measuring import MeasuredLengths, estimated_tokens, tokens_of
from omnibal.advise.models import Model
from omnibal.data.limits import PackLimits
from omnibal.families.base import VideoHeader, VideoLoad

FRAMES: Final = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4)
SIDES: Final = (1280, 1024, 896, 768, 672, 560, 448, 392, 336, 280, 224, 168, 112)
"""Of the square that has as many pixels as a limit allows."""
SECONDS: Final = (600, 300, 180, 120, 90, 60, 45, 30, 20, 15, 10, 5, 2)

Loads = Callable[[VideoHeader], VideoLoad]


def video_limits(model: Model, measured: MeasuredLengths, limits: PackLimits) -> str:
    """In words: the largest limit of each kind under which the videos of all measured samples fit; else nothing."""
    lengths, videos = measured.lengths, measured.videos
    over = [sample for sample in limits.oversized(lengths).tolist() if sample in videos]
    if not over:
        return ""
    today = {sample: [model.video_rule()(header) for header in headers] for sample, headers in videos.items()}

    def fits(loads: Loads, sample: int) -> bool:
        changed, before = [loads(header) for header in videos[sample]], today[sample]
        units = sum(load.vision_units for load in changed) - sum(load.vision_units for load in before)
        tokens = sum(tokens_of(load, estimated_tokens) for load in changed)
        tokens -= sum(tokens_of(load, estimated_tokens) for load in before)
        within = lengths.vision_units[sample] + units <= limits.vision_units
        return bool(within and lengths.llm_tokens[sample] + tokens <= limits.llm_tokens)

    found = list[tuple[str, float]]()
    for name, loads in _candidates(model):
        if name.split()[0] not in {kind.split()[0] for kind, _ in found} and all(fits(loads, each) for each in over):
            cut = [s for s, headers in videos.items() if [loads(header) for header in headers] != today[s]]
            found.append((name, len(cut) / len(lengths)))
    if not found:
        return f"videos: {len(over) / len(lengths):.1%} of the samples exceed these limits, whatever videos are cut to"
    told = "; ".join(f"{name} would make them fit and cut {share:.1%} of the samples" for name, share in found)
    return f"videos: {len(over) / len(lengths):.1%} of the samples exceed these limits: {told}"


def _candidates(model: Model) -> Iterator[tuple[str, Loads]]:
    """Limits with what videos then bring, of each kind the largest first."""
    for frames in FRAMES:
        yield f"max_frames {frames}", model.video_rule(max_frames=frames, min_frames=min(frames, 4))
    for side in SIDES:
        size: Mapping[str, int] = {"longest_edge": side**2, "shortest_edge": 28**2}
        yield f"longest_edge {side**2:,} (pixels)", model.video_rule(size=size)
    for seconds in SECONDS:
        yield f"clips of {seconds} seconds", _cut(model.video_rule(), seconds)


def _cut(rule: Loads, seconds: int) -> Loads:
    def loads(header: VideoHeader) -> VideoLoad:
        frames = header.frames if header.fps is None else min(header.frames, max(int(seconds * header.fps), 2))
        return rule(header._replace(frames=frames))

    return loads
