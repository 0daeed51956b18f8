"""Checks packs of small models of many families, and writes the table in docs/leaks.md: python -m tools.leaks.table."""

import argparse
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForImageTextToText

from omnibal.packs.collator import FAMILIES
from omnibal.packs.proof import check_packed, check_packing, two_texts
from tests.families.models import CONFIGS, DROPPED_IN, small_config

PAGE = Path(__file__).parents[2] / "docs" / "leaks.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
OUTSIDE = ("deepseek_vl",)  # a family that the tests add from outside


def row(model_type: str) -> str:
    config = small_config(model_type)
    config.text_config.initializer_range = 0.3  # with smaller random weights little would get across
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float()
    found = check_packing(model)
    trained = "padded rows"
    if model_type in FAMILIES:
        check_packed(model, *two_texts(config))  # as at the start of a training
        trained = "packs, exact" if check_packing(model).is_exact else "packs that leak"
    only = "" if found.has_images else ", text only"
    through = ", ".join(sorted({f"`{leak.class_name}` ({leak.kind})" for leak in found.leaks}))
    verdict = "exact" if found.is_exact else f"leak through {through}"
    return f"| `{model_type}` | {verdict}{only} | {found.logits_error:.1g} | {trained} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    families = sorted({*CONFIGS, *DROPPED_IN} - {*OUTSIDE})
    rows = [row(model_type) for model_type in tqdm(families, unit="model")]
    made = f"transformers {version('transformers')}, torch {torch.__version__}, {date.today()}, on a CPU"
    table = [
        f"Small models with random weights; {made}. Written by `python -m tools.leaks.table`.",
        "*Error* is that of a pack's logits, relative to their norm.",
        "",
        "| `model_type` | packs by itself | error | `balance` trains on |",
        "|---|---|---:|---|",
        *rows,
    ]
    text = PAGE.read_text()
    before, behind = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + "\n".join(table) + "\n" + behind)


if __name__ == "__main__":
    main()
