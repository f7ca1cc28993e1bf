# SPDX-License-Identifier: Apache-2.0
"""Settings: who wins, what is refused, and that nothing secret is repeated."""

from __future__ import annotations

import json
import logging
import os
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from s3ec import config
from s3ec.config import load_settings
from s3ec.errors import ConfigError
from s3ec.settings import Settings, settings_table

SECRET = "wJalrXUtnFEMI/K7MDENG"  # never to be found in any message
ORIGIN = "ec_connector_extra_config"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("S3EC_"):
            monkeypatch.delenv(name)


def refusal(extra: dict[str, Any] | None = None, /, **values: Any) -> ConfigError:
    given = {"bucket": "corpus", **values} if extra is None else extra
    with pytest.raises(ConfigError) as caught:
        load_settings(given)
    everything = "".join(traceback.format_exception(caught.value))
    assert SECRET not in everything
    return caught.value


def settings_of(**values: Any) -> Settings:
    return load_settings({"bucket": "corpus", **values}).settings


# -- where values come from --------------------------------------------------------------------


def test_defaults_need_only_a_bucket() -> None:
    loaded = load_settings({"bucket": "corpus"})
    assert loaded.settings.bucket == "corpus"
    assert loaded.settings.cache_bytes == 50 * 2**30
    assert loaded.settings.defer_timeout_s == 2.0
    assert loaded.origins.pop("bucket") == ORIGIN  # type: ignore[attr-defined]
    assert set(loaded.origins.values()) == {"default"}


def test_every_setting_can_come_from_every_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("pem")
    values = {
        "bucket": "corpus",
        "prefix": "/a/b/",
        "endpoint_url": "http://10.0.0.7:8333",
        "region": "eu-west-1",
        "addressing_style": "path",
        "allow_http": "true",
        "profile": "p",
        "ca_bundle": str(bundle),
        "replicas": '[{"bucket": "near"}]',
        "sse": "aws:kms",
        "sse_kms_key_id": "key",
        "requester_pays": "true",
        "cache_dir": str(tmp_path),
        "cache_bytes": "3MiB",
        "min_free_bytes": "1KiB",
        "transport": "aioboto3",
        "max_concurrency": "7",
        "wait": "never",
        "defer_timeout_s": "0",
        "connect_timeout_s": "1.5",
        "read_timeout_s": "2.5",
        "hedge": "false",
        "index_refresh_s": "3.5",
        "model_identity": "m",
        "weights": "name",
        "encoder_epoch": "2",
        "live_weights": "ignore",
        "tenant_key": "env:SOME_SECRET",
        "trust_client_ids": "false",
        "verify": "download",
        "save": "worth",
        "save_overflow": "drop",
        "save_queue_bytes": "1GB",
        "log_level": "DEBUG",
    }
    assert set(values) == set(Settings.model_fields) - {"url"}  # in place of some of them
    by_json = load_settings(values).settings
    for name, value in values.items():
        monkeypatch.setenv(f"S3EC_{name.upper()}", value)
    by_environment = load_settings()
    assert by_json == by_environment.settings
    assert by_json.prefix == "a/b"
    assert by_json.cache_bytes == 3 * 2**20
    assert by_json.save_queue_bytes == 10**9
    assert {by_environment.origins[name].split()[0] for name in values} == {"env"}


def test_the_json_wins_over_a_variable_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3EC_BUCKET", "environment")
    monkeypatch.setenv("S3EC_PREFIX", "environment")
    loaded = load_settings({"bucket": "json"})
    assert (loaded.settings.bucket, loaded.settings.prefix) == ("json", "environment")
    assert loaded.origins["bucket"] == ORIGIN
    assert loaded.origins["prefix"] == "env S3EC_PREFIX"
    assert loaded.origins["region"] == "default"
    assert set(loaded.origins) == set(Settings.model_fields)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3EC_REGION", "")
    loaded = load_settings({"bucket": "corpus"})
    assert loaded.settings.region is None
    assert loaded.origins["region"] == "default"


