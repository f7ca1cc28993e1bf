# SPDX-License-Identifier: Apache-2.0
"""The blocks of examples/minio/README.md, pasted into one shell, with SeaweedFS as MinIO.

Docker and the engine are stand-ins that note what they are asked: there is none of both here.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.dev.rigs.vllm_cpu import engine_env
from s3ec.testing.server import Identity, LocalS3
from tests.support.serving import running
from tests.terraform.cases import PLUGINS, environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "minio"
README = (EXAMPLE / "README.md").read_text()
# What a user pastes: the shell blocks, in their order.
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
STORE = "https://localhost:9000"
ENGINE = "http://localhost:8000"
PICTURE = b"\x89PNG stands for a picture"
# Two names that may stand for one thing, so that a block which takes the wrong one is found.
ROOT_USER, USER = "root", "s3ec-both"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]


class Shell:
    """One bash that blocks are pasted into; it ends at the first command that fails.

    Commands have the shell's own input, as when a user pastes: what reads it eats the next line.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._number = 0
        self.paste("set -euo pipefail")

    def paste(self, block: str) -> str:
        """Run one block; returns what it printed.

        Raises:
            AssertionError: A command failed; with all that the block printed.
        """
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._number += 1
        end = f"-- end of block {self._number} --"
        self._bash.stdin.write(f"{block}\necho '{end}'\n")
        self._bash.stdin.flush()
        printed = []
        for line in self._bash.stdout:
            if line.strip() == end:
                return "".join(printed)
            printed.append(line)
        raise AssertionError(f"the shell ended in\n{block}\nwhich printed\n{''.join(printed)}")

    def variables(self) -> dict[str, str]:
        """All that has been exported."""
        printed = self.paste(
            f"{sys.executable} -c 'import os,json;print(json.dumps({{**os.environ}}))'"
        )
        variables: dict[str, str] = json.loads(printed)
        return variables

    def close(self) -> None:
        """End the shell."""
        self._bash.communicate()


@dataclass
class StandIn:
    """The engine's API: notes what it is posted, and counts a hit once it was restarted."""

    url: str
    posted: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def stand_in_engine() -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            engine.posted.append(json.loads(body))
            self.reply(b'{"choices": []}')

        def do_GET(self) -> None:
            assert self.path == "/metrics"
            self.reply(b"vllm:s3ec_hits_total 1.0\n")

        def reply(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    engine = StandIn(f"http://127.0.0.1:{server.server_port}")
    with running(server):
        yield engine


def command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\nset -eu\n{script}\n")
    path.chmod(0o755)


@dataclass(frozen=True)
class Done:
    """What came of all blocks.

    Attributes:
        docker: Arguments of each call of ``docker``, and the variables that it saw.
    """

    docker: list[tuple[list[str], dict[str, str]]]
    engine: StandIn
    doctor: str
    last: str
    variables: dict[str, str]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """All blocks, pasted one after another."""
    here = tmp_path_factory.mktemp("minio")
    # Certificates and Terraform's state are written into these folders.
    for folder in ("examples/minio", "terraform"):
        ignored = shutil.ignore_patterns("certs", ".terraform*", "*.tfstate*")
        shutil.copytree(ROOT / folder, here / folder, ignore=ignored)
    commands = here / "bin"
    commands.mkdir()
    calls = here / "docker-calls"
    calls.touch()
    note = "import json, os, sys; print(json.dumps([sys.argv[1:], {**os.environ}]))"
    # `docker compose exec` reads its input: the lines pasted after it, if it has no other.
    own_input = '[ "$2" != exec ] || [ "$(readlink /proc/$$/fd/0)" = /dev/null ]'
    command(commands, "docker", f"{own_input}\n{sys.executable} -c '{note}' \"$@\" >> {calls}")
    command(commands, "s3ec", f'exec {sys.executable} -m s3ec "$@"')
    if PLUGINS is None:
        command(commands, "terraform", ":")
    else:
        (here / "terraform.rc").write_text(
            f'provider_installation {{\n  filesystem_mirror {{\n    path = "{PLUGINS}"\n  }}\n}}\n'
        )
    home = here / "home"
    (home / ".cache/huggingface").mkdir(parents=True)
    (home / ".cache/huggingface/token").write_text("hf_token\n")
    env = {
        **environment(),
        "HOME": str(home),
        # Or vLLM would look at the model's class once more, in one more process.
        "VLLM_CACHE_ROOT": engine_env()["VLLM_CACHE_ROOT"],
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TF_CLI_CONFIG_FILE": str(here / "terraform.rc"),
        "COLUMNS": "200",
    }
    shell = Shell(here, env)
    try:
        shell.paste(BLOCKS[0])
        made = shell.variables()
        certificates = here / "examples/minio/certs/minio"
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificates / "public.crt", certificates / "private.key")
        user = Identity(
            USER,
            policy=(EXAMPLE / "producer.json").read_text(),
            access_key=made["MINIO_S3EC_USER"],
            secret_key=made["MINIO_S3EC_PASSWORD"],
        )
        admin = Identity(
            "admin",
            access_key=made["MINIO_ROOT_USER"],
            secret_key=made["MINIO_ROOT_PASSWORD"],
        )
        (here / "examples/minio/page.png").write_bytes(PICTURE)
        with (
            LocalS3(admin=admin, identities=[user]) as server,
            FaultProxy(server.endpoint_url, tls=tls) as proxy,
            stand_in_engine() as engine,
        ):
            if PLUGINS is None:
                server.create_bucket("embeddings")
            printed = [
                shell.paste(
                    block.replace(STORE, f"https://localhost:{proxy.port}").replace(
                        ENGINE, engine.url
                    )
                )
                for block in BLOCKS[1:]
            ]
            noted = [json.loads(line) for line in calls.read_text().splitlines()]
            doctor = next(
                text for block, text in zip(BLOCKS[1:], printed, strict=True) if "doctor" in block
            )
            yield Done(
                [(args, variables) for args, variables in noted],
                engine,
                doctor,
                printed[-1],
                shell.variables(),
            )
    finally:
        shell.close()


