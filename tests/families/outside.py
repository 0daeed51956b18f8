"""The worked example of docs/models.md: a family that is registered from outside."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnibal import families

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MODULE = "deepseek_vl"


@contextmanager
def findable():
    """Lets this process import the example; forgets it, and what it registers, again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        try:
            yield
        finally:
            families._FAMILIES.pop("deepseek_vl", None)
            for name in (MODULE, f"{MODULE}_layers"):
                sys.modules.pop(name, None)


@contextmanager
def registered():
    """The same with the family known to this process."""
    with findable():
        families.load(MODULE)
        yield
