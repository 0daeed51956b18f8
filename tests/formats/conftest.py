import json

import numpy as np
import pytest
from PIL import Image

from omnibal.demo import vocabulary, write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder, vocabulary())
    return folder


@pytest.fixture
def write_dataset(tmp_path):
    """Writes annotations and a meta file; records are given as (turns, sizes of their images) or as raw lines."""

    def write(records, name="shapes", **entry):
        root = tmp_path / "images"
        root.mkdir(exist_ok=True)
        lines = [item if isinstance(item, str) else json.dumps(_record(root, name, *item)) for item in records]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        meta = tmp_path / "meta.json"
        datasets = json.loads(meta.read_text()) if meta.exists() else {}
        datasets[name] = {"root": "images", "annotation": f"{name}.jsonl", **entry}
        meta.write_text(json.dumps(datasets))
        return meta

    return write


def _record(root, name, turns, sizes):
    rng = np.random.default_rng([len(turns), *map(sum, sizes)])
    files = []
    for width, height in sizes:
        files.append(f"{name}-{len(list(root.iterdir()))}.png")
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(root / files[-1])
    image = {} if not files else {"image": files[0] if len(files) == 1 else files}
    return {"conversations": [{"from": side, "value": value} for side, value in turns], **image}
