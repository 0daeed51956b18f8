"""Compiled functions are read from the cache until a file of their folder changes."""

import os
import subprocess
import sys

import pytest

DECORATED = "from omnibal.compiled import compiled\n\n@compiled\n"
INNER = DECORATED + "def inner(x):\n    return x + {}\n"
OUTER = "from inner import inner\n" + DECORATED + "def outer(x):\n    return 2 * inner(x)\n"
CALL = "from outer import outer\nprint(outer(1), sum(outer.stats.cache_hits.values()))"


def test_the_cache_serves_until_what_a_function_calls_has_changed(tmp_path):
    def run():
        return call(tmp_path, CALL).split()

    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "inner.py").write_text(INNER.format(1))
    assert run() == ["4", "0"]
    assert run() == ["4", "1"]
    (tmp_path / "inner.py").write_text(INNER.format(2))
    assert run() == ["6", "0"]


def test_a_class_of_arguments_may_get_another_name(tmp_path):
    code = "from typing import NamedTuple\n" + DECORATED.replace("\n@compiled", "")
    code += "class {0}(NamedTuple):\n    x: int\n\n@compiled\ndef outer(given):\n    return given.x\n"
    for name in ("Old", "New"):
        (tmp_path / "outer.py").write_text(code.format(name))
        assert call(tmp_path, f"from outer import {name}, outer\nprint(outer({name}(3)))").split() == ["3"]


def test_a_constant_argument_needs_no_code_of_its_own(tmp_path):
    """numba would compile inner once for 3, once for 4, once for the others."""
    outer = OUTER.replace("2 * inner(x)", "inner(x) + inner(3) + inner(4)")
    (tmp_path / "outer.py").write_text(outer)
    (tmp_path / "inner.py").write_text(
        INNER.format(1).replace("import compiled\n\n@compiled", "import compiled_part\n\n@compiled_part")
    )
    count = CALL.replace("outer.stats.cache_hits.values()", "1 for _ in outer.py_func.__globals__['inner'].signatures")
    assert call(tmp_path, count).split() == ["11", "1"]


def call(folder, code):
    """What a process prints that keeps compiled functions in this folder, and has its modules there."""
    command, environment = [sys.executable, "-c", code], os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def pack_two(folder, **environment):
    """What a process that calls two compiled functions of the package says."""
    code = "from omnibal.data import isf, lengths, limits, metrics; "
    code += "two = lengths.SampleLengths([1, 1], [5, 5]), limits.PackLimits(2, 9); "
    code += "isf.iterative_sampling_and_filtering(*two); metrics.min_packs(*two)"
    command, environment = [sys.executable, "-c", code], os.environ | environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stderr


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder in which a process has kept compiled code, and what it said."""
    folder = tmp_path_factory.mktemp("kept")
    return folder, pack_two(folder, NUMBA_CACHE_DIR=str(folder))


def test_who_waits_for_compilation_is_told_once(kept):
    folder, said = kept
    assert said.count("compiling omnibal's loops for this machine: once") == 1
    assert pack_two(folder, NUMBA_CACHE_DIR=str(folder)) == ""


def test_where_nothing_can_be_written_every_process_compiles_and_says_so(tmp_path):
    nowhere = {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull, "NUMBA_CACHE_DIR": ""}
    for _ in range(2):
        assert pack_two(tmp_path, **nowhere).count("some seconds in every process: no folder can be made for them") == 1


def test_code_is_kept_where_only_its_user_can_write(kept):
    home, _ = kept
    folder = home / "omnibal"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [*folder.rglob("*.nbi")]
    folder.chmod(0o770)
    assert f"others can enter {folder} (mode 770; `chmod 700`" in pack_two(home, NUMBA_CACHE_DIR=str(home))
    folder.chmod(0o700)
    assert pack_two(home, NUMBA_CACHE_DIR=str(home)) == ""


def test_code_in_a_folder_of_another_user_is_not_run(tmp_path):
    folder = tmp_path / "omnibal"
    folder.mkdir(mode=0o700)
    try:
        os.chown(folder, 65534, 65534)
    except PermissionError:
        pytest.skip("only root gives folders away")
    assert f"every process: {folder} belongs to another user" in pack_two(tmp_path, NUMBA_CACHE_DIR=str(tmp_path))
    assert not [*folder.iterdir()]