def test_doctor_finds_the_bucket_fit_for_the_user_that_was_made(done: Done) -> None:
    # Its exit status is 0, or the shell would have ended.
    assert "s3://embeddings can be listed" in done.doctor
    assert "deleting is not" in done.doctor


def test_engine_gets_the_picture_twice_and_the_hit_is_shown(done: Done) -> None:
    assert len(done.engine.posted) == 2
    first, second = done.engine.posted
    assert first == second
    part = first["messages"][0]["content"][0]
    kind, _, data = part["image_url"]["url"].partition(";base64,")
    assert kind == "data:image/png"
    assert base64.b64decode(data) == PICTURE
    assert "vllm:s3ec_hits_total 1.0" in done.last


def test_every_variable_of_compose_is_there_at_each_call(done: Done) -> None:
    """Compose reads the whole file, also where one service is started."""
    required = set(re.findall(r"\$\{(\w+):\?", (EXAMPLE / "compose.yaml").read_text()))
    assert required
    calls = [(args, variables) for args, variables in done.docker if args[0] == "compose"]
    assert calls
    for args, variables in calls:
        assert {name for name in required if not variables.get(name)} == set(), args


def test_the_engine_is_the_user_that_mc_made_and_nobody_else(done: Done) -> None:
    [start] = [
        seen for args, seen in done.docker if args[:2] == ["compose", "up"] and "--build" in args
    ]
    vllm = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]["vllm"]
    names = {
        name: re.fullmatch(r"\$\{(\w+):\?.*\}", value).group(1)  # type: ignore[union-attr]
        for name, value in vllm["environment"].items()
    }
    mc = [
        args[args.index("--config-dir") + 2 :] for args, _ in done.docker if "--config-dir" in args
    ]
    key, secret = (start[names[f"AWS_{what}"]] for what in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    assert key == USER
    assert ["admin", "user", "add", "corpus", key, secret] in mc
    assert ["admin", "policy", "attach", "corpus", "s3ec-producer", "--user", key] in mc
    assert start[names["HF_TOKEN"]] == "hf_token"


def test_mc_is_called_with_files_and_buckets_that_exist(done: Done) -> None:
    services = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]
    mounted = {one.split(":")[1]: one.split(":")[0] for one in services["minio"]["volumes"]}
    mc = [args for args, _ in done.docker if "mc" in args]
    assert all(args[:6] == ["compose", "exec", "-T", "minio", "mc", "--config-dir"] for args in mc)
    # The authority that mc trusts lies below the folder it is told.
    assert {args[6] for args in mc} == {"/mc"}
    assert mounted["/mc/certs/CAs/ca.pem"] == "./certs/ca.pem"
    policies = [args[-1] for args in mc if args[7:10] == ["admin", "policy", "create"]]
    assert policies
    for path in policies:
        assert (EXAMPLE / mounted[path]).is_file()
    on_bucket = [args for args in mc if any("corpus/embeddings" in arg for arg in args)]
    assert {args[7] for args in on_bucket} == {"quota", "ilm"}


def test_what_is_pasted_has_nothing_to_fill_in() -> None:
    assert len(BLOCKS) == 5
    for block in BLOCKS:
        assert "..." not in block
        assert not re.search(r"<[a-z]+>|YOUR", block)


def test_no_variable_for_others_begins_like_a_setting() -> None:
    compose = (EXAMPLE / "compose.yaml").read_text()
    exported = {name for block in BLOCKS for name in re.findall(r"(\w+)=", block)}
    used = exported | set(re.findall(r"\$\{(\w+)", compose))
    assert {name for name in used if name.startswith("S3EC_")} == {"S3EC_CA_BUNDLE"}
