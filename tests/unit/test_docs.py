# SPDX-License-Identifier: Apache-2.0
"""What the documents say stands in the code, and what they link to is there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from docs.site_links import OUTSIDE, rewritten
from s3ec.cli.app import app
from s3ec.settings import Settings
from tests import docs_pages
from tests.support import pages

ROOT = Path(__file__).parents[2]
VERSIONS = "docs/vllm-versions.md"
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", *OUTSIDE, *PAGES]
# What is to be read in one sitting.
LONGEST = {"README.md": 120, "ARCHITECTURE.md": 130}


def prose(document: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.S | re.M)


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of the headings; Zensical checks those of the site."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.M)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {each.replace(" ", "-") for each in words}


def blocks(document: str) -> Iterator[str]:
    """The lines of all shell blocks, continued ones joined."""
    for block in re.findall(r"^```bash\n(.*?)^```$", (ROOT / document).read_text(), re.S | re.M):
        yield from block.replace("\\\n", " ").splitlines()


# -- the pages themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted({page for page, _ in docs_pages.MADE}))
def test_tables_are_the_ones_made_from_the_code(page: str) -> None:
    assert (ROOT / "docs" / page).read_text() == docs_pages.with_tables(page), "make docs"


@pytest.mark.parametrize("document", LONGEST)
def test_first_pages_stay_short(document: str) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= LONGEST[document]


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", *PAGES])
def test_lines_of_prose_are_at_most_100_columns_wide(document: str) -> None:
    lines = [line for line in prose(document).splitlines() if not line.startswith(("|", "Also: "))]
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", *PAGES])
def test_no_page_has_a_heading_twice_or_a_table_without_a_line_below_its_headings(
    document: str,
) -> None:
    headings = re.findall(r"^#+ +.+$", prose(document), re.M)
    assert sorted(headings) == sorted(set(headings))
    for table in re.findall(r"(?:^\|.*\n)+", prose(document), re.M):
        assert re.match(r"\|.*\n\|[-|]+\n\|", table), table


def test_every_page_is_on_the_site_and_in_the_list_of_pages() -> None:
    nav = json.dumps(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES:
        name = Path(page).name
        assert f'"{name}"' in nav
        assert name == "index.md" or f"({name})" in index


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_say_what_they_need_in_the_same_words(document: str) -> None:
    pages.blocks(document)


@pytest.mark.parametrize("page", pages.pages())
def test_every_block_is_one_that_is_pasted(page: str) -> None:
    """tests/release/test_pages.py pastes those that need nothing."""
    assert not re.findall(r"^ +```bash", (ROOT / page).read_text(), re.M)


def test_nothing_says_to_install_a_name_that_is_on_no_index() -> None:
    """s3ec is on none: what lacks is named by its own packages."""
    said = re.compile(r"""pip install (?:-\S+ )*['"]?s3ec\b|s3ec\[[a-z]""")
    files = [ROOT / document for document in DOCUMENTS]
    files += (ROOT / "s3ec").rglob("*.py")
    assert [str(path) for path in files if said.search(path.read_text())] == []


# -- links -------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings_that_exist(document: str) -> None:
    path = ROOT / document
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)", prose(document)):
        found = path.parent / target if target else path
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), f"{target}#{anchor}"


def test_links_of_the_site_are_those_of_the_checkout() -> None:
    for name in OUTSIDE:
        assert (ROOT / name).is_file()
    pages = {"a.md", "b.md", "SECURITY.md", "examples/compose/README.md"}
    assert rewritten("[x](b.md#y)", "a.md", pages) == "[x](b.md#y)"
    assert rewritten("[x](../SECURITY.md#y)", "a.md", pages) == "[x](SECURITY.md#y)"
    assert rewritten("[x](docs/a.md)", "SECURITY.md", pages) == "[x](a.md)"
    deep = "examples/compose/README.md"
    assert rewritten("[x](../../SECURITY.md)", deep, pages) == "[x](../../SECURITY.md)"
    assert rewritten("[x](../s3ec/node.py)", "a.md", pages) == "x"
    assert rewritten("[x](https://example.org/a)", "a.md", pages) == "[x](https://example.org/a)"


def test_readme_and_deployment_give_the_same_commands() -> None:
    said = [
        {block.text for block in pages.blocks(document)}
        for document in ("README.md", "docs/deployment.md")
    ]
    for command in ("pip install", "vllm serve", "s3ec doctor"):
        same = said[0] & said[1]
        assert [one for one in same if re.match(f"(# needs .+\n)?{command}", one)], command


