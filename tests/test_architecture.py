"""Rules about the code itself that no linter holds."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "omnibal"
RANKS = frozenset({"rank", "global_rank", "get_rank", "local_rank", "num_processes"})
"""What only `Layout` divides into stages, replicas and tensor ranks."""


def divided_ranks(source):
    """Lines that divide a rank, or take its remainder."""
    for node in ast.walk(ast.parse(source)):
        divided = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv):
            divided = [node.left]
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "divmod":
            divided = node.args[:1]
        names = {getattr(part, "id", getattr(part, "attr", None)) for left in divided for part in ast.walk(left)}
        if names & RANKS:
            yield node.lineno


def test_a_divided_rank_is_found():
    assert [*divided_ranks("stage, replica = divmod(rank, n)\na = dist.get_rank() % n\nb = rank - n % 2")] == [1, 2]


def test_only_the_layout_divides_ranks():
    found = {path.relative_to(PACKAGE).as_posix(): [*divided_ranks(path.read_text())] for path in PACKAGE.rglob("*.py")}
    assert {file for file, lines in found.items() if lines} == {"cluster.py"}
