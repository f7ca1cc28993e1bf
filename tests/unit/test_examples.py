# SPDX-License-Identifier: Apache-2.0
"""What lies in examples/ is what it says: settings, policies, certificates, a compose file."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
import yaml

from s3ec.config import load_settings

MINIO = Path(__file__).parents[2] / "examples" / "minio"
ADDS = {"s3:PutObject", "s3:AbortMultipartUpload"}


def test_settings_are_what_the_connector_takes(tmp_path: Path) -> None:
    transfer = json.loads((MINIO / "settings.json").read_text())
    assert transfer["ec_connector"] == "S3ECConnector"
    extra = transfer["ec_connector_extra_config"]
    compose = yaml.safe_load((MINIO / "compose.yaml").read_text())
    mounted = {volume.split(":")[1] for volume in compose["services"]["vllm"]["volumes"]}
    assert mounted == {extra["ca_bundle"], extra["cache_dir"], "/root/.cache/huggingface"}
    (tmp_path / "ca.pem").touch()
    settings = load_settings({**extra, "ca_bundle": str(tmp_path / "ca.pem")}).settings
    assert settings.endpoint_url is not None
    assert settings.endpoint_url.startswith("https://minio:")
    assert "minio" in compose["services"]


def test_compose_starts_what_lasts_and_tells_when_it_is_ready() -> None:
    text = (MINIO / "compose.yaml").read_text()
    compose = yaml.safe_load(text)
    services = compose["services"]
    for name, service in services.items():
        assert {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"]), name
        assert service["restart"] == "unless-stopped", name
    minio, vllm = services["minio"], services["vllm"]
    # TLS, and the authority, are where the check looks for them.
    check = minio["healthcheck"]["test"]
    authority = check[check.index("--cacert") + 1]
    assert f"./certs/ca.pem:{authority}:ro" in minio["volumes"]
    assert check[-1].startswith("https://localhost:9000/")
    assert vllm["depends_on"] == {"minio": {"condition": "service_healthy"}}
    # Named volumes outlive `docker compose down`: objects, weights, and what is not uploaded yet.
    assert set(compose["volumes"]) == {"objects", "tier", "models"}
    named = {one.split(":")[0] for one in (*minio["volumes"], *vllm["volumes"])}
    assert set(compose["volumes"]) <= named
    assert vllm["shm_size"]
    # The engine has less time to end than Docker gives it.
    command = vllm["command"]
    seconds = int(command[command.index("--shutdown-timeout") + 1])
    assert 0 < seconds < int(vllm["stop_grace_period"].removesuffix("s"))
    for image in re.findall(r"\$\{\w+_IMAGE:-([^}]+)\}", text):
        assert re.search(r":(v\d+\.\d+\.\d+|RELEASE\.\d{4}-\d\d-\d\dT[\d-]+Z)$", image), image


def test_image_is_vllms_own_and_installs_this_checkout() -> None:
    dockerfile = (MINIO / "Dockerfile").read_text()
    compose = yaml.safe_load((MINIO / "compose.yaml").read_text())
    build = compose["services"]["vllm"]["build"]
    assert (MINIO / build["context"] / build["dockerfile"]).resolve() == MINIO / "Dockerfile"
    [default] = re.findall(r"^ARG VLLM_IMAGE=(.+)$", dockerfile, re.MULTILINE)
    assert build["args"]["VLLM_IMAGE"] == f"${{VLLM_IMAGE:-{default}}}"
    root = MINIO / build["context"]
    copied = {
        name for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.M) for name in line.split()
    }
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    # All that a build of the package reads.
    assert {"pyproject.toml", "s3ec", project["readme"], *project["license-files"]} == copied
    assert all((root / name).exists() for name in copied)
    [install] = re.findall(r"^RUN (.*pip install.*)$", dockerfile, re.M)
    # No trick is needed: the package asks for lower bounds only.
    assert install == "python3 -m pip install --no-cache-dir /opt/s3ec"


@pytest.mark.parametrize(
    ("role", "actions"),
    [
        ("consumer", {"s3:GetObject"}),
        ("producer", {"s3:GetObject"} | ADDS),
        ("maintainer", {"s3:GetObject", "s3:DeleteObject"} | ADDS),
    ],
)
def test_policies_allow_what_their_role_is_for(role: str, actions: set[str]) -> None:
    listing, objects = json.loads((MINIO / f"{role}.json").read_text())["Statement"]
    assert listing["Action"] == ["s3:ListBucket"]
    assert listing["Resource"] == ["arn:aws:s3:::embeddings"]
    assert set(objects["Action"]) == actions
    assert objects["Resource"] == ["arn:aws:s3:::embeddings/*"]


def test_every_file_of_the_example_is_named_in_its_readme() -> None:
    text = (MINIO / "README.md").read_text()
    names = {path.name for path in MINIO.iterdir()} - {"README.md", "certs"}
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_serve_the_names_that_were_asked_for(tmp_path: Path) -> None:
    subprocess.run(
        [MINIO / "make-certs", tmp_path, "minio", "127.0.0.1"], check=True, capture_output=True
    )
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "minio" / "public.crt", tmp_path / "minio" / "private.key")
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    assert shake_hands(served, trusting, "minio") is None
    assert shake_hands(served, trusting, "127.0.0.1") is None
    assert "mismatch" in str(shake_hands(served, trusting, "elsewhere"))
    strangers = ssl.create_default_context()
    assert "unable to get local issuer" in str(shake_hands(served, strangers, "minio"))
    for secret in ("ca.key", "minio/private.key"):
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
