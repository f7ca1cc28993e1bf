# SPDX-License-Identifier: Apache-2.0
"""Fuzz the readers with atheris: ``python -m tests.fuzz.run [--seconds N] [TARGET...]``.

``python -m tests.fuzz.run scheduler [--seeds 0-300]`` runs random lives of an engine instead, which
need no atheris.

Each target runs in a process of its own, one after another. What raises is left in its folder of
``tests/fuzz/corpus`` under the name that libFuzzer gives it (``crash-...``, ``timeout-...``,
``oom-...``), where ``make test`` tries it from then on; what is merely new goes to ``build/fuzz``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORPUS = HERE / "corpus"
FOUND = ROOT / "build" / "fuzz"
# Words of our formats, which random changes of bytes would hardly come upon.
DICTIONARY = (
    *("__metadata__", "ec_cache", "dtype", "shape", "data_offsets", "BF16", "F16", "F32", "U8"),
    *("U32", "U64", "s3ec", "namespace", "identifier", "xxh3", "header_xxh3", "placeholder"),
    *("entries", "of", "fences", "filter", "digest_hi", "digest_lo", "read"),
    *("format", "version", "rows", "width", "nbytes", "rows-2", "overlay-3"),
    *("uuid", "multi_modal_uuids", "mm_hashes", "messages", "content", "tool_use", "input", "type"),
    *("null", "true", "1e999", "NaN", "-1", "281474976710656", "18446744073709551616", "../"),
    *("s3://", "gs://", "file:///", "env:", "file:/", "http://", "renderer0-mm-1-image-0"),
)


def main() -> int:
    """Run some targets; the exit status is 1 where one of them found something."""
    if sys.argv[1:2] == ["scheduler"]:
        return _run_scheduler(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        fuzz(given.targets[0], given.seconds)
        return 0
    from tests.fuzz.targets import TARGETS

    unknown = set(given.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}; {', '.join(TARGETS)}")
    chosen = given.targets or list(TARGETS)
    seconds = max(1, given.seconds // len(chosen))
    failed = [name for name in chosen if not _fuzz_apart(name, seconds)]
    print(f"fuzzed {len(chosen)} targets for {seconds} s each; failed: {failed or 'none'}")
    return 1 if failed else 0


def _run_scheduler(arguments: list[str]) -> int:
    """Run seeds, each the same in every process: sets of names have an order then."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.fuzz.run", "scheduler", *arguments]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    from tests.fuzz.scheduler import main

    return main(arguments)


def _fuzz_apart(name: str, seconds: int) -> bool:
    """Fuzz one target in a child; whether it found nothing."""
    before = set(os.listdir(CORPUS / name))
    command = [sys.executable, "-m", "tests.fuzz.run", "--child", "--seconds", str(seconds), name]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("S3EC_")}
    status = subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode
    for new in sorted(set(os.listdir(CORPUS / name)) - before):
        print(f"{name}: found {CORPUS / name / new}")
    return status == 0


def fuzz(name: str, seconds: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    try:
        import atheris
    except ImportError:
        sys.exit("fuzz: needs atheris, which has wheels for Linux (requirements/test.txt)")

    with atheris.instrument_imports(include=["s3ec", "json"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS

    own = FOUND / name
    own.mkdir(parents=True, exist_ok=True)
    words = FOUND / "words.dict"
    words.write_text("".join(f'"{word}"\n' for word in DICTIONARY))
    options = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=0",
        f"-dict={words}",
        f"-artifact_prefix={CORPUS / name}/",
    ]
    atheris.Setup([*options, str(own), str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