def test_an_explicit_null_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3EC_REGION", "eu-west-1")
    loaded = load_settings({"bucket": "corpus", "region": None})
    assert loaded.settings.region is None
    assert loaded.origins["region"] == ORIGIN


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("cache_byte", "cache_bytes"),
        ("endpoint", "endpoint_url"),
        ("Bucket", "bucket"),
        ("bucket_name", "bucket"),
        ("defer_timeout", "defer_timeout_s"),
        ("concurrency", "max_concurrency"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(name: str, near: str) -> None:
    error = refusal(**{name: 1})
    assert f"unknown setting `{name}`" in str(error)
    assert f"did you mean `{near}`?" in str(error)
    assert error.field == name


@pytest.mark.parametrize("name", [1, None, "", "a" * 1000])
def test_a_strange_name_is_refused(name: Any) -> None:
    refusal({"bucket": "corpus", name: 1})


@pytest.mark.parametrize(
    "name",
    [
        "aws_access_key_id",
        "AWS_SECRET_ACCESS_KEY",
        "aws_session_token",
        "access_key",
        "secret_key",
        "secretKey",
        "accessKeyId",
        "password",
        "credentials",
    ],
)
def test_credentials_are_refused_and_not_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refusal(**{name: SECRET})
    assert "credentials are not accepted" in str(error)
    assert "because vLLM logs" in str(error)
    assert error.field == name
    monkeypatch.setenv(f"S3EC_{name.upper()}", SECRET)
    error = refusal()
    assert str(error).startswith(f"environment variable S3EC_{name.upper()}: ")
    # What vLLM logs is no reason here: it logs no variable.
    assert "vLLM" not in str(error)
    assert error.field == name.lower()


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("S3EC_BUCKETS", "S3EC_BUCKET"),
        ("S3EC_CACHE_BYTE", "S3EC_CACHE_BYTES"),
        ("S3EC_ENDPOINTURL", "S3EC_ENDPOINT_URL"),
        ("S3EC_DEFER_TIMEOUT", "S3EC_DEFER_TIMEOUT_S"),
    ],
)
def test_a_misspelt_variable_is_refused(
    variable: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, SECRET)
    assert f"{variable}; did you mean {near}?" in str(refusal())


def test_a_file_in_a_variable_that_nothing_reads_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("S3EC_CONFIG", "/etc/s3ec.json")
    config._warn_of_no_file.cache_clear()
    for _ in range(2):
        settings_of()
    (message,) = caplog.messages
    assert "S3EC_CONFIG is set, and nothing reads it: give the settings in the JSON" in message


