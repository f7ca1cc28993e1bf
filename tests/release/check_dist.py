# SPDX-License-Identifier: Apache-2.0
"""Check a wheel and a source archive before they are published; `make dist` runs it.

    python -m tests.release.check_dist FOLDER

It needs hatchling and packaging, and not s3ec itself. The first thing that is wrong ends it.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ENTRY_POINTS = {
    "console_scripts": {"s3ec": "s3ec.cli:main"},
    "vllm.general_plugins": {"s3ec": "s3ec.connector.plugin:register"},
}


class WrongDistError(Exception):
    """The archives must not be published; the message says why."""


def check(folder: Path) -> str:
    """Check the archives of a folder; return their version.

    Raises:
        WrongDistError: Something is wrong with them.
    """
    wheel, archive = _only(folder, "*.whl"), _only(folder, "*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        inside = {info.filename: file.read(info) for info in file.infolist()}
    with tarfile.open(archive) as tar, tempfile.TemporaryDirectory() as scratch:
        tar.extractall(scratch, filter="data")
        source = _only(Path(scratch), "*")
        version = _check_metadata(wheel.name, _metadata_of(inside))
        if _check_metadata(archive.name, (source / "PKG-INFO").read_bytes()) != version:
            raise WrongDistError("wheel and source archive have different versions")
        _check_version(source, version)
        _check_content(inside, f"s3ec-{version}.dist-info")
        _check_rebuild(source, wheel, Path(scratch))
    return version


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise WrongDistError(f"{len(found)} files are {pattern}, not one")
    return found[0]


def _metadata_of(inside: dict[str, bytes]) -> bytes:
    return next(body for name, body in inside.items() if name.endswith(".dist-info/METADATA"))


def _check_metadata(where: str, text: bytes) -> str:
    """Check what an index would check; return the version."""
    metadata = Metadata.from_email(text, validate=True)  # raises for whatever an index refuses
    wanted = {
        "name": metadata.name == "s3ec",
        "summary": bool(metadata.summary),
        "a README in Markdown": metadata.description_content_type == "text/markdown"
        and bool(metadata.description),
        "license Apache-2.0": metadata.license_expression == "Apache-2.0",
        "license file": metadata.license_files == ["LICENSE"],
    }
    missing = [what for what, is_there in wanted.items() if not is_there]
    if missing:
        raise WrongDistError(f"the metadata of {where} lack: {', '.join(missing)}")
    return str(metadata.version)


def _check_version(source: Path, version: str) -> None:
    """Compare with the code and with the first dated heading of the changelogs."""
    code = re.search(r'^__version__ = "(.+)"$', (source / "s3ec/__init__.py").read_text(), re.M)
    said = {"s3ec/__init__.py": code and code[1]}
    for name in ("CHANGELOG.md", "terraform/CHANGELOG.md"):
        heading = re.search(r"^## (\S+) - \d{4}-\d\d-\d\d$", (source / name).read_text(), re.M)
        said[name] = heading and heading[1]
    for name, other in said.items():
        if other != version:
            raise WrongDistError(f"the archives have version {version}, and {name} has {other}")


def _check_content(inside: dict[str, bytes], dist_info: str) -> None:
    """Check that a wheel holds the package alone, its entry points, and what RECORD says."""
    foreign = [
        name
        for name in inside
        if name.partition("/")[0] not in ("s3ec", dist_info) or name.startswith("s3ec/dev/")
    ]
    if foreign:
        raise WrongDistError(f"the wheel holds what is no part of the package: {foreign[:5]}")
    parser = configparser.ConfigParser()
    parser.read_string(inside[f"{dist_info}/entry_points.txt"].decode())
    if {name: dict(parser[name]) for name in parser.sections()} != ENTRY_POINTS:
        raise WrongDistError(f"the wheel has other entry points: {parser.sections()}")
    record = csv.reader(inside[f"{dist_info}/RECORD"].decode().splitlines())
    sums = {name: f"sha256={_sum(body)}" for name, body in inside.items()}
    sums[f"{dist_info}/RECORD"] = ""
    if {name: digest for name, digest, _ in record} != sums:
        raise WrongDistError("the wheel's RECORD is not that of its files")


def _sum(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")


def _check_rebuild(source: Path, wheel: Path, scratch: Path) -> None:
    """Check that the source archive builds the same wheel, byte for byte."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(scratch)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongDistError(f"the source archive does not build: {done.stderr[-2000:]}")
    if _only(scratch, "*.whl").read_bytes() != wheel.read_bytes():
        raise WrongDistError(
            "the source archive builds another wheel"
            if "SOURCE_DATE_EPOCH" in os.environ
            else "set SOURCE_DATE_EPOCH as for the build"
        )


if __name__ == "__main__":
    try:
        sys.stdout.write(f"dist: s3ec {check(Path(sys.argv[1]))} may be published\n")
    except WrongDistError as exc:
        sys.exit(f"dist: {exc}")
