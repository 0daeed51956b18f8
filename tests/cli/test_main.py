"""The command itself: its help, its version, and verbs that it imports when they run."""

from importlib import import_module
from importlib.metadata import version

import pytest

from omnibal.cli.main import MOVED, VERBS


def test_help_names_every_verb_with_the_first_line_of_its_docstring(omnibal):
    text = " ".join(omnibal("--help").output.replace("│", " ").split())
    assert text == " ".join(omnibal("-h").output.replace("│", " ").split())
    for verb in VERBS:
        first_line = getattr(import_module(f"omnibal.cli.{VERBS[verb]}"), verb.replace("-", "_")).__doc__.splitlines()[
            0
        ]
        assert f"{verb} {first_line}" in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(omnibal, verb):
    assert omnibal(verb, "-h").output == omnibal(verb, "--help").output != omnibal("-h").output


def test_the_version_is_that_of_the_package(omnibal):
    assert omnibal("--version").output == f"omnibal {version('omnibal')}\n"


def test_a_verb_that_is_not_there(omnibal):
    assert "Did you mean 'plan'?" in omnibal("plna", exit_code=2).output


def test_a_verb_of_before_says_what_to_type(refusal):
    for verb, today in MOVED.items():
        assert refusal(verb, "plan.json", "--steps", 3) == f"{verb} is no command any more; use {today}"
    assert MOVED["partition"] == "omnibal plan CONFIG --explain"
