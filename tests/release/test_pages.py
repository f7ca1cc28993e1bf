# SPDX-License-Identifier: Apache-2.0
"""The shell blocks of README and of the pages, pasted one after the other as a new user would.

Each page is pasted into one shell, in a folder with a copy of the checkout, some pictures and a PDF
file. The environment is a fresh one: what vLLM and s3ec depend on comes from the environment of the
tests, and s3ec is what the README's own command installs. The bucket is a real one. A block whose
first line says what it needs (``tests.support.pages.NEEDS``) is not run. A block that several pages
have is pasted once.

What a user would have otherwise:

* ``pip`` asks no package index, and installs s3ec without its dependencies, which are there.
* The model of the pages is a tiny one of random weights, in a folder of that name.
* An engine on the CPU gets arguments that make it start quickly (``ENGINE``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from s3ec.dev.rigs import vllm_cpu
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
from s3ec.testing.server import LocalS3
from tests.support.checkout import WHEEL, copy_checkout
from tests.support.pages import Block, blocks, pages
from tests.support.pdfs import make_pdf

BUCKET = "embeddings"
MODEL = "google/gemma-3-4b-it"
ENGINE = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 4096,
    "max_num_seqs": 8,
}
# Each is replaced in every block: arguments that only make an engine on two cores start quickly.
SUBSTITUTIONS = {
    r"^(s3ec precompute .*)$": rf"\1 --engine-args '{json.dumps(ENGINE)}'",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("jq") is None or shutil.which("openssl") is None,
        reason="the pages call jq and openssl",
    ),
]


@dataclass(frozen=True)
class Place:
    """A user's machine.

    Attributes:
        folder: Where blocks are pasted: the checkout.
        env: What a shell has.
        pasted: Texts of blocks.
    """

    folder: Path
    env: Mapping[str, str]
    pasted: set[str] = field(default_factory=set)

    def paste(self, page: str, page_blocks: Sequence[Block]) -> None:
        """Paste those blocks of a page that this machine can run.

        Raises:
            pytest.fail.Exception: A command failed; with page and line, and what was printed.
        """
        scripts = self.folder.parent / "blocks" / page.replace("/", "-")
        scripts.mkdir(parents=True)
        lines = ["set -eEuo pipefail", "trap 'echo \"-- failed: $BASH_SOURCE:$LINENO\"' ERR"]
        for block in page_blocks:
            if block.needs or block.text in self.pasted:
                continue
            self.pasted.add(block.text)
            script = scripts / f"line-{block.line}"
            # So that bash counts the lines of the page.
            script.write_text("\n" * (block.line - 1) + substituted(block))
            lines += [f'echo "-- {page}:{block.line} after $SECONDS s"', f"source {script}"]
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-c", "\n".join(lines)],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        (scripts / "printed").write_text(done.stdout)
        if done.returncode:
            failed = re.findall(r"^-- failed: .*:(\d+)$", done.stdout, re.M)
            pytest.fail(
                f"{page}:{failed[0] if failed else '?'} failed\n{done.stdout}", pytrace=False
            )


def substituted(block: Block) -> str:
    """The block with arguments for an engine on this machine; the number of lines stays."""
    text = block.text
    for pattern, replacement in SUBSTITUTIONS.items():
        text = re.sub(pattern, replacement, text, flags=re.M)
    return text


def _environment(folder: Path) -> None:
    """A fresh environment, whose packages but s3ec are those of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    # Lines of the .pth files there are not run: the checkout's own s3ec stays out.
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    # torchvision beside a CPU build of torch, as in the environment of the tests.
    shutil.copyfile(vllm_cpu.__file__, site / "mend_torchvision.py")
    (site / "mend.pth").write_text("import mend_torchvision as m; m.install_here()\n")
    pip = folder / "bin/pip"
    pip.write_text('#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n')
    pip.chmod(0o755)


@pytest.fixture(scope="module")
def place(local_s3: LocalS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A machine on which the README was pasted: s3ec is installed, and the bucket has entries."""
    here = tmp_path_factory.mktemp("user")
    checkout = here / "s3ec"
    copy_checkout(checkout, *WHEEL, "examples", "terraform", "docs", ".gitignore")
    _environment(here / "venv")
    write_pictures(checkout / "pages", 2)
    shutil.copyfile(next((checkout / "pages").iterdir()), checkout / "page.png")
    for folder in (checkout, checkout / "pages"):
        (folder / "report.pdf").write_bytes(make_pdf(2))
    write_gemma3(checkout / MODEL)
    local_s3.create_bucket(BUCKET)
    base = {name: value for name, value in os.environ.items() if not name.startswith("S3EC_")}
    env = engine_env(base | ONE_PROCESS) | local_s3.env()
    # That folder's module is the checkout's; the environment above has its own.
    env["PYTHONPATH"] = ""
    env |= {
        "PATH": f"{here / 'venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(here),
        "AWS_ENDPOINT_URL": local_s3.endpoint_url,
        "S3EC_BUCKET": BUCKET,
        "S3EC_CACHE_DIR": str(here / "tier"),
        "COLUMNS": "100",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this one the other way round
        "PIP_IGNORE_INSTALLED": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    place = Place(checkout, env)
    try:
        place.paste("README.md", blocks("README.md"))
        yield place
    finally:
        local_s3.delete_bucket(BUCKET)


def test_readme_installs_and_fills_a_bucket(place: Place) -> None:
    script = "import json, s3ec; print(s3ec.__file__)"
    found = subprocess.run(
        ["python", "-c", script],
        cwd=place.folder.parent, env=place.env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()).is_relative_to(place.folder.parent / "venv")


@pytest.mark.parametrize("page", [page for page in pages() if page != "README.md"])
def test_page_can_be_pasted(place: Place, page: str) -> None:
    place.paste(page, blocks(page))


def test_a_command_that_fails_is_named_by_page_and_line(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    place = Place(tmp_path / "checkout", os.environ)
    good, bad = Block("a.md", 3, "true\n", ()), Block("a.md", 7, "echo hello\nfalse | cat\n", ())
    unable = Block("a.md", 5, "false\n", ("a GPU",))
    place.paste("b.md", [good, unable])
    with pytest.raises(pytest.fail.Exception, match=r"^a.md:8 failed\n(.*\n)*hello\n"):
        place.paste("a.md", [good, unable, bad])
