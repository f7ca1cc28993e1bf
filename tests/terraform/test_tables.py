# SPDX-License-Identifier: Apache-2.0
"""READMEs of modules and examples say what their files say; needs no Terraform."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.terraform.cases import SOURCE
from tests.terraform.tables import FOLDERS, with_tables


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_readme_has_the_tables_of_its_files(folder: Path) -> None:
    expected = with_tables(folder)
    assert (folder / "README.md").read_text() == expected, "python -m tests.terraform.tables"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_miss_no_block(folder: Path) -> None:
    text = with_tables(folder)
    for name in ("variables.tf", "outputs.tf"):
        blocks = re.findall(r'^(?:variable|output) "(\w+)"', (folder / name).read_text(), re.M)
        assert blocks
        for block in blocks:
            assert f"| `{block}` |" in text


def test_terraforms_readme_and_changelog_name_every_folder() -> None:
    readme = (SOURCE / "README.md").read_text()
    changelog = (SOURCE / "CHANGELOG.md").read_text()
    for folder in FOLDERS:
        assert f"`{folder.name}`" in readme or f"modules/{folder.name}`" in readme
        assert f"`{folder.name}`" in changelog
