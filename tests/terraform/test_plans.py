# SPDX-License-Identifier: Apache-2.0
"""The modules plan what they promise, with a mocked provider."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.terraform.cases import HOW, PLUGINS, SOURCE, Provider, Terraform, copy

pytestmark = [
    pytest.mark.terraform,
    pytest.mark.slow,
    pytest.mark.skipif(PLUGINS is None, reason=HOW),
]
FOLDERS = sorted(str(path.parent.relative_to(SOURCE)) for path in SOURCE.glob("*/*/main.tf"))
PARTS = {"main.tf", "variables.tf", "outputs.tf", "versions.tf", "tests"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("terraform") / "terraform")


@pytest.fixture(scope="module")
def provider(tree: Path) -> Iterator[Provider]:
    folder = tree / "examples" / "single-region"
    Terraform(folder).init()
    with Provider(folder) as running:
        yield running


def test_every_file_is_formatted(tree: Path) -> None:
    Terraform(tree).run("fmt", "-check", "-recursive", "-diff")


def test_every_module_and_example_has_all_of_its_parts() -> None:
    assert len(FOLDERS) == 9
    for folder in FOLDERS:
        missing = PARTS - {path.name for path in (SOURCE / folder).iterdir()}
        assert not missing, f"{folder} has no {missing}"


def test_every_folder_asks_for_the_same_provider() -> None:
    # So that the one `init` that compares versions does so for all.
    assert len({(SOURCE / folder / "versions.tf").read_text() for folder in FOLDERS}) == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_plans_hold_with_a_mocked_provider(tree: Path, provider: Provider, folder: str) -> None:
    here = Terraform(tree / folder, provider=provider)
    here.init()
    # Of modules, which have no provider block, `test` validates before each run all there is.
    if folder.startswith("examples/"):
        here.run("validate")
    summary = json.loads(here.run("test", "-json").stdout.splitlines()[-1])["test_summary"]
    assert summary["status"] == "pass"
    assert summary["passed"] > 0
    assert summary["skipped"] == 0
