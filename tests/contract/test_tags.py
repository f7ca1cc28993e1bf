# SPDX-License-Identifier: Apache-2.0
"""What a real S3 server tells of weights that an engine streams from it."""

from __future__ import annotations

import pytest

from s3ec.errors import AccessError, ConfigError, S3ECError, UnavailableError
from s3ec.store import tags
from s3ec.testing.server import LocalS3


@pytest.fixture
def place(
    local_s3: LocalS3, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[LocalS3, str]:
    for name, value in local_s3.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RUNAI_STREAMER_S3_ENDPOINT", local_s3.endpoint_url)
    return local_s3, s3_bucket


def test_objects_below_a_folder_are_told_with_what_changes_when_they_are_replaced(
    place: tuple[LocalS3, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.store.botocore_s3.BotocoreStore.page_size", 2)
    server, bucket = place
    client = server.client()
    names = [f"model-{number}.safetensors" for number in range(5)]
    for name in names:
        client.put_object(Bucket=bucket, Key=f"vision/{name}", Body=name.encode())
    client.put_object(Bucket=bucket, Key="vision-2/model.safetensors", Body=b"another model")
    before = {name: rest for name, *rest in tags.tags_below(f"s3://{bucket}/vision/")}
    assert {name: nbytes for name, (nbytes, _) in before.items()} == {n: len(n) for n in names}
    client.put_object(Bucket=bucket, Key=f"vision/{names[3]}", Body=names[4].encode())
    after = {name: rest for name, *rest in tags.tags_below(f"s3://{bucket}/vision")}
    assert {name for name in names if after[name] != before[name]} == {names[3]}
    assert after[names[3]] == after[names[4]]  # of one content


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("s3://no-such-bucket-here/vision", AccessError),
        ("s3://x/vision", ConfigError),
        ("s3://", ConfigError),
    ],
)
def test_what_cannot_be_listed_says_why(
    url: str, fault: type[S3ECError], place: tuple[LocalS3, str]
) -> None:
    with pytest.raises(fault):
        tags.tags_below(url)


def test_a_server_that_does_not_answer_ends_the_wait(
    place: tuple[LocalS3, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_S3_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(tags, "_LONGEST_S", 0.2)
    # Named by the server if there was time for one try, else by the time alone.
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9|no whole listing"):
        tags.tags_below(f"s3://{place[1]}/vision")
