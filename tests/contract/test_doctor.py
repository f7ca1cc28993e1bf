# SPDX-License-Identifier: Apache-2.0
"""``s3ec doctor --json`` against SeaweedFS, moto and nobody: the verdict of every check."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Delay
from s3ec.dev.rigs.vllm_cpu import engine_env
from s3ec.identity import Layout, Namespace
from s3ec.testing.server import LocalS3, S3Server
from tests.contract.conftest import BUCKET, READER

# Where vLLM is not installed and no model is named.
WITHOUT_VLLM = {
    "vllm": "warn",
    "connector": "ok",
    "model": "skip",
    "namespace": "skip",
}
NODE = {"cache_folder": "ok", "cache_space": "ok"}
HEALTHY = {
    "settings": "ok",
    "credentials": "ok",
    "endpoint": "ok",
    "clock": "ok",
    "bucket": "ok",
    "read": "ok",
    "write": "ok",
    "sse": "ok",
    "conditional_put": "ok",
    "ranges": "ok",
    "listing": "ok",
    **NODE,
    **WITHOUT_VLLM,
    "corpus": "ok",
}
PROBING = ("sse", "conditional_put", "ranges", "listing")
NO_BUCKET = dict.fromkeys(("read", "write", *PROBING, "corpus"), "skip")


class Report:
    """A parsed document of --json."""

    def __init__(self, text: str, code: int) -> None:
        self.document: dict[str, Any] = json.loads(text)
        self.code = code
        self.text = text
        self._checks = {check["name"]: check for check in self.document.get("checks", [])}

    def verdicts(self) -> dict[str, str]:
        """Verdicts by name; a tier on an overlay is the machine's choice, so it counts as well."""
        found = {name: check["verdict"] for name, check in self._checks.items()}
        if "(overlay)" in self._checks.get("cache_folder", {}).get("found", ""):
            found["cache_folder"] = "ok"
        return found

    def __getitem__(self, name: str) -> dict[str, str]:
        check: dict[str, str] = self._checks[name]
        return check


Doctor = Callable[..., Report]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """The JSON that vLLM would get, whole."""

    def make(endpoint_url: str, role: str = "ec_both", **changes: Any) -> str:
        extra = {
            "bucket": BUCKET,
            "endpoint_url": endpoint_url,
            "region": "us-east-1",
            "cache_dir": str(tmp_path / "cache"),
            "cache_bytes": "1MiB",
            "min_free_bytes": 0,
        }
        return json.dumps(
            {
                "ec_connector": "S3ECConnector",
                "ec_connector_module_path": "s3ec.connector",
                "ec_role": role,
                "ec_connector_extra_config": {**extra, **changes},
            }
        )

    return make


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs the command in this process, where vLLM counts as not installed."""
    monkeypatch.setitem(sys.modules, "vllm", None)

    def run(config: str, *args: str, env: Mapping[str, str] | None = None) -> Report:
        command = ["doctor", "--json", "--config", config, *args]
        result = CliRunner().invoke(app, command, env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Report(result.stdout, result.exit_code)

    return run


def objects(server: S3Server, bucket: str = BUCKET) -> list[str]:
    """What lies below the doctor's folder of a bucket."""
    page = server.client().list_objects_v2(Bucket=bucket, Prefix=".s3ec-probe/")
    return [entry["Key"] for entry in page.get("Contents", [])]


def test_seaweedfs_is_well_and_encrypts_when_asked(
    doctor: Doctor, config: Callable[..., str], local_s3: LocalS3, seaweed_bucket: str
) -> None:
    report = doctor(config(local_s3.endpoint_url, sse="AES256"), env=local_s3.env())
    assert report.verdicts() == HEALTHY
    assert report.document["ok"] is True
    assert report.code == 0
    assert "AES256 is accepted and confirmed" in report["sse"]["found"]
    assert "SeaweedFS" in report["endpoint"]["found"]
    assert " obstore " in report["settings"]["found"]
    assert "412" in report["conditional_put"]["found"]
    assert local_s3.secret_key not in report.text
    assert local_s3.access_key not in report.text
    assert objects(local_s3) == []


