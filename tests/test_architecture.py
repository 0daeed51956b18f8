"""Rules about the code itself that no linter holds."""

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

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
    # Consecutive tensor ranks have the same head of keys; neither stage nor replica follows from that.
    assert {file for file, lines in found.items() if lines} == {"cluster.py", "families/parts.py", "vlm/tensor.py"}


def test_no_class_name_stands_for_two_things():
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_module_is_imported_by_what_it_imports():
    """Also by none that it imports late, inside a function; what a package's __init__ hands out does not count."""
    graph = grimp.build_graph("omnibal", cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter({module: found - {"omnibal"} for module, found in imports.items()}).prepare()