def test_what_kubernetes_sets_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "SERVICE_HOST SERVICE_PORT SERVICE_PORT_HTTP PORT "
        "PORT_8333_TCP PORT_8333_TCP_ADDR PORT_8333_TCP_PORT PORT_8333_TCP_PROTO TEST_WEED"
    )
    for name in names.split():
        monkeypatch.setenv(f"S3EC_{name}", "tcp://10.0.0.1:8333")
    assert settings_of().bucket == "corpus"


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("bucket", "", "3 or more"),
        ("bucket", "ab", "3 or more"),
        ("bucket", "gs://corpus", "a URL goes into `url`"),
        ("bucket", "corpus/folder", "`prefix`"),
        ("bucket", "cor pus", "letters"),
        ("bucket", "corpus\n", "letters"),
        ("bucket", 7, "(int, from ec_connector_extra_config): no text; write it in quotes"),
        ("bucket", None, "(NoneType, from"),
        ("prefix", "a//b", "`..` parts"),
        ("prefix", "../b", "`..` parts"),
        ("prefix", "a/./b", "`..` parts"),
        ("prefix", "a\nb", "printable"),
        ("prefix", "a\ud800", "printable"),
        ("prefix", "\u00e9" * 300, "512 bytes"),
        ("endpoint_url", "127.0.0.1:8333", "http://host:port"),
        ("endpoint_url", "ftp://host", "http://host:port"),
        ("endpoint_url", "http://", "http://host:port"),
        ("endpoint_url", "http://:80", "http://host:port"),
        ("endpoint_url", "", "http://host:port"),
        ("endpoint_url", f"https://user:{SECRET}@host", "no credentials"),
        ("endpoint_url", f"https://{SECRET}@host", "no credentials"),
        ("endpoint_url", f"https://:{SECRET}@host", "no credentials"),
        ("endpoint_url", "https://@host", "no credentials"),
        ("endpoint_url", "http://host/a//b", "`bucket`"),
        ("endpoint_url", "http://host/a/../b", "`bucket`"),
        ("endpoint_url", "http://host/a%2fb", "`bucket`"),
        ("endpoint_url", "http://host?x=1", "host and port"),
        ("endpoint_url", "http://host#x", "host and port"),
        ("endpoint_url", "http://host:99999", "port"),
        ("endpoint_url", "http://host:x", "port"),
        ("endpoint_url", "http://[::1", "IPv6"),
        ("endpoint_url", "http://ho st", "http://host:port"),
        ("endpoint_url", "http://host\n", "http://host:port"),
        ("endpoint_url", "http://host\r\nX-Header: 1", "http://host:port"),
        ("addressing_style", "virtual-host", "'virtual'"),
        ("ca_bundle", "/nowhere/ca.pem", "no such file; give the path of a PEM file"),
        ("ca_bundle", "/" + "c" * 300, "no such file; give the path of a PEM file"),
        ("sse", "kms", "'aws:kms'"),
        ("encoder_epoch", "a b", "a number, or up to 64 letters"),
        ("encoder_epoch", "x" * 65, "a number, or up to 64 letters"),
        ("encoder_epoch", "../2", "a number, or up to 64 letters"),
        ("encoder_epoch", 2.5, "a number, or up to 64 letters"),
        ("encoder_epoch", True, "a number, or up to 64 letters"),
        ("encoder_epoch", None, "a number, or up to 64 letters"),
        ("cache_dir", "relative/folder", "absolute"),
        ("cache_dir", "", "absolute"),
        ("cache_dir", "~nobody-of-this-name/x", "`cache_dir`"),
        ("cache_bytes", 0, "greater than 0"),
        ("cache_bytes", "-1", "byte"),
        ("cache_bytes", "50 bananas", "byte"),
        ("min_free_bytes", -1, "byte"),
        ("transport", "obstor", "'aioboto3'"),
        ("max_concurrency", 0, "greater than or equal to 1"),
        ("max_concurrency", 257, "less than or equal to 256"),
        (
            "max_concurrency",
            "many",
            "(str, from ec_connector_extra_config): no whole number; write",
        ),
        ("max_concurrency", 1.5, "(float, from ec_connector_extra_config): no whole number; write"),
        ("max_concurrency", [1], "(list, from ec_connector_extra_config): no whole number; write"),
        ("replicas", 1, "no list; write it as [{'bucket'"),
        ("replicas", [{"bucket": "near", "region": "\ud800"}], "`replicas` 1, `region` (str, from"),
        ("replicas", ["corpus-eu"], "`replicas` 1 (str, from ec_connector_extra_config): no table"),
        ("model_identity", "", "it must have at least 1"),
        ("hedge", "perhaps", "neither true nor false; write one"),
        ("defer_timeout_s", -0.1, "greater than or equal to 0"),
        ("defer_timeout_s", 61, "less than or equal to 60"),
        ("defer_timeout_s", float("nan"), "it must be less than or equal to 60"),
        ("defer_timeout_s", "2 s", "no number; write it as digits"),
        ("connect_timeout_s", 0, "greater than 0"),
        ("connect_timeout_s", float("nan"), "`connect_timeout_s`"),
        ("read_timeout_s", 601, "less than or equal to 600"),
        ("read_timeout_s", float("inf"), "`read_timeout_s`"),
        ("index_refresh_s", 0, "greater than or equal to 0.1"),
        ("index_refresh_s", float("nan"), "`index_refresh_s`"),
        ("index_refresh_s", "NaN", "`index_refresh_s`"),
        ("model_identity", "", "at least 1"),
        ("model_identity", "m" * 513, "at most 512"),
        ("save_overflow", "wait", "'block'"),
        ("save_queue_bytes", 0, "greater than 0"),
        ("log_level", "TRACE", "'DEBUG'"),
        ("log_level", {"level": SECRET}, "(dict, from"),
        ("url", "", "gs://BUCKET/PREFIX"),
        ("url", "/data", "gs://BUCKET/PREFIX"),
        ("url", "http://host/bucket", "no such kind of corpus"),
        ("url", "gs://x", "3 or more"),
        ("url", "gs://corpus:80/x", "3 or more"),
        ("url", f"gs://key:{SECRET}@corpus/x", "no credentials"),
        ("url", f"gs://corpus/x?sig={SECRET}", "%3F"),
        ("url", "gs://corpus/a/../b", "`..`"),
        ("url", "gs://corpus/a%2F..%2Fb", "`..`"),
        ("url", "gs://corpus/a%0Ab", "printable"),
        ("url", "gs://corpus/a\nb", "gs://BUCKET/PREFIX"),
        ("url", "file:///", "whole file system"),
        ("url", "file://data/x", "three slashes"),
        ("url", "file:///data/../etc", "`..`"),
        ("url", "file:///%FF", "utf-8"),
        ("url", 7, "(int, from"),
    ],
)
def test_an_impossible_value_is_refused_with_its_field(name: str, value: Any, says: str) -> None:
    error = refusal(**{name: value})
    assert error.field == name
    assert f"`{name}`" in str(error)
    assert says in str(error)


