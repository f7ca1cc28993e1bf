# SPDX-License-Identifier: Apache-2.0
"""Store commands where torch and vLLM are not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.cli.corpus import MODEL, Corpus, content_hash

# Fails the import as an absent package does, and any look for it as a strict hook does.
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from s3ec.cli import main
main()
"""


def run(*args: str, code: int = 0) -> str:
    out = subprocess.run(
        [sys.executable, "-c", BLOCKED, *args], capture_output=True, text=True, check=False
    )
    assert out.returncode == code, out.stderr
    assert "Traceback" not in out.stderr
    return out.stdout


def test_store_commands_work_without_torch_and_vllm(corpus: Corpus, tmp_path: Path) -> None:
    name = corpus.namespace(MODEL)
    identifier = content_hash("a")
    blob = corpus.entry(name, identifier)
    assert json.loads(run("ns", "--json"))["namespaces"][0]["namespace"] == name
    assert json.loads(run("ls", "--json"))["entries"][0]["label"] == identifier
    assert json.loads(run("stat", identifier[:8], "--verify", "--json"))["verified"]
    run("get", identifier, "-o", str(tmp_path / "f"))
    assert (tmp_path / "f").read_bytes() == blob
    assert name in run("ls", "-n", name[:5], "--json")
    run("stat", content_hash("b"), code=1)
    checks = {c["name"]: c for c in json.loads(run("doctor", "--json"))["checks"]}
    assert checks["vllm"]["verdict"] == "warn"
    assert "not installed" in checks["vllm"]["found"]
    assert name in checks["corpus"]["found"]


def test_a_model_cannot_be_described_without_vllm(corpus: Corpus) -> None:
    document = json.loads(run("doctor", "--json", "--", "--model", "acme/vision", code=1))
    checks = {c["name"]: c["verdict"] for c in document["checks"]}
    assert checks["model"] == "fail"
    assert checks["namespace"] == "skip"
