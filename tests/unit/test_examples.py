# SPDX-License-Identifier: Apache-2.0
"""What lies in examples/ is what it says: settings, certificates, compose files."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
import yaml

from s3ec.config import load_settings
from s3ec.settings import ENV_PREFIX
from tests.support.pages import blocks

EXAMPLES = Path(__file__).parents[2] / "examples"
COMPOSE = EXAMPLES / "compose"
SERVICES = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
# Made by `prepare`, or by Python.
UNNAMED = {"README.md", "certs", ".env", "s3.json", "__pycache__"}


@pytest.mark.parametrize("example", ["compose", "epd", "kubernetes", "observability", "rag"])
def test_every_file_of_an_example_is_named_in_its_readme(example: str) -> None:
    folder = EXAMPLES / example
    text = (folder / "README.md").read_text()
    parts = ("*", "grafana/*", "components/*", "jobs/*")
    names = {path.name for part in parts for path in folder.glob(part)} - UNNAMED
    assert names
    assert {name for name in names if not re.search(rf"`\S*{re.escape(name)}", text)} == set()


@pytest.mark.parametrize(
    ("example", "pinned"),
    [("compose", r":v?\d+\.\d+(\.\d+)?$"), ("observability", r":v?\d+\.\d+\.\d+$")],
)
def test_compose_starts_what_lasts_on_this_machine_only_and_tells_when_it_is_ready(
    example: str, pinned: str
) -> None:
    text = (EXAMPLES / example / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    for name, service in services.items():
        assert {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"]), name
        assert service["restart"] == "unless-stopped", name
        # In the machine's own network there is nothing to publish.
        assert service.get("ports", []) or service["network_mode"] == "host", name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
    images = re.findall(r"\$\{\w+_IMAGE:-([^}]+)\}", text)
    assert len(images) == len(services)
    for image in images:
        assert re.search(pinned, image), image


def test_settings_are_what_the_connector_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = SERVICES["vllm"]
    command = vllm["command"]
    transfer = json.loads(command[command.index("--ec-transfer-config") + 1])
    assert transfer == {"ec_connector": "S3ECConnector", "ec_role": "ec_both"}
    env = vllm["environment"]
    mounted = {volume.split(":")[1] for volume in vllm["volumes"]}
    assert mounted == {env["S3EC_CA_BUNDLE"], env["S3EC_CACHE_DIR"], "/weights"}
    (tmp_path / "ca.pem").touch()
    for name, value in env.items():
        if name.startswith(ENV_PREFIX):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("S3EC_CA_BUNDLE", str(tmp_path / "ca.pem"))
    settings = load_settings({}).settings
    assert settings.endpoint_url is not None
    assert settings.endpoint_url.startswith("https://store:")


def test_store_and_engine_start_in_order_with_volumes_that_last() -> None:
    text = (COMPOSE / "compose.yaml").read_text()
    store, vllm = SERVICES["store"], SERVICES["vllm"]
    # TLS, and the authority, are where the check looks for them.
    check = store["healthcheck"]["test"]
    authority = check[check.index("--cacert") + 1]
    assert f"./certs/ca.pem:{authority}:ro" in store["volumes"]
    assert check[-1].startswith("https://localhost:8333/")
    assert vllm["depends_on"] == {"store": {"condition": "service_healthy"}}
    # Named volumes outlive `docker compose down`: objects, weights, and what is not uploaded yet.
    volumes = set(yaml.safe_load(text)["volumes"])
    assert volumes == {"objects", "tier", "weights"}
    named = {one.split(":")[0] for one in (*store["volumes"], *vllm["volumes"])}
    assert volumes <= named
    assert vllm["shm_size"]
    # The engine has less time to end, its uploads included, than Docker gives it.
    command = vllm["command"]
    seconds = int(command[command.index("--shutdown-timeout") + 1])
    assert 0 < seconds + 30 < int(vllm["stop_grace_period"].removesuffix("s"))


def test_image_is_built_by_the_dockerfile_with_its_own_release_of_vllm() -> None:
    build = SERVICES["vllm"]["build"]
    dockerfile = COMPOSE / build["context"] / build["dockerfile"]
    [default] = re.findall(r"^ARG VLLM_IMAGE=(.+)$", dockerfile.read_text(), re.MULTILINE)
    assert build["args"]["VLLM_IMAGE"] == f"${{VLLM_IMAGE:-{default}}}"
    # Folders that it makes for its user, so that a new volume belongs to that user.
    for volume in ("tier", "weights"):
        [target] = [
            one.split(":")[1] for one in SERVICES["vllm"]["volumes"] if one.startswith(volume)
        ]
        assert re.search(rf"install -d .* {target}\b", dockerfile.read_text())


@pytest.mark.parametrize("name", ["compose", "kubernetes"])
def test_blocks_say_that_they_need_docker_or_a_cluster(name: str) -> None:
    found = blocks(f"examples/{name}/README.md")
    assert found
    for block in found:
        needs = {"docker": "Docker", "kubectl": "a cluster", "helm": "a cluster"}
        called = set(re.findall(r"^(docker|kubectl|helm) ", block.text, re.M))
        assert {needs[command] for command in called} <= set(block.needs), block.line


def test_the_page_says_what_is_wrong_with_the_last_image_of_minio() -> None:
    assert "CVE-2025-62506" in (COMPOSE / "README.md").read_text()
    assert "minio" not in (COMPOSE / "compose.yaml").read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_serve_the_names_that_were_asked_for(tmp_path: Path) -> None:
    subprocess.run(
        [COMPOSE / "make-certs", tmp_path, "store", "127.0.0.1"], check=True, capture_output=True
    )
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "server" / "public.crt", tmp_path / "server" / "private.key")
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    assert shake_hands(served, trusting, "store") is None
    assert shake_hands(served, trusting, "127.0.0.1") is None
    assert "mismatch" in str(shake_hands(served, trusting, "elsewhere"))
    strangers = ssl.create_default_context()
    assert "unable to get local issuer" in str(shake_hands(served, strangers, "store"))
    for secret in ("ca.key", "server/private.key"):
        assert (tmp_path / secret).stat().st_mode & 0o077 == 0


def shake_hands(served: ssl.SSLContext, asking: ssl.SSLContext, name: str) -> Exception | None:
    """Why a client that asks for ``name`` does not trust the server; None where it does."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            try:
                served.wrap_socket(theirs, server_side=True).close()
            except (ssl.SSLError, OSError):
                return  # the client says what is wrong

    server = threading.Thread(target=serve)
    server.start()
    try:
        with asking.wrap_socket(ours, server_hostname=name):
            return None
    except ssl.SSLError as exc:
        return exc
    finally:
        ours.close()
        server.join()
