# SPDX-License-Identifier: Apache-2.0
"""What the documents say stands in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from s3ec.settings import Settings, settings_table

ROOT = Path(__file__).parents[2]
VERSIONS = "docs/vllm-versions.md"
DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/cli.md",
    "docs/python.md",
]


def test_readme_settings_table_is_the_one_made_from_the_code() -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- settings:.*?-->\n(.*?)<!-- /settings -->", readme, re.DOTALL)
    assert found is not None
    assert found.group(1) == settings_table()


def test_readme_names_only_metrics_that_exist() -> None:
    code = (ROOT / "s3ec/connector/stats.py").read_text()
    defined = set(re.findall(r'"vllm:s3ec(_[a-z_]+)"', code))
    paragraph = re.search(r"\* \*\*Metrics\*\*.*?(?=\n\* )", (ROOT / "README.md").read_text(), re.S)
    assert paragraph is not None
    named = set(re.findall(r"`(?:vllm:s3ec)?(_[a-z_]+)", paragraph.group()))
    assert named
    assert named <= defined


@pytest.mark.parametrize("document", [*DOCUMENTS, VERSIONS])
def test_documents_link_only_to_files_that_exist(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_every_supported_release_of_vllm_was_run_or_is_said_to_be_read_only() -> None:
    code = (ROOT / "s3ec/connector/compat.py").read_text()
    supported = re.findall(r"^(?:OLDEST|NEWEST_TESTED) = \(0, (\d+)\)", code, re.M)
    oldest, newest = map(int, supported)
    rows = dict(
        re.findall(r"^\| 0\.(\d+)\.0 \| (run|read) \|", (ROOT / VERSIONS).read_text(), re.M)
    )
    assert list(map(int, rows)) == list(range(oldest, newest + 1))


def test_documents_name_only_modules_that_exist() -> None:
    text = "".join((ROOT / document).read_text() for document in [*DOCUMENTS, VERSIONS])
    for name in set(re.findall(r"`((?:s3ec|tests)/[\w/.]+\.py)`", text)):
        assert (ROOT / name).is_file(), name


def test_every_setting_has_a_description_that_ends_like_a_sentence() -> None:
    for name, field in Settings.model_fields.items():
        assert (field.description or "").endswith((".", "only.")), name