def test_a_missing_bucket_is_said_in_words() -> None:
    error = refusal({})
    assert error.field == "bucket"
    assert "`bucket` is required" in str(error)


def test_all_faults_are_named_at_once() -> None:
    message = str(refusal(max_concurrency=0, log_level="x", cache_bytes="y"))
    assert all(name in message for name in ("max_concurrency", "log_level", "cache_bytes"))


@pytest.mark.parametrize("name", Settings.model_fields)
def test_half_a_surrogate_pair_is_named_with_its_field(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = f"`{name}` \\(str, from .*\\): printable characters only"
    assert re.search(says, str(refusal({"bucket": "corpus", name: "/a\ud800"})))
    monkeypatch.setenv(f"S3EC_{name.upper()}", "/a\udcff")  # a byte that is no UTF-8
    assert re.search(says, str(refusal({} if name == "bucket" else {"bucket": "corpus"})))


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name != "bucket"])
def test_no_message_repeats_a_value(name: str) -> None:
    """Somebody will paste a key into the wrong field."""
    try:
        load_settings({"bucket": "corpus", name: {"x": SECRET}})
    except ConfigError as exc:
        error = exc
    assert SECRET not in "".join(traceback.format_exception(error))
    assert "dict" in str(error)


def test_the_environment_is_named_as_the_origin_of_a_bad_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3EC_CACHE_BYTES", "lots")
    assert "`cache_bytes` (str, from env S3EC_CACHE_BYTES)" in str(refusal())


def test_impossible_combinations_are_refused() -> None:
    assert "`sse_kms_key_id` needs" in str(refusal(sse_kms_key_id="key"))
    assert "`sse_kms_key_id` needs" in str(refusal(sse_kms_key_id="key", sse="AES256"))
    arn = "arn:aws:s3:eu-west-1:1:accesspoint/corpus"
    assert "virtual" in str(refusal(bucket=arn, addressing_style="virtual"))
    assert settings_of(bucket=arn).bucket == arn
    for region in ("", "eu-west-1"):
        arn = f"arn:aws:s3:{region}:123456789012:accesspoint/mfzwi23gnjvgw.mrap"
        assert "access point of one region" in str(refusal(bucket=arn))
    assert settings_of(sse="aws:kms", sse_kms_key_id="key").sse_kms_key_id == "key"


@pytest.mark.parametrize(
    ("url", "kept", "bucket", "prefix"),
    [
        ("gs://corpus", "gs://corpus", "corpus", ""),
        ("gs://corpus/a/b/", "gs://corpus/a/b", "corpus", "a/b"),
        ("az://box/gr%C3%B6%C3%9Fe", "az://box/gr%C3%B6%C3%9Fe", "box", "größe"),
        ("file:///data/a b", "file:///data/a%20b", "", "/data/a b"),
        ("file:///data/a%20b/", "file:///data/a%20b", "", "/data/a b"),
        ("file:///data/a@b", "file:///data/a%40b", "", "/data/a@b"),
    ],
)
def test_a_url_takes_the_place_of_the_bucket(url: str, kept: str, bucket: str, prefix: str) -> None:
    settings = load_settings({"url": url}).settings
    assert (settings.url, settings.bucket, settings.prefix) == (kept, "", "")
    corpus = settings.corpus
    assert (corpus.scheme, corpus.bucket, corpus.prefix) == (url[: url.index(":")], bucket, prefix)
    assert load_settings(settings.model_dump(mode="json")).settings == settings


def test_an_s3_url_is_another_way_to_write_bucket_and_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3EC_URL", "s3://corpus/a/b/")
    loaded = load_settings({"endpoint_url": "http://127.0.0.1:1"})
    chosen = loaded.settings
    assert (chosen.url, chosen.bucket, chosen.prefix) == (None, "corpus", "a/b")
    assert loaded.origins["bucket"] == loaded.origins["prefix"] == "env S3EC_URL"
    assert str(chosen.corpus) == "s3://corpus/a/b"
    error = refusal({"bucket": "corpus"})
    assert error.field == "bucket"
    assert "`url` 's3://corpus/a/b/' (from env S3EC_URL); remove one" in str(error)
    monkeypatch.delenv("S3EC_URL")
    assert load_settings({"url": "s3://corpus/a"}).settings.prefix == "a"
    assert refusal({"url": "s3://corpus/a", "prefix": "b"}).field == "prefix"
    assert "a URL goes into `url`" in str(refusal({"bucket": "s3://corpus/a"}))
    error = refusal({"url": "s3://x"})
    assert error.field == "url"
    assert "3 or more" in str(error)


