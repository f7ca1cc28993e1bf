# SPDX-License-Identifier: Apache-2.0
"""The blocks of examples/compose/README.md, pasted into one shell, with a real SeaweedFS.

Docker and the engine are stand-ins: there is none of both here. SeaweedFS runs with the arguments
of compose.yaml, and commands in a container run here, with that service's environment.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
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

from s3ec.testing.server import find_weed, free_port
from tests.support.serving import running
from tests.support.shell import Shell
from tests.support.waiting import eventually
from tests.terraform.cases import environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "compose"
README = (EXAMPLE / "README.md").read_text()
# What a user pastes: the shell blocks, in their order.
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
SERVICES = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())["services"]
ENGINE = "http://localhost:8000"
PICTURE = b"\x89PNG stands for a picture"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]


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


# Notes each call. `exec` and `run` read their input: the lines pasted after them, if they have no
# other. What they start in a container starts here.
DOCKER = """
import json, os, subprocess, sys

args = sys.argv[1:]
told = json.load(open(os.environ["TOLD"]))
with open(told["calls"], "a") as calls:
    print(json.dumps([args, {**os.environ}]), file=calls)
if args[1] in ("exec", "run"):
    assert os.readlink("/proc/self/fd/0") != told["pasted"], args
env = {**os.environ, **told["vllm"]}
if args[:5] == ["compose", "exec", "-T", "store", "weed"]:
    sys.exit(subprocess.run([told["weed"], *args[5:], "-master=" + told["master"]]).returncode)
if args[:4] == ["compose", "exec", "-T", "vllm"]:
    assert args[4] == "s3ec"
    sys.exit(subprocess.run([sys.executable, "-m", *args[4:]], env=env).returncode)
if args[1] == "run":
    while "-e" in args:
        at = args.index("-e")
        name, _, value = args[at + 1].partition("=")
        env[name] = value
        del args[at : at + 2]
    assert args[:6] == ["compose", "run", "--rm", "-T", "--entrypoint", "s3ec"], args
    assert args[6] == "vllm"
    sys.exit(subprocess.run([sys.executable, "-m", "s3ec", *args[7:]], env=env).returncode)
