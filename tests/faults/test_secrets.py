# SPDX-License-Identifier: Apache-2.0
"""Nothing that is secret, and no identifier of a client, in what a process says and leaves."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from s3ec import codec
from s3ec.cli.app import app
from s3ec.connector.messages import Save
from s3ec.connector.saves import SaveQueue
from s3ec.dev.rigs import proxy_faults as faults
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.identity import Layout, make_key
from s3ec.node import Node
from s3ec.prefetch import FetchRequest
from s3ec.settings import Settings
from s3ec.store.s3_client import Address
from s3ec.testing.server import MotoServer
from tests.faults.embeddings import NAMESPACE, WIDTH
from tests.support.waiting import eventually

torch = pytest.importorskip("torch")

KEY_ID = "AKIAROWTWENTYNINE"
SECRET = "5ecret-key-that-nobody-may-see"
TOKEN = "t0ken-of-a-session-that-nobody-may-see"
SIGNATURE = "5ignature0fapresignedurl"
NAME = "a client's own name, Jane Doe's passport"
PRESIGNED = (
    f"https://b.example.org/k?X-Amz-Credential={KEY_ID}%2Fus-east-1&X-Amz-Signature={SIGNATURE}"
    f"&X-Amz-Security-Token={TOKEN}"
)
SECRETS = (KEY_ID, SECRET, TOKEN, SIGNATURE)
LAYOUT = Layout(NAMESPACE.name)
SHAPE = codec.Shape(4, WIDTH, "bfloat16")


def body(code: str) -> bytes:
    """What S3 and things in front of it repeat of a request."""
    escaped = PRESIGNED.replace("&", "&amp;")
    return (
        f"<Error><Code>{code}</Code><Message>Refused {escaped} of {KEY_ID}</Message>"
        f"<AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId><Token-0>{TOKEN}</Token-0>"
        f"<CanonicalRequest>PUT x-amz-security-token:{TOKEN}</CanonicalRequest></Error>"
    ).encode()


FAULTS = (
    faults.Answer(403, body("SignatureDoesNotMatch")),
    faults.Answer(403, body("AccessDenied")),
    faults.Answer(400, body("ExpiredToken")),
    faults.Answer(503, body("SlowDown")),
    faults.Answer(307, body("TemporaryRedirect"), {"location": PRESIGNED}),
    faults.Answer(500, f"<html>{PRESIGNED}</html>".encode(), {"content-type": "text/html"}),
    faults.Reset(),
)


def tensor() -> Any:
    return torch.ones((SHAPE.rows, WIDTH), dtype=torch.bfloat16)


def use(settings: Settings) -> str:
    """Run a node through its good and bad days; what it counted, and what it is called."""
    node = Node(settings, NAMESPACE)
    queue = SaveQueue(node, budget_bytes=2**20, overflow="drop")
    said = [repr(settings), settings.model_dump_json(), repr(node.store), repr(node)]
    try:
        node.follow_the_bucket()
        assert queue.put(NAME, Save("image", {}), tensor())
        node.loop.run(_try_everything(node, said), 60)
        key = make_key(NAME)
        assert key is not None
        node.prefetcher.submit([FetchRequest(key, "image", SHAPE.rows)])
        eventually(lambda: node.prefetcher.has_news)
        said.extend(repr(one.outcome) for one in node.prefetcher.drain())
    finally:
        queue.drain(0.05)
        node.close(5)
    assert node.counters.get("internal_errors") == 0
    said.append(json.dumps(node.counters.snapshot()))
    return "\n".join(said)


async def _try_everything(node: Node, said: list[str]) -> None:
    key = make_key(NAME)
    assert key is not None
    calls = (
        lambda: node.store.get(LAYOUT.object(key), max_bytes=2**20),
        lambda: node.store.put_if_absent(LAYOUT.object(key), [b"x"]),
        lambda: node.store.head(LAYOUT.object(key)),
        lambda: node.store.list_folders(""),
        node.index.refresh,
    )
    for call in calls:
        try:
            await call()
        except Exception as exc:  # noqa: BLE001 -- whatever it is, its text counts
            said.append("".join(traceback.format_exception(exc)) + repr(exc))


@pytest.mark.parametrize(("transport", "umask"), [("aioboto3", 0o000), ("obstore", 0o077)])
def test_no_secret_and_no_identifier_is_said_or_named_and_files_are_private(
    umask: int,
    transport: str,
    moto_server: MotoServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    variables = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
    for name, value in {**variables, "AWS_SESSION_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(Address, "is_amazons", True)  # others' tokens are not given to obstore
    caplog.set_level(logging.DEBUG)
    for name in ("s3ec", "aiobotocore", "botocore", "boto3"):
        caplog.set_level(logging.DEBUG if name == "s3ec" else logging.INFO, logger=name)
    told: list[str] = []
    old = os.umask(umask)
    try:
        with FaultProxy(moto_server.endpoint_url) as proxy:
            for number, fault in enumerate((None, *FAULTS)):
                proxy.clear()
                rule = proxy.add(Rule(fault, skip=number % 3)) if fault else None
                # The health of an endpoint is shared by all that use one bucket of it.
                bucket = moto_server.create_bucket(f"secrets-{transport}-{umask}-{number}")
                given = {
                    "bucket": bucket,
                    "endpoint_url": proxy.url,
                    "region": "us-east-1",
                    "transport": transport,
                    "cache_dir": str(tmp_path / f"cache-{number}"),
                    "min_free_bytes": "0",
                    "read_timeout_s": "5",
                }
                told.append(use(Settings.model_validate(given)))
                assert proxy.requests[0].headers["x-amz-security-token"] == TOKEN
                assert rule is None or rule.fired > 0
            if umask:
                monkeypatch.setitem(sys.modules, "vllm", None)
                for command in (["doctor"], ["config", "show"], ["ls"]):
                    result = CliRunner().invoke(app, [*command, "--config", json.dumps(given)])
                    told += [result.output, repr(result.exception)]
    finally:
        os.umask(old)
    printed = capfd.readouterr()
    text = "\n".join([*told, caplog.text, printed.out, printed.err])
    assert "s3ec" in caplog.text
    for secret in (*SECRETS, NAME, "passport"):
        where = text.find(secret)
        assert where < 0, text[max(0, where - 300) : where + 100]
    _look_at_files(tmp_path)


def _look_at_files(top: Path) -> None:
    files = 0
    for folder, folders, names in os.walk(top):
        for name in folders:
            assert stat.S_IMODE(os.lstat(f"{folder}/{name}").st_mode) == 0o700, f"{folder}/{name}"
        for name in names:
            path = Path(folder, name)
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600, path
            content = path.read_bytes()
            for secret in SECRETS:
                assert secret.encode() not in content, path
            files += 1
        assert "passport" not in folder + "".join([*folders, *names])
    assert files > 0
