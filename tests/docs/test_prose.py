"""Pages are short, and written in plain sentences; so are messages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "ds_configs/README.md"]
PAGES.append(ROOT / "omnibal/data/balance/ALGORITHM.md")
MOST_WORDS, MOST_WORDS_A_PAGE, MOST_WORDS_A_SENTENCE = 20_000, 1_800, 25
FILLERS = re.compile(r"\b(?:of theirs|of yours|so many|as much as|those that|a further|in turn)\b")
BANNED = re.compile(rf"(?:(?<=[.:;!?] )|^)Where \w|{FILLERS.pattern}", re.MULTILINE)


def prose(page):
    """A page without its code and what is generated."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)


def sentences(page):
    """The sentences of paragraphs and lists; code within a sentence is one word."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose(page))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)", re.sub(r"`[^`]*`", "X", text)):
        if not block.lstrip().startswith(("|", "#")):
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(block.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_is_short_and_says_one_thing_a_sentence(page):
    assert len(prose(page).split()) <= MOST_WORDS_A_PAGE
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > MOST_WORDS_A_SENTENCE] == []
    assert BANNED.findall(prose(page)) == []


def test_all_pages_together_are_read_in_an_evening():
    assert sum(len(prose(page).split()) for page in PAGES) <= MOST_WORDS


def test_messages_say_what_they_name():
    found = {}
    for path in (ROOT / "omnibal").rglob("*.py"):
        tree = ast.parse(path.read_text())
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found |= {node.value: path.name for node in texts if id(node) not in told and FILLERS.search(node.value)}
    assert found == {}


def messages_in(code):
    """Texts of a module, with an ellipsis for what is filled in."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_on_the_page_are_those_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    section = re.search(r"\n## Messages of `balance`\n.*?(?=\n## )", page, re.DOTALL)[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    told = [message for row in rows for message in re.findall(r"`(.+?)`", row)]
    known = {text for path in (ROOT / "omnibal").rglob("*.py") for text in messages_in(path.read_text())}
    patterns = {message: ".*?".join(map(re.escape, message.split("…"))) for message in told}
    assert len(told) > 20
    assert [message for message in told if not any(re.search(patterns[message], text) for text in known)] == []


def test_texts_of_code_are_found_with_gaps():
    assert [*messages_in("print(f'{n} samples ' 'exceed', 'a')")][:2] == ["… samples exceed", "a"]


def test_sentences_are_found_as_they_stand(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\nOne `two three` [four](five six). Seven.\n\n    code of many words\n\n- a\n- b; c\n")
    assert [*sentences(page)] == ["One X four.", "Seven.", "- a", "- b;", "c"]
    assert BANNED.findall("It goes. Where it stops, all stop as much as they can.") == ["Where i", "as much as"]