@pytest.mark.parametrize(
    ("variables", "options", "corpus"),
    [
        ({"BUCKET": "corpus", "REGION": "r"}, {"url": "file:///data"}, "file:///data"),
        ({"URL": "file:///data"}, {"bucket": "corpus"}, "s3://corpus"),
        ({"URL": "s3://other/a"}, {"bucket": "corpus"}, "s3://corpus"),
        ({"URL": "s3://other/a"}, {"url": "s3://corpus/b"}, "s3://corpus/b"),
        ({"BUCKET": "other", "PREFIX": "a"}, {"bucket": "corpus"}, "s3://corpus/a"),
        ({"BUCKET": "other", "PREFIX": "a"}, {"url": "s3://corpus/b"}, "s3://corpus/b"),
    ],
)
def test_a_place_in_an_option_wins_over_one_in_another_form(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    options: dict[str, str],
    corpus: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"S3EC_{name}", value)
    loaded = load_settings({}, options=options)
    assert str(loaded.settings.corpus) == corpus
    (name,) = options
    assert loaded.origins["url" if corpus.startswith("file") else "bucket"] == f"--{name}"


def test_a_place_in_the_json_that_contradicts_a_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3EC_URL", "file:///data")
    assert "remove one of the two" in str(refusal({"bucket": "corpus"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket", "corpus"),
        ("prefix", "a"),
        ("endpoint_url", "http://127.0.0.1:1"),
        ("region", "eu-west-1"),
        ("addressing_style", "path"),
        ("profile", "p"),
        ("sse", "AES256"),
    ],
)
def test_a_url_and_a_setting_of_s3_are_refused_together(name: str, value: str) -> None:
    error = refusal({"url": "file:///data", name: value})
    assert error.field == name
    assert "does not go together with `url`; remove one" in str(error)


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ([{"bucket": "corpus"}], "`replicas` 1, `bucket`: the very bucket of the corpus itself"),
        ([{"bucket": "corpus", "region": "eu-west-1"}], "the very bucket of the corpus itself"),
        (
            [{"bucket": "corpus", "endpoint_url": "https://s3.eu-west-1.amazonaws.com"}],
            "the very bucket of the corpus itself; remove it",
        ),
        ([{"bucket": "near"}, {"bucket": "near"}], "`replicas` 2, `bucket`: the very bucket of `r"),
        ([{"bucket": "near"}, {"bucket": "near", "prefix": "a"}], "rename one"),
        ([{"url": "rediss://a:1"}, {"url": "rediss://a:1/2"}], "`replicas` 2, `url`: named as"),
    ],
)
def test_a_place_twice_is_refused(replicas: list[dict[str, str]], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        load_settings({"bucket": "corpus", "replicas": replicas})
    assert caught.value.field == "replicas"


def test_another_server_or_folder_is_another_place() -> None:
    server = {"bucket": "corpus", "endpoint_url": "http://127.0.0.1:9000"}
    load_settings({"bucket": "corpus", "replicas": [server, {"bucket": "near"}]})
    load_settings({"bucket": "corpus", "replicas": [{"bucket": "corpus", "prefix": "a"}]})
    with pytest.raises(ConfigError, match="the very bucket"):
        load_settings({**server, "replicas": [server]})


@pytest.mark.parametrize(
    ("replica", "says"),
    [
        ({"url": "rediss://u:open-sesame@a"}, "`replicas` 1, `url`"),
        ({"url": "rediss://a", "password": "open-sesame"}, "`replicas` 1, `password`"),
        (
            {"bucket": "near", "endpoint_url": "https://key:open-sesame@a"},
            "`endpoint_url`: no cred",
        ),
        ({"bucket": "near", "aws_secret_access_key": "open-sesame"}, "no key holds credentials"),
    ],
)
@pytest.mark.parametrize("where", ["json", "env"])
def test_a_replica_holds_no_secret(
    replica: dict[str, str], says: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"bucket": "corpus"}
    if where == "json":
        given["replicas"] = [replica]
    else:
        monkeypatch.setenv("S3EC_REPLICAS", json.dumps([replica]))
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        load_settings(given)
    assert "sesame" not in str(caught.value)


def test_a_url_and_the_sdk_are_refused_together() -> None:
    assert "`url` needs `obstore`" in str(refusal({"url": "gs://corpus", "transport": "aioboto3"}))


def test_the_endpoint_loses_its_trailing_slash() -> None:
    assert settings_of(endpoint_url="https://host:8333/").endpoint_url == "https://host:8333"


@pytest.mark.parametrize(
    "url",
    [
        "http://minio:9000",
        "http://10.0.0.7:9000",
        "http://0.0.0.0:9000",
        "http://[fd00::7]:9000",
        # Names and spellings that lead to this machine at most for some resolvers.
        "HTTP://localhost.example.org",
        "http://minio.localhost:9000",
        "http://127.0.0.1.example.org",
        "http://127.1:9000",
        "http://2130706433",
    ],
)
def test_plain_http_to_another_machine_needs_leave(url: str) -> None:
    exc = refusal(endpoint_url=url)
    assert exc.field == "allow_http"
    assert "`endpoint_url` is http://" in str(exc)
    assert "https://" in str(exc)
    assert settings_of(endpoint_url=url, allow_http=True).endpoint_url == url
    assert settings_of(endpoint_url=url.lower().replace("http:", "https:")).allow_http is False


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8333", "http://127.8.9.1", "http://[::1]:9000", "http://LOCALHOST:9"]
)
def test_plain_http_to_this_machine_needs_no_leave(url: str) -> None:
    assert settings_of(endpoint_url=url).endpoint_url == url