"""


def command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(script)
    path.chmod(0o755)


@dataclass(frozen=True)
class Done:
    """What came of all blocks.

    Attributes:
        docker: Arguments of each call of ``docker``, and the variables that it saw.
        printed: Of each block after the first one.
    """

    docker: list[tuple[list[str], dict[str, str]]]
    engine: StandIn
    printed: list[str]


@contextmanager
def store(example: Path, data: Path) -> Iterator[dict[str, int]]:
    """SeaweedFS with the arguments of compose.yaml; only its ports and paths are others."""
    places = {"/data": str(data)}
    for volume in SERVICES["store"]["volumes"][1:]:
        source, target, _ = volume.split(":")
        places[target] = str(example / source)
    ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
    words = []
    for word in SERVICES["store"]["command"]:
        name, _, value = word.partition("=")
        place = next((target for target in places if value.startswith(target)), None)
        value = value if place is None else value.replace(place, places[place], 1)
        words.append(f"{name}={ports['s3'] if name == '-s3.port' else value}" if value else word)
    words += [f"-{name}.port={port}" for name, port in ports.items() if name != "s3"]
    log = data.with_suffix(".log")
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [find_weed(), *words],
            env={"HOME": str(data), "TMPDIR": str(data), "PATH": os.defpath},
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    check = [
        word.replace(":8333", f":{ports['s3']}")
        for word in SERVICES["store"]["healthcheck"]["test"][1:]
    ]
    check[check.index("--cacert") + 1] = places["/etc/seaweedfs/ca.pem"]
    try:
        eventually(lambda: subprocess.run(check, check=False, capture_output=True).returncode == 0)
        assert process.poll() is None, log.read_text()
        yield ports
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """All blocks, pasted one after another."""
    here = tmp_path_factory.mktemp("compose")
    # Certificates and secrets are written into this folder.
    ignored = shutil.ignore_patterns("certs", ".env", "s3.json")
    shutil.copytree(EXAMPLE, here / "examples/compose", ignore=ignored)
    example = here / "examples/compose"
    (example / "page.png").write_bytes(PICTURE)
    commands, data = here / "bin", here / "data"
    commands.mkdir()
    data.mkdir()
    command(commands, "make", "#!/bin/bash\nexit 0\n")
    command(commands, "docker", f"#!{sys.executable}\n{DOCKER}")
    calls = here / "calls"
    calls.touch()
    env = {
        **environment(),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TOLD": str(here / "told.json"),
        "COLUMNS": "200",
    }
    shell = Shell(here, env)
    try:
        shell.paste(BLOCKS[0])
        secrets = dict(line.split("=") for line in (example / ".env").read_text().splitlines())
        with store(example, data) as ports, stand_in_engine() as engine:
            given = {
                name: re.sub(r"\$\{(\w+):?[?-].*\}", lambda found: secrets.get(found[1], ""), value)
                for name, value in SERVICES["vllm"]["environment"].items()
            }
            # Where the service would reach the store and its files.
            assert given["S3EC_ENDPOINT_URL"] == "https://store:8333"
            given["S3EC_ENDPOINT_URL"] = f"https://localhost:{ports['s3']}"
            given["S3EC_CA_BUNDLE"] = str(example / "certs/ca.pem")
            given["S3EC_CACHE_DIR"] = str(here / "tier")
            told = {
                "calls": str(calls),
                "vllm": given,
                "weed": find_weed(),
                "master": f"127.0.0.1:{ports['master']}",
                "pasted": shell.input,
            }
            (here / "told.json").write_text(json.dumps(told))
            printed = [shell.paste(block.replace(ENGINE, engine.url)) for block in BLOCKS[1:]]
            printed.append(shell.paste(f"{{\n{AFTERWARDS}\n}} || true"))
            noted = [json.loads(line) for line in calls.read_text().splitlines()]
            yield Done([(args, variables) for args, variables in noted], engine, printed)
    finally:
        shell.close()


# Below a list, so it is indented.
AFTERWARDS = "\n".join(
    line[2:]
    for line in re.findall(r"^  ```bash\n(.*?)^  ```$", README, re.S | re.M)[0].splitlines()
)


def test_bucket_is_made_with_its_limit(done: Done) -> None:
    assert "created bucket embeddings" in done.printed[0]
    assert "updated quota for bucket embeddings" in done.printed[0]


def test_doctor_finds_the_bucket_fit_for_the_user_of_the_engines(done: Done) -> None:
    # Its exit status is 0, or the shell would have ended.
    assert "s3://embeddings can be listed" in done.printed[1]
    assert "deleting is not" in done.printed[1]


def test_engine_gets_the_picture_twice_and_the_hit_is_shown(done: Done) -> None:
    assert len(done.engine.posted) == 2
    first, second = done.engine.posted
    assert first == second
    part = first["messages"][0]["content"][0]
    kind, _, data = part["image_url"]["url"].partition(";base64,")
    assert kind == "data:image/png"
    assert base64.b64decode(data) == PICTURE
    assert "vllm:s3ec_hits_total 1.0" in done.printed[2]


def test_gc_reaches_the_bucket_as_the_user_who_may_delete(done: Done) -> None:
    # No engine has stored anything here. With wrong keys it would be refused.
    assert "no namespace here yet" in done.printed[-1]
    [call] = [args for args, _ in done.docker if "gc" in args]
    assert "AWS_ACCESS_KEY_ID=s3ec-maintainer" in call


def test_every_service_that_a_call_names_is_in_compose(done: Done) -> None:
    named = {word for args, _ in done.docker for word in args if word in ("store", "vllm", "minio")}
    assert named == set(SERVICES)
    assert ["compose", "up", "-d", "--wait", "store"] in [args for args, _ in done.docker]
    assert ["compose", "up", "-d", "--wait", "vllm"] in [args for args, _ in done.docker]


def test_secrets_are_the_users_own_and_stay_when_it_is_prepared_again(tmp_path: Path) -> None:
    example = tmp_path / "compose"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("certs", ".env", "s3.json"))
    made = []
    for _ in range(2):
        subprocess.run([example / "prepare"], check=True, capture_output=True)
        made.append([(example / name).read_text() for name in (".env", "s3.json")])
    assert made[0] == made[1]
    for name in (".env", "s3.json", "certs/server/private.key"):
        assert (example / name).stat().st_mode & 0o077 == 0
    # Every variable that compose.yaml asks for.
    required = set(re.findall(r"\$\{(\w+):\?", (EXAMPLE / "compose.yaml").read_text()))
    assert required <= set(re.findall(r"^(\w+)=", made[0][0], re.M))


def test_what_is_pasted_has_nothing_to_fill_in() -> None:
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        assert "..." not in block
        assert not re.search(r"<[a-z]+>|YOUR", block)
