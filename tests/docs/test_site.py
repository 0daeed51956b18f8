"""The site is built, its pictures are small, and what is generated in it is whole."""

import json
import re
import sys
import warnings
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from sphinx.application import Sphinx
from typer.main import get_command

from omnibal.cli.main import MOVED, VERBS, app
from omnibal.config.section import OmnibalSection
from omnibal.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
MOST_BYTES = 60_000


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages' text by name; every warning of Sphinx is an error."""
    folder, said = tmp_path_factory.mktemp("site"), StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Sphinx's extensions about Sphinx
        patch.setattr(sys, "path", [*sys.path])  # conf.py puts folders in front
        # In this process, which has imported what docstrings are read from.
        made = Sphinx(DOCS, DOCS, folder, folder / ".doctrees", "html", status=None, warning=said, warningiserror=True)
        made.build()
    assert made.statuscode == 0, said.getvalue()
    return {path.stem: path.read_text() for path in [*folder.glob("*.html"), folder / "results.json"]}


def plain(cell):
    return re.sub("<.*?>", "", cell).strip()


def test_every_page_is_built_and_every_picture_is_there(site):
    assert {path.stem for path in DOCS.glob("*.md")} < set(site)
    for name in ("packs", "step", "pipeline", "recompute"):
        assert f'src="_images/{name}.png"' in site["start"]


def test_tables_of_all_reports_are_there_to_be_read_by_programs(site):
    reports = {table["report"] for table in json.loads(site["results"])}
    assert {str(path.relative_to(DOCS.parent)) for path in DOCS.parent.glob("tools/*/RESULTS.md")} < reports


def test_every_key_of_a_ds_config_is_told(site):
    def keys(section):
        for name, field in section.model_fields.items():
            kinds = (field.annotation, *get_args(field.annotation))
            inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
            yield from [name] if inner is None else keys(inner)

    rows = re.findall("<tr.*?</tr>", site["pipeline"].split('id="keys-of-the-omnibal-section"')[1], re.DOTALL)
    cells = [re.findall("<td>(.*?)</td>", row, re.DOTALL) for row in rows]
    told = [(plain(row[0]), plain(row[-1])) for row in cells if len(row) == 4]
    assert sorted(keys(OmnibalSection)) == sorted(key for key, _ in told)
    assert [key for key, meaning in told if not meaning] == []


def test_every_command_is_told(site):
    headings = re.findall('<h2><code class="docutils literal notranslate"><span class="pre">omnibal</span> '
                          '<span class="pre">(.*?)</span>', site["cli"])  # fmt: skip
    assert headings == list(VERBS)


@pytest.mark.parametrize("page", [*DOCS.glob("*.md"), *DOCS.parent.glob("*.md"), *DOCS.parent.glob("ds_configs/*.md")])
def test_options_of_commands_exist(page):
    group = get_command(app)
    commands = {verb: group.get_command(None, verb).params for verb in VERBS}
    text = page.read_text()
    for verb, line in re.findall(r"\bomnibal ([a-z]+)((?:\\\n|[^`\n])*)", text):
        known = {name for option in commands.get(verb, ()) for name in (*option.opts, *option.secondary_opts)}
        assert verb not in VERBS or {*re.findall(r"(?<!\S)--[a-z-]+", line)} <= known | {"--help"}, (verb, line)
    typed = {*re.findall(r"(?:`|^ {4})omnibal ([a-z][a-z-]*)", text, re.MULTILINE)}
    printed = {"over"}  # the headline of advise
    assert typed - printed <= {*VERBS} | ({*MOVED} if page.name == "CHANGELOG.md" else set())


NAMES = re.findall("^- `(omnibal.*?)`: ", (DOCS / "api.md").read_text(), re.MULTILINE)


def test_every_name_of_the_reference_is_where_it_says():
    assert len(NAMES) > 30
    for name in NAMES:
        module, _, last = name.rpartition(".")
        assert getattr(import_module(module), last).__doc__, name


def test_every_name_of_the_reference_has_its_docstring(site):
    for name in NAMES:
        assert f'id="{name}"' in site["api"], name


def test_every_family_is_told():
    text = (DOCS / "models.md").read_text()
    assert [model_type for model_type in FAMILIES if f"`{model_type}`" not in text] == []


def test_what_is_said_of_models_is_held_by_tests_that_exist():
    rows = re.findall(
        r"^\|.*`(tests/.*?\.py)::(test_\w+)` \|$", (DOCS.parent / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 15
    for file, name in rows:
        assert f"\ndef {name}(" in (DOCS.parent / file).read_text(), (file, name)


def test_pictures_are_small():
    for path in (DOCS / "pictures").glob("*.png"):
        assert path.stat().st_size < MOST_BYTES, path