# -- the cache folder --------------------------------------------------------------------------


def test_the_cache_folder_is_below_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert settings_of().cache_dir == tmp_path / "x" / "s3ec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_of().cache_dir == tmp_path / ".cache" / "s3ec"
    assert settings_of(cache_dir="~/tier").cache_dir == tmp_path / "tier"


def test_a_relative_xdg_cache_home_is_ignored_as_its_standard_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_of().cache_dir == tmp_path / ".cache" / "s3ec"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # where it finds nothing
    assert "set `cache_dir`" in str(refusal())
    assert settings_of(cache_dir="/tmp/s3ec").cache_dir == Path("/tmp/s3ec")


# -- what settings give away -------------------------------------------------------------------


def test_the_sdks_credentials_are_in_no_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    with caplog.at_level(logging.DEBUG):
        loaded = load_settings({"bucket": "corpus"})
    texts = [repr(loaded), str(loaded.settings), loaded.settings.model_dump_json(), caplog.text]
    assert not any(SECRET in text for text in texts)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com"}, None),
        ({"endpoint_url": "https://S3.EU-WEST-1.AMAZONAWS.COM:443"}, None),
        ({"endpoint_url": "https://s3.cn-north-1.amazonaws.com.cn"}, None),
        ({"endpoint_url": "http://127.0.0.1:8333"}, True),
        ({"endpoint_url": "https://minio"}, True),
        ({"endpoint_url": "https://amazonaws.com.example.org"}, True),
        ({"endpoint_url": "https://notamazonaws.com"}, True),
        # A customer's servers, below names of Amazon's.
        ({"endpoint_url": "https://minio-1a2b.elb.us-east-1.amazonaws.com"}, True),
        ({"endpoint_url": "https://s3-minio-1234.us-east-1.elb.amazonaws.com"}, True),
        ({"endpoint_url": "https://ec2-3-4-5-6.compute-1.amazonaws.com:9000"}, True),
        ({"endpoint_url": "https://s3.ec2-3-4-5-6.compute-1.amazonaws.com:9000"}, True),
        ({"endpoint_url": "https://1a2b.execute-api.us-east-1.amazonaws.com"}, True),
        ({"addressing_style": "path"}, True),
        ({"addressing_style": "virtual"}, False),
        ({"endpoint_url": "https://minio", "addressing_style": "virtual"}, False),
    ],
)
def test_path_style_is_taken_where_the_server_is_not_amazons(
    values: dict[str, str], expected: bool | None
) -> None:
    assert settings_of(**values).path_style is expected


def test_the_table_names_every_setting_once() -> None:
    table = settings_table()
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == [f"`{name}`" for name in Settings.model_fields]
    assert all(line.count("|") - line.count("\\|") == 4 for line in table.splitlines())
    assert "`50.0GiB`" in table
    assert all(field.description for field in Settings.model_fields.values())
