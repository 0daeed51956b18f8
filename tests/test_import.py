import importlib
import subprocess
import sys

import pytest

import omnibal

HEAVY = ("torch", "deepspeed", "transformers", "matplotlib", "PIL")
SLOW = ("numba", "scipy", "pydantic", "omnibal.workspace")


def loaded_by(statements: str, among: tuple[str, ...] = HEAVY) -> set[str]:
    code = f"{statements}\nimport sys\nprint(*(name for name in {among} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import omnibal") == set()


def test_help_loads_no_torch_and_version_no_verb():
    call = "import contextlib, io\nfrom omnibal.cli.main import app\nwith contextlib.redirect_stdout(io.StringIO()):"
    for option, heavy in (("--help", HEAVY[:-1]), ("--version", HEAVY + SLOW)):
        assert loaded_by(f"{call}\n    app(['{option}'], standalone_mode=False)", heavy) == set()


def test_using_the_sampler_loads_nothing_heavy():
    use = """
from omnibal import BalancedBatchSampler, PackLimits, SampleLengths
lengths = SampleLengths([1, 3, 5, 4] * 8, [300, 900, 1400, 1100] * 8)
for method in ("balanced", "isf", "random"):
    list(BalancedBatchSampler(lengths, PackLimits(9, 4096), num_replicas=2, rank=0, method=method))
from omnibal import balanced_rows
balanced_rows(lengths, "InternVL3-8B", 2, 4096)
"""
    assert loaded_by(use) == set()


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'omnibal' has no attribute 'Sampler'"):
        omnibal.Sampler  # noqa: B018
    assert set(omnibal.__all__) <= set(dir(omnibal))


@pytest.mark.parametrize("name", omnibal.__all__)
def test_every_public_name_is_where_the_package_says(name):
    module = omnibal._MODULES[name]
    if importlib.util.find_spec("torch") is None and module.startswith("omnibal.engine"):
        pytest.skip("needs torch")
    assert getattr(omnibal, name) is getattr(importlib.import_module(module), name)
