# SPDX-License-Identifier: Apache-2.0
"""The way to the bucket, and what its faults are called."""

from __future__ import annotations

import email.utils
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Answer, Stall, html_page, s3_error
from s3ec.doctor import bucket
from s3ec.doctor.check import CheckContext, Outcome, Verdict
from s3ec.testing.server import MotoServer
from tests.unit.doctor.conftest import MakePatient, ReplyHeaders, says


def hidden(outcome: Outcome, *secrets: str) -> bool:
    """Whether no secret stands in what a check says."""
    return not any(secret in outcome.found + outcome.mend for secret in secrets)


def test_credentials_of_the_environment_are_named_not_shown(
    make_patient: MakePatient, moto_server: MotoServer
) -> None:
    outcome = bucket.credentials(make_patient())
    assert outcome.verdict == Verdict.OK
    assert outcome.found == "env"
    assert hidden(outcome, moto_server.access_key, moto_server.secret_key)


def test_credentials_of_a_profile_are_found_in_the_shared_file(
    make_patient: MakePatient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "shared"
    file.write_text("[fleet]\naws_access_key_id = AKIA\naws_secret_access_key = hush\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    outcome = bucket.credentials(make_patient(profile="fleet"))
    assert outcome.verdict == Verdict.OK
    assert outcome.found.startswith("shared-credentials-file")
    assert hidden(outcome, "hush", "AKIA")


def test_no_credentials_fail_with_the_ways_to_give_some(
    make_patient: MakePatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    says(bucket.credentials(make_patient()), Verdict.FAIL, mend="AWS_ACCESS_KEY_ID")


def test_half_a_key_pair_fails(make_patient: MakePatient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    outcome = bucket.credentials(make_patient())
    assert outcome.verdict == Verdict.FAIL
    assert "AWS_SECRET_ACCESS_KEY" in outcome.found.upper()


@pytest.fixture
def role_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "role").write_text(
        "[profile reader]\nrole_arn = arn:aws:iam::123456789012:role/reader\n"
        "credential_source = Environment\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "role"))
    return "reader"


def test_role_of_a_profile_is_assumed_with_the_found_credentials(
    make_patient: MakePatient,
    moto_server: MotoServer,
    role_profile: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto_server.endpoint_url)
    patient = make_patient(profile=role_profile)
    says(bucket.credentials(patient), Verdict.OK, found="assume-role")
    assert bucket.bucket(patient).verdict == Verdict.OK


def test_refused_role_fails_and_names_the_action(
    make_patient: MakePatient,
    proxy: FaultProxy,
    role_profile: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", proxy.url)
    proxy.add(Rule(s3_error(403, "AccessDenied"), method="POST"))
    outcome = bucket.credentials(make_patient(profile=role_profile))
    says(outcome, Verdict.FAIL, found="AssumeRole", mend="mend that source of credentials")


@pytest.mark.parametrize(
    ("url", "found", "mend"),
    [
        ("http://127.0.0.1:1", "refused", "nothing listens"),
        ("https://127.0.0.1:{open}", "SSL", "http://"),
        ("https://no-such-host.invalid", "", "host name is unknown"),
    ],
)
def test_unreachable_endpoint_fails_with_the_reason(
    make_patient: MakePatient, moto_server: MotoServer, url: str, found: str, mend: str
) -> None:
    port = moto_server.endpoint_url.rpartition(":")[2]
    patient = make_patient(endpoint_url=url.format(open=port))
    says(bucket.endpoint(patient), Verdict.FAIL, found=found, mend=mend)


def test_endpoint_that_never_replies_fails_in_the_end(
    make_patient: MakePatient, proxy: FaultProxy
) -> None:
    proxy.add(Rule(Stall()))
    says(bucket.endpoint(make_patient(timeout_s=0.3)), Verdict.FAIL)


def test_the_proxy_on_the_way_is_blamed_by_name(
    make_patient: MakePatient, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:SECRET@127.0.0.1:1")
    dead = bucket.endpoint(make_patient())
    says(dead, Verdict.FAIL, found="through the proxy http://127.0.0.1:1: ", mend="NO_PROXY")
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    proxy.add(Rule(Stall()))
    silent = bucket.endpoint(make_patient(timeout_s=0.3))
    says(silent, Verdict.FAIL, found=f"through the proxy {proxy.url}", mend="NO_PROXY")
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
    proxy.clear()
    says(bucket.endpoint(make_patient()), Verdict.OK)


@pytest.mark.parametrize(
    ("here", "there", "verdict"),
    [
        ("eu-west-1", "us-east-1", Verdict.WARN),
        ("us-east-1", "us-east-1", Verdict.OK),
        ("", "us-east-1", Verdict.OK),
        ("eu-west-1", None, Verdict.OK),
    ],
)
def test_a_bucket_of_another_region_is_a_warning(
    make_patient: MakePatient,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    there: str | None,
    verdict: Verdict,
) -> None:
    patient = make_patient()
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", here)
    proxy.add(Rule(ReplyHeaders({"x-amz-bucket-region": there})))
    outcome = bucket.endpoint(patient)
    says(outcome, verdict, found="this machine in eu-west-1" if verdict == Verdict.WARN else "")
    near = make_patient(replicas=[{"bucket": "near", "region": here}])  # which is read first
    says(bucket.endpoint(near), Verdict.OK)


@pytest.mark.parametrize("status", [200, 404, 503])
def test_web_page_is_not_taken_for_s3(
    make_patient: MakePatient, proxy: FaultProxy, status: int
) -> None:
    proxy.add(Rule(html_page(status)))
    says(bucket.endpoint(make_patient()), Verdict.FAIL, found="not as S3")


@pytest.mark.parametrize("entry", ["<Size>abc</Size>", "<LastModified>then</LastModified>"])
def test_answer_that_cannot_be_read_is_not_taken_for_s3s(
    make_patient: MakePatient, proxy: FaultProxy, entry: str
) -> None:
    page = f"<ListBucketResult><Contents><Key>a</Key>{entry}</Contents></ListBucketResult>"
    proxy.add(Rule(Answer(200, page.encode())))
    says(bucket.bucket(make_patient()), Verdict.FAIL, found="not an S3 server's")


@pytest.mark.parametrize(
    ("skew_s", "verdict", "part"),
    [
        (0, Verdict.OK, "within"),
        (120, Verdict.WARN, "behind"),
        (-120, Verdict.WARN, "ahead of"),
        (3600, Verdict.FAIL, "behind"),
    ],
)
def test_clock_is_compared_with_the_servers(
    make_patient: MakePatient, proxy: FaultProxy, skew_s: float, verdict: Verdict, part: str
) -> None:
    date = email.utils.formatdate(time.time() + skew_s, usegmt=True)
    proxy.add(Rule(ReplyHeaders({"date": date})))
    patient = make_patient()
    bucket.endpoint(patient)
    says(bucket.clock(patient), verdict, found=part)


@pytest.mark.parametrize("date", [None, "yesterday"])
def test_server_without_a_date_skips_the_clock(
    make_patient: MakePatient, proxy: FaultProxy, date: str | None
) -> None:
    proxy.add(Rule(ReplyHeaders({"date": date})))
    patient = make_patient()
    bucket.endpoint(patient)
    assert bucket.clock(patient).verdict == Verdict.SKIP


def test_bucket_says_whether_it_holds_objects(
    make_patient: MakePatient, moto_server: MotoServer, doctor_bucket: str, tmp_path: Path
) -> None:
    patient = make_patient()
    assert "is empty" in bucket.bucket(patient).found
    assert "404" in bucket.read(patient).found
    key = f"{tmp_path.name}/x"
    moto_server.client().put_object(Bucket=doctor_bucket, Key=key, Body=b"x")
    assert "holds objects" in bucket.bucket(patient).found
    assert "was read" in bucket.read(patient).found


@pytest.mark.parametrize(
    ("status", "code", "part"),
    [
        (404, "NoSuchBucket", "create the bucket"),
        (403, "AccessDenied", "s3:ListBucket"),
        (403, "InvalidAccessKeyId", "does not know"),
        (403, "SignatureDoesNotMatch", "secret key"),
        (400, "ExpiredToken", "renew"),
        (403, "RequestTimeTooSkewed", "clock"),
        (503, "SlowDown", "try again"),
    ],
)
def test_refused_listing_fails_with_a_remedy(
    make_patient: MakePatient, proxy: FaultProxy, status: int, code: str, part: str
) -> None:
    proxy.add(Rule(s3_error(status, code)))
    says(bucket.bucket(make_patient()), Verdict.FAIL, found=code, mend=part)


def test_bucket_of_another_region_is_named(make_patient: MakePatient, proxy: FaultProxy) -> None:
    elsewhere = {"x-amz-bucket-region": "eu-north-1"}
    proxy.add(Rule(s3_error(301, "PermanentRedirect", headers=elsewhere)))
    says(bucket.bucket(make_patient()), Verdict.FAIL, mend="eu-north-1")


def test_denied_reading_names_the_action(make_patient: MakePatient, proxy: FaultProxy) -> None:
    patient = make_patient()
    bucket.bucket(patient)
    proxy.add(Rule(s3_error(403, "AccessDenied")))
    says(bucket.read(patient), Verdict.FAIL, mend="s3:GetObject")


def test_absent_object_that_is_denied_names_the_right_to_list(
    make_patient: MakePatient, proxy: FaultProxy, moto_server: MotoServer
) -> None:
    patient = make_patient()
    proxy.add(Rule(s3_error(403, "AccessDenied"), target="s3ec-probe/absent"))
    says(bucket.read(patient), Verdict.FAIL, mend="s3:ListBucket on the bucket itself")
    patient.first_object = "there"
    moto_server.client().put_object(Bucket=patient.settings.bucket, Key="there", Body=b"x")
    says(bucket.read(patient), Verdict.WARN, found="missing s3:ListBucket")


@pytest.fixture
def wildcard_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name below `localhost` leads to this machine, as many resolvers have it."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        local = isinstance(host, str) and host.endswith("localhost")
        return real("127.0.0.1" if local else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.fixture
def no_wildcard_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name below `localhost` is known, as without a wildcard record."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(host, str) and host.endswith(".localhost"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


OnLocalhost = Callable[..., CheckContext]


@pytest.fixture
def on_localhost(make_patient: MakePatient, proxy: FaultProxy) -> OnLocalhost:
    """Patients whose endpoint has a name."""
    url = proxy.url.replace("127.0.0.1", "localhost")
    return lambda **settings: make_patient(endpoint_url=url, **settings)


@pytest.mark.usefixtures("no_wildcard_dns")
def test_unreachable_virtual_host_is_an_unreachable_endpoint(on_localhost: OnLocalhost) -> None:
    says(
        bucket.endpoint(on_localhost(addressing_style="virtual")),
        Verdict.FAIL,
        mend="addressing_style",
    )


@pytest.mark.usefixtures("wildcard_dns")
def test_server_that_knows_only_path_style_gets_that_remedy(
    on_localhost: OnLocalhost, proxy: FaultProxy
) -> None:
    # In virtual style the bucket does not stand in the path.
    proxy.add(Rule(s3_error(404, "NoSuchBucket"), target=r"^/\?"))
    patient = on_localhost(addressing_style="virtual")
    bucket.endpoint(patient)
    says(
        bucket.bucket(patient),
        Verdict.FAIL,
        found="NoSuchBucket",
        mend="set `addressing_style` = `path`",
    )
