# SPDX-License-Identifier: Apache-2.0
"""A tenant's secret: read from where the setting points, shown nowhere, in every name."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from s3ec.cli.app import app
from s3ec.config import load_settings
from s3ec.errors import ConfigError
from s3ec.identity import KeyPolicy, Namespace, is_object_name, key_of_header, make_key, naming_of
from s3ec.node import Node
from s3ec.settings import Settings
from s3ec.tenant import Tenant
from s3ec.testing.memory_store import MemoryBucket, MemoryStore

SECRET = b"0123456789abcdef-of-acme"
OURS, THEIRS = Tenant(SECRET), Tenant(b"another secret of 16 bytes or more")
HASH = hashlib.sha256(b"picture").hexdigest()
IDENTIFIERS = ["picture.png", HASH, f"my-lora:{HASH}", f"My Lora:{HASH}", f":{HASH}", "a:b", "é"]


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


# -- where the secret is -----------------------------------------------------------------------


def test_variable_and_file_give_the_same_tenant(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_SECRET", SECRET.decode())
    by_file = Tenant.read(f"file:{secret_file}")
    by_variable = Tenant.read("env:ACME_SECRET")
    assert by_file is not None
    assert by_variable is not None
    assert by_file.id == by_variable.id == OURS.id
    assert Tenant.read(None) is None


def test_only_one_newline_is_cut_off(secret_file: Path) -> None:
    secret_file.write_bytes(SECRET + b"\n\n")
    read = Tenant.read(f"file:{secret_file}")
    assert read is not None
    assert read.id == Tenant(SECRET + b"\n").id != OURS.id


@pytest.mark.parametrize(
    "reference",
    ["", "hunter2-hunter2-hunter2", "env:", "env:A B", "env:1A", "file:", "file:secret",
     "file:~/secret", "file:/a\nb", "ENV:A", "file:/a\0b", "env:A\n"],
)  # fmt: skip
def test_what_is_no_reference_is_refused_without_repeating_it(
    reference: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="env:VARIABLE") as caught:
        load_settings({"bucket": "corpus", "cache_dir": tmp_path, "tenant_key": reference})
    assert caught.value.field == "tenant_key"
    assert len(reference) < 6 or reference not in str(caught.value)


@pytest.mark.parametrize("secret", [b"", b"\n", b"fifteen bytes..\n"])
def test_a_short_secret_is_refused_with_its_length_alone(secret_file: Path, secret: bytes) -> None:
    secret_file.write_bytes(secret)
    with pytest.raises(ConfigError, match="16 are the least; make one") as caught:
        Tenant.read(f"file:{secret_file}")
    assert caught.value.field == "tenant_key"
    assert "fifteen" not in str(caught.value)


@pytest.mark.parametrize("what", ["absent file", "folder", "huge file", "unset variable"])
def test_a_place_without_a_secret_is_named(tmp_path: Path, what: str) -> None:
    path = tmp_path / "there"
    if what == "folder":
        path.mkdir()
    elif what == "huge file":
        path.write_bytes(b"x" * 100_000)
    reference, named = f"file:{path}", str(path)
    if what == "unset variable":
        reference, named = "env:ACME_SECRET", "ACME_SECRET is not set; set it"
    with pytest.raises(ConfigError, match=named) as caught:
        Tenant.read(reference)
    assert caught.value.field == "tenant_key"


def test_the_secret_is_shown_nowhere(
    secret_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"bucket": "corpus", "cache_dir": str(tmp_path), "tenant_key": f"file:{secret_file}"}
    settings = load_settings(given).settings
    naming = naming_of(settings)
    with caplog.at_level(logging.DEBUG):
        node = node_of(tmp_path, f"file:{secret_file}", OURS.id)
        node.close(5)
    shown = CliRunner().invoke(app, ["config", "show", "--config", json.dumps(given)])
    assert shown.exit_code == 0, shown.output
    assert f"file:{secret_file}" in shown.output
    assert naming.tenant is not None
    everything = [
        *(repr(settings), settings.model_dump_json(), repr(naming), repr(naming.tenant)),
        *(str(naming.make_key(HASH)), caplog.text, shown.output),
        *(repr(getattr(node, name)) for name in vars(node)),
    ]
    assert [text for text in everything if SECRET.decode() in text or SECRET.hex() in text] == []
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(naming.tenant)


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("identifier", IDENTIFIERS)
def test_names_need_the_secret_and_say_nothing_of_the_identifier(identifier: str) -> None:
    ours, theirs = make_key(identifier, OURS), make_key(identifier, THEIRS)
    plain = make_key(identifier)
    assert ours is not None
    assert theirs is not None
    assert plain is not None
    assert len({ours.name, theirs.name, plain.name}) == 3
    assert len({ours.digest, theirs.digest, plain.digest}) == 3
    for text in (ours.name, ours.stored):
        assert HASH not in text
        assert "lora" not in text
        assert hashlib.sha256(identifier.encode()).hexdigest() not in text
    assert ours.identifier == identifier  # vLLM's, in memory
    assert is_object_name(ours.name)


def test_a_tenants_names_are_the_same_in_every_release() -> None:
    """Entries in buckets are found by these; a change here empties every tenant's corpus."""
    tenant = Tenant(b"0123456789abcdef")
    assert tenant.id == "8fd6c3dba6161971"  # pragma: allowlist secret
    key = make_key(f"my-lora:{'a' * 64}", tenant)
    assert key is not None
    assert key.name == (
        "t-34f80347b1f456220694e3c9d4e6410de59219c96402e45e5b22fc18334ce133/"
        "0c/t-0c8451b76cdbf6a5bb699513c2ba6bf14d80cd1de0faca20e27f48ee061bcbf0.safetensors"
    )
    assert key.stored == (
        "t-34f80347b1f456220694e3c9d4e6410de59219c96402e45e5b22fc18334ce133:"
        "t-0c8451b76cdbf6a5bb699513c2ba6bf14d80cd1de0faca20e27f48ee061bcbf0"
    )