def test_example_of_the_readme_pays_and_has_the_settings_that_advise_recommends() -> None:
    text = (ROOT / "README.md").read_text()
    [asked] = re.findall(r"^s3ec (advise .*)$", text, re.M)
    [model] = re.findall(r"^vllm serve (\S+) ", text, re.M)
    assert model in asked
    found = json.loads(CliRunner().invoke(app, [*shlex.split(asked), "--json"]).stdout)
    assert {one["verdict"] for one in found["verdicts"].values()} == {"yes"}
    [settings] = re.findall(r'"ec_connector_extra_config": (\{.*?\})', text)
    place = {"bucket", "region"}
    assert {k: v for k, v in json.loads(settings).items() if k not in place} == found["settings"]


# -- what they say about the code --------------------------------------------------------------


def test_every_supported_release_of_vllm_was_run_or_is_said_to_be_read_only() -> None:
    code = (ROOT / "s3ec/connector/compat.py").read_text()
    supported = re.findall(r"^(?:OLDEST|NEWEST_TESTED) = \(0, (\d+)\)", code, re.M)
    oldest, newest = map(int, supported)
    rows = dict(
        re.findall(r"^\| 0\.(\d+)\.0 \| (run|read) \|", (ROOT / VERSIONS).read_text(), re.M)
    )
    assert list(map(int, rows)) == list(range(oldest, newest + 1))


def test_documents_name_only_modules_that_exist() -> None:
    text = "".join((ROOT / document).read_text() for document in DOCUMENTS)
    for name in set(re.findall(r"`((?:s3ec|tests)/[\w/.]+\.py)`", text)):
        assert (ROOT / name).is_file(), name


def test_architecture_says_where_to_look() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where to look")[2]
    rows = re.findall(r"^\| .+ \| `(s3ec[\w/]*)` \| (.+) \|$", table, re.M)
    assert len(rows) > 10
    for package, files in rows:
        for name in re.findall(r"`([\w.]+)`", files):
            assert (ROOT / package / name).is_file(), f"{package}/{name}"


def test_documents_name_only_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    made = set(re.findall(r"`vllm:(s3ec_\w+?)(?:_total)?[{`]", page))
    assert len(made) > 40
    for document in ["README.md", *PAGES]:
        for name in re.findall(r"`(?:vllm:)?(s3ec_[a-z_]+)[{`]", prose(document)):
            assert name.removesuffix("_total") in made, f"{name} in {document}"


def test_documents_name_only_settings_that_exist() -> None:
    known = set(Settings.model_fields)
    examples = [path for folder in ("examples", "docker") for path in (ROOT / folder).rglob("*")]
    files = [str(path.relative_to(ROOT)) for path in examples if path.is_file()]
    for document in ["README.md", *PAGES, *(one for one in files if not one.endswith(".pyc"))]:
        text = (ROOT / document).read_text()
        for text_of_one in re.findall(r'"ec_connector_extra_config": (\{[^{}]*\})', text):
            assert set(json.loads(text_of_one)) <= known
        for line in blocks(document):
            for text_of_one in re.findall(r"--config '(\{.*?\})'", line):
                assert set(json.loads(text_of_one)) <= known
        for name in re.findall(r"\bS3EC_([A-Z_]+)\b", text):
            # The last two are the middleware's, which is not the engine.
            other = {"NAME", "CONFIG", "NAMESPACE", "MAX_REQUEST_BYTES"}
            assert name in other or name.startswith("TEST_") or name.lower() in known, name


def test_every_setting_has_a_description_that_ends_like_a_sentence() -> None:
    for name, field in Settings.model_fields.items():
        assert (field.description or "").endswith((".", "only.")), name


def command_of(words: list[str]) -> tuple[Any, Any]:
    """The command that a line calls, and its context."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="s3ec")
    for word in words:
        below = getattr(command, "get_command", lambda _context, _word: None)(context, word)
        if below is None:
            break
        command, context = below, below.context_class(below, info_name=word, parent=context)
    return command, context


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shell_blocks_call_commands_and_targets_that_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in blocks(document):
        if found := re.match(r"make ([a-z-]+)", line):
            assert found[1] in targets, line
        if not line.startswith("s3ec "):
            continue
        words = shlex.split(line, comments=True)[1:]
        words = words[: words.index("--")] if "--" in words else words
        command, context = command_of(words)
        assert (
            not hasattr(command, "commands")
            or not words[0].startswith("-")
            or (words == ["--version"])
        ), line
        options = {name for each in command.get_params(context) for name in each.opts}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= options, line
