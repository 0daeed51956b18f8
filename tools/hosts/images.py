"""A tiny Qwen2-VL with random weights, and pictures and questions as LLaMA-Factory reads them: images.py FOLDER."""

import json
import sys
from pathlib import Path
from typing import Any

from omnibal.demo import write_demo
from tests.families.models import save_folder

INFO = {
    "file_name": "pictures.json",
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}
ROLES = {"human": "user", "gpt": "assistant"}


def main() -> None:
    """Write ``vision_model``, ``pictures.json`` and ``dataset_info.json``."""
    folder = Path(sys.argv[1])
    demo = write_demo(folder / "demo", samples=60, held_out=20)
    save_folder("qwen2_vl", folder / "vision_model", demo.model, weights=True)
    rows = [
        row_of(json.loads(line), folder / "demo" / "images" / "train" / path.stem)
        for path in demo.train_annotations
        for line in path.read_text().splitlines()
    ]
    (folder / "pictures.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"pictures": INFO}))


def row_of(record: dict[str, Any], images: Path) -> dict[str, Any]:
    """A conversation; the mark of an image is the same as ours."""
    names = record.get("image", [])
    names = [names] if isinstance(names, str) else names
    turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
    return {"messages": turns, "images": [str(images / name) for name in names]}


if __name__ == "__main__":
    main()