def test_one_adapters_entries_share_a_folder_and_other_adapters_have_others() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    names = [make_key(f"{lora}:{HASH}", OURS) for lora in ("one", "two")]
    again = make_key(f"one:{other}", OURS)
    folders = [key.name.split("/")[0] for key in (*names, again) if key is not None]
    assert folders[0] == folders[2] != folders[1]
    # The picture's part is another one under each adapter.
    assert len({key.name.split("/")[2] for key in names if key is not None}) == 2


@given(st.text(max_size=80), st.text(max_size=80))
def test_two_identifiers_have_two_names_of_one_form(one: str, other: str) -> None:
    first, second = make_key(one, OURS), make_key(other, OURS)
    for key in (first, second):
        assert key is None or (is_object_name(key.name) and key.name.isascii())
    if one != other and first is not None and second is not None:
        assert first.name != second.name


@pytest.mark.parametrize("identifier", IDENTIFIERS)
@pytest.mark.parametrize("tenant", [None, OURS])
def test_an_entry_is_recognised_by_its_header_without_the_secret(
    identifier: str, tenant: Tenant | None
) -> None:
    key = make_key(identifier, tenant)
    assert key is not None
    found = key_of_header(key.stored, key.digest)
    assert found is not None
    assert (found.name, found.digest, found.stored) == (key.name, key.digest, key.stored)
    assert found.identifier == ("" if tenant else identifier)
    assert key_of_header(key.stored, bytes(16)) is None
    assert key_of_header(f"{key.stored}x", key.digest) is None


def test_a_client_that_spells_a_tenants_name_gets_neither_it_nor_its_digest() -> None:
    key = make_key(f"lora:{HASH}", OURS)
    assert key is not None
    for tenant in (None, OURS, THEIRS):
        for text in (key.stored, key.stored.partition(":")[2], key.name, f"{key.stored[2:66]}"):
            poison = make_key(text, tenant)
            assert poison is not None
            assert poison.name != key.name
            assert poison.digest != key.digest


@pytest.mark.parametrize(
    "name",
    ["{f}/{a}/{h}.safetensors", "{f}/{a}/x-{h}.safetensors", "lora/{a}/t-{h}.safetensors",
     "{f}:{f}/{a}/t-{h}.safetensors", "zz/t-{h}.safetensors", "{a}/t-{h}0.safetensors",
     "{f}/{f}/{a}/t-{h}.safetensors", "t-abc/{a}/t-{h}.safetensors", "{f}/{a}/t-{h}.tmp"],
)  # fmt: skip
def test_names_that_no_tenant_makes_are_junk(name: str) -> None:
    made = name.format(f=f"t-{HASH}", a=HASH[:2], h=HASH)
    assert not is_object_name(made)
    assert is_object_name(f"t-{HASH}/{HASH[:2]}/t-{HASH}.safetensors")


def test_what_has_no_key_without_a_tenant_has_none_with_one() -> None:
    for identifier in ("", "renderer0-mm-1-image-0", "\ud800", "x" * 5000):
        assert make_key(identifier, OURS) is None


# -- who may choose ----------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", [None, OURS])
def test_identifiers_of_clients_have_no_key_where_they_are_not_trusted(
    tenant: Tenant | None,
) -> None:
    naming = KeyPolicy(tenant, trust_client_ids=False)
    for identifier in (HASH, f"my-lora:{HASH}"):
        assert naming.make_key(identifier) == make_key(identifier, tenant)
        assert not naming.refuses(identifier)
    for identifier in ("picture.png", HASH.upper(), f"{HASH}x", f"x-{HASH}", "x" * 10_000_000):
        assert naming.make_key(identifier) is None
        assert naming.refuses(identifier)
    assert not KeyPolicy().refuses("picture.png")


# -- nodes ---------------------------------------------------------------------------------------


def node_of(folder: Path, reference: str | None, tenant_id: str | None) -> Node:
    descriptor = {"model": "tiny"} | ({"tenant": tenant_id} if tenant_id else {})
    settings = Settings.model_validate(
        {
            "bucket": "corpus",
            "cache_dir": folder / "tier",
            "min_free_bytes": "0",
            "tenant_key": reference,
        }
    )
    name = Namespace.from_descriptor(descriptor)
    return Node(settings, name, store=MemoryStore(MemoryBucket()))


@pytest.mark.parametrize("tenant_id", [None, THEIRS.id])
def test_a_node_refuses_the_namespace_of_another_tenant(
    secret_file: Path, tmp_path: Path, tenant_id: str | None
) -> None:
    with pytest.raises(ConfigError, match="another `tenant_key`") as caught:
        node_of(tmp_path, f"file:{secret_file}", tenant_id)
    assert caught.value.field == "tenant_key"
    with pytest.raises(ConfigError, match="another `tenant_key`"):
        node_of(tmp_path, None, OURS.id)
