# SPDX-License-Identifier: Apache-2.0
"""The modules plan what they promise, with a mocked provider."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.terraform.cases import HOW, PLUGINS, SOURCE, Terraform, copy

pytestmark = [
    pytest.mark.terraform,
    pytest.mark.slow,
    pytest.mark.skipif(PLUGINS is None, reason=HOW),
]
FOLDERS = sorted(
    str(path.parent.relative_to(SOURCE)) for path in SOURCE.glob("*/*/main.tf")
)
PARTS = {"main.tf", "variables.tf", "outputs.tf", "versions.tf", "tests"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("terraform") / "terraform")


def test_every_file_is_formatted(tree: Path) -> None:
    Terraform(tree).run("fmt", "-check", "-recursive", "-diff")


def test_every_module_and_example_has_all_of_its_parts() -> None:
    assert len(FOLDERS) == 9
    for folder in FOLDERS:
        missing = PARTS - {path.name for path in (SOURCE / folder).iterdir()}
        assert not missing, f"{folder} has no {missing}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_plans_hold_with_a_mocked_provider(tree: Path, folder: str) -> None:
    here = Terraform(tree / folder)
    here.init()
    here.run("validate")
    summary = json.loads(here.run("test", "-json").stdout.splitlines()[-1])["test_summary"]
    assert summary["status"] == "pass"
    assert summary["passed"] > 0
    assert summary["skipped"] == 0
