# SPDX-License-Identifier: Apache-2.0
"""examples/rag as a user runs it: S3 server, `s3ec precompute`, vLLM server, five questions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ANSWER = re.compile(
    r"^Q: (?P<question>.+)\nA: .*\n(?P<pages>(?:   \[\d\] .+\n)+)"
    r"   sent: (?P<sent>[\d,]+) bytes \(pictures: (?P<pictures>\d+)\)"
    r"(?:; not sent: (?P<saved>[\d,]+) bytes \(pictures: (?P<by_name>\d+)\))?$",
    re.M,
)


def number(text: str | None) -> int:
    return int((text or "0").replace(",", ""))


def test_questions_are_answered_by_name_and_what_the_bucket_lacks_as_a_picture() -> None:
    readme = (ROOT / "examples/rag/README.md").read_text()
    [command] = re.findall(r"^python .+ --tiny$", readme, re.M)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "S3EC_BUCKET": "nobody-uses-this",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *stored, added = ANSWER.finditer(done.stdout)
    assert [answer["pages"].split("\n")[0].strip() for answer in stored] == [
        "[1] pumps.pdf, page 2",
        "[1] pumps.pdf, page 3",
        "[1] trains/timetable.pdf, page 2",
        "[1] garden.pdf, page 1",
    ]
    for answer in stored:
        assert answer["pictures"] == "0"
        assert number(answer["by_name"]) == answer["pages"].count("\n")
        assert number(answer["saved"]) > 20 * number(answer["sent"])
    assert added["pages"].strip() == "[1] notice.pdf, page 1"
    assert (added["pictures"], added["saved"]) == ("1", None)
    assert "the picture of notice.pdf, page 1 is sent" in done.stderr
    assert "server: 6 embeddings from s3ec, 1 pictures encoded" in done.stdout
    not_sent = sum(number(answer["saved"]) for answer in stored)
    assert f"not sent: {not_sent:,} bytes" in done.stdout.splitlines()[-2]
