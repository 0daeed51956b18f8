"""Compiled functions are read from the cache until a file of their folder changes."""

import os
import subprocess
import sys

DECORATED = "from omnibal.compiled import compiled\n\n@compiled\n"
INNER = DECORATED + "def inner(x):\n    return x + {}\n"
OUTER = "from inner import inner\n" + DECORATED + "def outer(x):\n    return 2 * inner(x)\n"
CALL = "from outer import outer\nprint(outer(1), sum(outer.stats.cache_hits.values()))"


def test_the_cache_serves_until_what_a_function_calls_has_changed(tmp_path):
    def run():
        output = subprocess.run([sys.executable, "-c", CALL], cwd=tmp_path, capture_output=True, text=True, check=True)
        return output.stdout.split()

    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "inner.py").write_text(INNER.format(1))
    assert run() == ["4", "0"]
    assert run() == ["4", "1"]
    (tmp_path / "inner.py").write_text(INNER.format(2))
    assert run() == ["6", "0"]


def test_who_waits_for_compilation_is_told_once(tmp_path):
    code = "import numpy as np; from omnibal.data.packs import Packs; "
    code += "packs = Packs.from_lists([[0], [1]]); packs.sums(np.arange(2)); packs.take(np.arange(2))"

    def run():
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert run().stderr.count("compiling omnibal's loops") == 1
    assert run().stderr == ""
