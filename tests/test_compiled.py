"""Compiled functions are read from the cache until a file of their folder changes."""

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
