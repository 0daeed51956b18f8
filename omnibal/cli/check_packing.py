"""omnibal check-packing: whether a model's packs leak from sample to sample, and through which layers."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from omnibal.cli.opening import expect
from omnibal.cli.options import JsonOption, answer, working
from omnibal.errors import ConfigError
from omnibal.report.style import make_table


def check_packing(
    folder: Annotated[Path, typer.Argument(help="A model's Hugging Face folder; its configuration is enough.")],
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="Check the folder's own weights, whole; by default a small model with random ones."
        ),
    ] = False,
    attention: Annotated[
        str | None,
        typer.Option(help="transformers' attention, such as sdpa, eager or flash_attention_2; by default the model's."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, …")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Check whether samples in a pack change each other, and name the layers that let them.

    Packs are rows of samples with positions that restart, no mask and no cache. Logits, gradients and what every layer
    computes are compared with each sample alone. Ends with 1 where packs leak. In Python, omnibal.check_packing does so
    for your own collator.

    Example: omnibal check-packing Qwen3.5-4B

    Example: omnibal check-packing InternVL3-8B-hf --weights --device cuda --attention flash_attention_2
    """
    expect("folder", folder, frozenset({"model"}))
    # Imported once the arguments are right: torch and transformers take seconds.
    with working("making the model"):
        model = _model(folder, weights=weights, attention=attention).to(device)
    from omnibal.packs.proof import check_packing as check

    with working("comparing packs with samples alone"):
        found = check(model)
    rows = [(leak.module, leak.class_name, leak.kind, f"{leak.error:.1%}") for leak in found.leaks]
    table = [make_table(("module", "class", "what leaks", "changes by"), rows)] if rows else []
    record = asdict(found) | {"leaks": [leak._asdict() for leak in found.leaks]}
    record |= {"is_exact": found.is_exact, "remedies": found.remedies}
    answer(record, f"{folder}: {found.summary}", *table, *found.remedies, as_json=as_json)
    if not found.is_exact:
        raise typer.Exit(1)


def _model(folder: Path, *, weights: bool, attention: str | None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from omnibal.packs.row_lengths import small_config

    config = AutoConfig.from_pretrained(folder)
    options = {} if attention is None else {"attn_implementation": attention}
    kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    try:
        if weights:
            return kind.from_pretrained(folder, **options)
        torch.manual_seed(0)
        return kind.from_config(small_config(config), **options).float()
    except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
        remedy = "" if weights else "; --weights checks the whole model"
        raise ConfigError(
            f"folder must hold a model that transformers can make, got {folder}: {error}{remedy}"
        ) from None
