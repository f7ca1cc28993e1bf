# SPDX-License-Identifier: Apache-2.0
"""The modules plan what they promise, with a mocked provider."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.terraform.cases import HOW, PLUGINS, SOURCE, Provider, Terraform, copy

pytestmark = [
    pytest.mark.terraform,
    pytest.mark.slow,
    pytest.mark.skipif(PLUGINS is None, reason=HOW),
]
FOLDERS = sorted(str(path.parent.relative_to(SOURCE)) for path in SOURCE.glob("*/*/main.tf"))
COMPATIBLE = ("modules/s3-compatible-bucket", "examples/minio")
NO_PROVIDER = ("modules/transfer-config",)
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
    assert len(FOLDERS) == 12
    for folder in FOLDERS:
        missing = PARTS - {path.name for path in (SOURCE / folder).iterdir()}
        assert not missing, f"{folder} has no {missing}"


@pytest.mark.parametrize(
    ("asked", "of"),
    [
        ('">= 5.86, < 7"', lambda name: name not in (*COMPATIBLE, *NO_PROVIDER)),
        # From 6.23 on the provider asks S3 Control for a bucket's tags.
        ('">= 5.86, < 6.23"', lambda name: name in COMPATIBLE),
    ],
)
def test_folders_ask_for_the_provider_that_they_can_live_with(
    asked: str, of: Callable[[str], bool]
) -> None:
    texts = {(SOURCE / folder / "versions.tf").read_text() for folder in FOLDERS if of(folder)}
    assert len(texts) == 1
    assert f"version = {asked}" in texts.pop()


def test_nothing_is_used_that_provider_6_warns_of() -> None:
    # `aws_region` has no attribute that both know and 6.x does not call deprecated.
    for path in SOURCE.glob("*/*/*.tf"):
        assert "aws_region" not in path.read_text().replace("`data.aws_region`", ""), path


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