def test_nobody_waits_for_an_answer_beyond_the_time_for_a_request(
    doctor: Doctor, config: Callable[..., str]
) -> None:
    """Neither for the endpoint nor for credentials, however patient the settings are."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {
            "AWS_EC2_METADATA_DISABLED": "false",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": url,
            "AWS_METADATA_SERVICE_TIMEOUT": "600",
        }
        patience = {"connect_timeout_s": 60, "read_timeout_s": 60}
        report = doctor(config(url, **patience), "--timeout", "1", env=env)
    for name in ("credentials", "endpoint"):
        assert report[name]["verdict"] == "fail"
        assert "timed out" in report[name]["found"]
    assert report["bucket"]["verdict"] == "skip"
    assert {report[name]["verdict"] for name in NODE} <= {"ok", "warn"}


def test_writes_without_an_answer_fail_and_hold_up_the_checks_that_need_them(
    doctor: Doctor, config: Callable[..., str], local_s3: LocalS3, seaweed_bucket: str
) -> None:
    with FaultProxy(local_s3.endpoint_url) as proxy:
        proxy.add(Rule(Delay(600), method="PUT"))
        report = doctor(config(proxy.url), "--timeout", "4", env=local_s3.env())
    unknown = dict.fromkeys(PROBING, "skip")
    assert report.verdicts() == {**HEALTHY, **unknown, "write": "fail"}
    assert "timed out" in report["write"]["found"]
    assert "`--timeout` waits longer" in report["write"]["mend"]
    assert report["sse"]["found"] == "needs write"


def test_vllm_is_left_out_when_asked_and_the_rest_is_examined(
    doctor: Doctor,
    config: Callable[..., str],
    local_s3: LocalS3,
    seaweed_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*args: object) -> None:
        raise AssertionError("vLLM is imported")

    monkeypatch.setattr("s3ec.doctor.serving.has_vllm", lambda: True)
    monkeypatch.setattr("s3ec.doctor.serving.VllmChild", start)
    report = doctor(config(local_s3.endpoint_url), "--no-vllm", env=local_s3.env())
    assert report.verdicts() == {**HEALTHY, "vllm": "skip"}
    assert "--no-vllm" in report["vllm"]["found"]
    report = doctor(config(local_s3.endpoint_url), "--no-vllm", "--", "--model", "x")
    assert report.code == 2
    assert report.document["error"]["fix"] == "leave one out"


def test_bucket_and_node_are_examined_before_vllm_is_imported(
    config: Callable[..., str],
    local_s3: LocalS3,
    seaweed_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from s3ec.config import load_settings
    from s3ec.doctor import run, serving

    class ImportedError(Exception):
        pass

    def start(*args: object, **more: object) -> None:
        raise ImportedError

    monkeypatch.setattr(serving, "has_vllm", lambda: True)
    monkeypatch.setattr(serving, "VllmChild", start)
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    extra = json.loads(config(local_s3.endpoint_url))["ec_connector_extra_config"]
    checks = run.examine(load_settings(extra), {})
    seen: list[str] = []

    def look() -> None:
        for check in checks:
            seen.append(check.name)  # noqa: PERF401 - it ends with an exception

    with pytest.raises(ImportedError):
        look()
    later = {*WITHOUT_VLLM, "corpus"}
    assert seen == [name for name in HEALTHY if name not in later]


@pytest.mark.parametrize(
    ("change", "variables", "found", "mend"),
    [
        ({"bucket": "nosuchbucket"}, {}, "NoSuchBucket", "create the bucket"),
        ({}, {"AWS_SECRET_ACCESS_KEY": "wrong-hush-hush"}, "SignatureDoesNotMatch", "secret key"),
        ({}, {"AWS_ACCESS_KEY_ID": "AKIANOBODY"}, "InvalidAccessKeyId", "credentials"),
    ],
)
def test_what_the_bucket_refuses_fails_there_and_says_what_to_do(
    change: dict[str, str],
    variables: dict[str, str],
    found: str,
    mend: str,
    doctor: Doctor,
    config: Callable[..., str],
    local_s3: LocalS3,
    seaweed_bucket: str,
) -> None:
    report = doctor(config(local_s3.endpoint_url, **change), env=local_s3.env() | variables)
    assert report.verdicts() == {**HEALTHY, **NO_BUCKET, "bucket": "fail"}
    assert found in report["bucket"]["found"]
    assert mend in report["bucket"]["mend"]
    assert "wrong-hush-hush" not in report.text
    assert report.code == 1


def test_reader_without_list_is_told_which_right_is_missing(
    doctor: Doctor, config: Callable[..., str], guarded_s3: LocalS3
) -> None:
    report = doctor(config(guarded_s3.endpoint_url), env=guarded_s3.env(READER))
    assert report["bucket"]["verdict"] == "fail"
    assert "s3:ListBucket" in report["bucket"]["mend"]


def test_untrusted_certificate_fails_until_its_authority_is_named(
    doctor: Doctor,
    config: Callable[..., str],
    local_s3: LocalS3,
    seaweed_bucket: str,
    certificate: Path,
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with FaultProxy(local_s3.endpoint_url, tls=context) as proxy:
        env = local_s3.env()
        report = doctor(config(proxy.url), env=env)
        assert report["endpoint"]["verdict"] == "fail"
        assert "certificate" in report["endpoint"]["found"]
        assert "ca_bundle" in report["endpoint"]["mend"]
        report = doctor(config(proxy.url, ca_bundle=str(certificate)), env=env)
        assert report.verdicts() == HEALTHY


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"aws_secret_access_key": "hush-hush"}, "credentials are not accepted"),
        ({"cache_byte": 1}, "did you mean `cache_bytes`"),
        ({"max_concurrency": "hush-hush"}, "max_concurrency"),
        ({"profile": "nobody"}, "nobody"),
    ],
)
def test_unusable_settings_are_exit_code_2_and_one_document(
    doctor: Doctor, config: Callable[..., str], change: dict[str, Any], part: str
) -> None:
    report = doctor(config("http://127.0.0.1:9", **change))
    assert report.code == 2
    assert report.document["error"]["kind"] == "usage"
    assert part in report.document["error"]["message"]
    assert "hush-hush" not in report.text


def run_process(
    *command: str, env: Mapping[str, str], code: str | None = None
) -> subprocess.CompletedProcess[str]:
    start = ["-m", "s3ec"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *command],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


NO_VLLM = """
import sys
sys.modules["vllm"] = None
from s3ec.cli import main
main()
"""


@pytest.mark.parametrize(
    ("change", "code"), [({}, 0), ({"bucket": "nosuchbucket"}, 1), ({"bucketss": "x"}, 2)]
)
def test_process_ends_with_the_documented_status(
    config: Callable[..., str],
    local_s3: LocalS3,
    seaweed_bucket: str,
    change: dict[str, Any],
    code: int,
) -> None:
    command = ("doctor", "--config", config(local_s3.endpoint_url, **change))
    out = run_process(*command, env=local_s3.env(), code=NO_VLLM)
    assert out.returncode == code, out.stderr
    assert "Traceback" not in out.stderr
    if code == 2:
        assert out.stdout == ""
        assert out.stderr.startswith("error: ")
    else:
        assert " skip" in out.stdout.splitlines()[-1]  # nothing for a table of stores
        assert f"{code} fail" in out.stdout
        # A busy machine takes so long that it is told how far the checks are.
        told = out.stderr.splitlines()
        assert [line for line in told if not line.startswith("examining ")] == []


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and not os.environ.get("CI"),
    reason="vllm is not installed",
)


@needs_vllm
@pytest.mark.slow
def test_real_vllm_names_the_namespace_of_its_model(
    config: Callable[..., str], local_s3: LocalS3, s3_bucket: str, tmp_path: Path
) -> None:
    """What else vLLM can say is in tests/unit/doctor/test_vllm_probe.py."""
    # Another fleet with the same model and another dtype was here first.
    other = Namespace.from_descriptor({"model": "acme/tiny", "dtype": "float32"})
    key = Layout(other.name).descriptor
    local_s3.client().put_object(Bucket=s3_bucket, Key=key, Body=other.to_json())
    transfer = config(local_s3.endpoint_url, bucket=s3_bucket, model_identity="acme/tiny")
    model = str(write_gemma3(tmp_path / "tiny"))
    served = ["vllm", "serve", model, "--port", "8000", "--api-key", "hush-hush"]
    env = {**engine_env(), **local_s3.env()}
    asked = ("--config", transfer, "--", *served, "--dtype", "bfloat16")
    out = run_process("doctor", "--json", *asked, env=env)
    report = Report(out.stdout, out.returncode)
    with_model = dict.fromkeys(("vllm", "connector", "model", "namespace"), "ok")
    assert report.verdicts() == {**HEALTHY, **with_model, "corpus": "warn"}, out.stderr
    assert report.code == 0
    assert report["namespace"]["found"].startswith("acme-tiny-")
    assert "bfloat16" in report["namespace"]["found"]
    assert "--port" in report["model"]["found"]
    assert "hush-hush" not in out.stdout + out.stderr
    assert other.name in report["corpus"]["found"]
    assert 'dtype: here "bfloat16", there "float32"' in report["corpus"]["found"]
