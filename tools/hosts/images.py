"""A tiny Qwen2-VL with random weights, and pictures and clips as LLaMA-Factory reads them: images.py FOLDER."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.demo import write_demo
from tests.families.models import save_folder
from tests.families.videos import make_clip, random_shape

CLIPS = 24

INFO = {
    "file_name": "pictures.json",
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images", "videos": "videos"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}
ROLES = {"human": "user", "gpt": "assistant"}


def main() -> None:
    """Write ``vision_model``, ``pictures.json``, clips, and ``dataset_info.json``."""
    folder = Path(sys.argv[1])
    demo = write_demo(folder / "demo", samples=60, held_out=20)
    save_folder("qwen2_vl", folder / "vision_model", demo.model, weights=True)
    # LLaMA-Factory draws frames itself, and gives the processor no times to draw by.
    processor = folder / "vision_model" / "video_preprocessor_config.json"
    processor.write_text(json.dumps(json.loads(processor.read_text()) | {"do_sample_frames": False, "fps": None}))
    rows = [
        row_of(json.loads(line), folder / "demo" / "images" / "train" / path.stem)
        for path in demo.train_annotations
        for line in path.read_text().splitlines()
    ]
    rows += clips(folder / "clips", rows)
    (folder / "pictures.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"pictures": INFO}))


def row_of(record: dict[str, Any], images: Path) -> dict[str, Any]:
    """A conversation; the mark of an image is the same as ours."""
    names = record.get("image", [])
    names = [names] if isinstance(names, str) else names
    turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
    return {"messages": turns, "images": [str(images / name) for name in names], "videos": []}


def clips(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a clip in the place of their picture; every third one has both."""
    folder.mkdir()
    generator, found = np.random.default_rng(0), []
    for number, row in enumerate([row for row in rows if len(row["images"]) == 1][:CLIPS]):
        clip = make_clip(folder / f"{number}.mp4", *random_shape(generator))
        first, *others = row["messages"]
        mark, images = ("<image><video>", row["images"]) if number % 3 == 0 else ("<video>", [])
        asked = first | {"content": first["content"].replace("<image>", mark, 1)}
        found.append({"messages": [asked, *others], "images": images, "videos": [str(clip)]})
    return found


if __name__ == "__main__":
    main()
