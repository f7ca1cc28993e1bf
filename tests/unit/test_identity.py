# SPDX-License-Identifier: Apache-2.0
"""Names: safe, distinct, and made for nothing that may not be shared."""

from __future__ import annotations

import hashlib
import json
import re
import tracemalloc
from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from s3ec.counters import Counters
from s3ec.errors import ConfigError
from s3ec.identity import (
    MAX_IDENTIFIER_BYTES,
    Key,
    KeyCache,
    KeyPolicy,
    Layout,
    Namespace,
    is_content_hash,
    is_namespace_name,
    is_object_name,
    is_request_scoped,
    make_key,
    modality_name,
)
from s3ec.tenant import Tenant
from tests.unit.tier.cases import key_of

A = hashlib.sha256(b"a").hexdigest()
B = hashlib.sha256(b"b").hexdigest()
SAFE = re.compile(r"[0-9a-z./-]+")

# What could be mistaken for something else, and what clients and attackers send.
TRICKY = [
    A,
    B,
    A.upper(),
    f" {A}",
    f"{A}\n",
    f"{A}\0",
    A[:-1],
    f"{A}0",
    f"x-{A}",
    f"{A[:2]}/{A}",
    f"{A[:2]}/{A}.safetensors",
    f"{A}.safetensors",
    f":{A}",
    f"::{A}",
    f"{A}:",
    f"{A}:{B}",
    f"{B}:{A}",
    f"lora:{A}",
    f"LORA:{A}",
    f"lora:{A.upper()}",
    f"lora:lora:{A}",
    f"lora :{A}",
    f"lora/:{A}",
    f"../lora:{A}",
    f"..:{A}",
    f".:{A}",
    f"ab:{A}",
    f"a:{A}",
    f"{A[:2]}:{A}",
    f"-lora:{A}",
    f"lora-:{A}",
    f"x-{B}:{A}",
    f"x-{hashlib.sha256(b'lora:x').hexdigest()}:{A}",
    f"{'l' * 63}:{A}",
    f"{'l' * 64}:{A}",
    "../../../../etc/passwd",
    "..",
    ".",
    "/",
    "//",
    "a/b",
    "a\\b",
    "..\\..\\windows",
    "%2e%2e%2f",
    "%2e",
    "\0",
    "\n",
    "\r\n",
    "a\nb",
    "a",
    "A",
    "\u0430",  # Cyrillic, a twin of the Latin a
    "\u00e9",
    "e\u0301",  # the same letter to people
    "\u200b",
    "picture.png",
    "picture.PNG",
    "\U0001f600",
    "renderer",
    "renderer0-mm-1-image",
    "x" * 4096,
    "\u00e9" * 2048,
    # A client may send the digest of another client's name, or what its object is called.
    hashlib.sha256(b"picture.png").hexdigest(),
    f"x-{hashlib.sha256(b'picture.png').hexdigest()}",
]

identifiers = st.one_of(
    st.text(max_size=200),
    st.text(alphabet="0123456789abcdefABCDEF:/.x-\\%\0\n ", max_size=140),
    st.sampled_from(TRICKY),
    st.builds("{}:{}".format, st.text(max_size=80), st.sampled_from([A, B, A.upper()])),
)


# -- keys --------------------------------------------------------------------------------------


@given(identifiers)
def test_every_name_is_safe_short_and_recognised(identifier: str) -> None:
    key = make_key(identifier)
    if key is None:
        return
    assert SAFE.fullmatch(key.name)
    assert len(key.name) <= 66 + 1 + 2 + 1 + 66 + len(".safetensors")
    assert not any(part in ("", ".", "..") for part in key.name.split("/"))
    assert is_object_name(key.name)
    assert key.identifier == identifier
    assert len(key.digest) == 16


def test_tricky_identifiers_have_distinct_names_and_digests() -> None:
    names = {key_of(identifier).name for identifier in TRICKY}
    digests = {key_of(identifier).digest for identifier in TRICKY}
    assert len(names) == len(digests) == len(TRICKY) == len(set(TRICKY))
    assert len({name.lower() for name in names}) == len(TRICKY)  # file systems without case


@given(identifiers, identifiers)
@example("picture.png", hashlib.sha256(b"picture.png").hexdigest())
@example("picture.png", f"x-{hashlib.sha256(b'picture.png').hexdigest()}")
@example(f"Lora:{A}", f"lora:{A}")
@example(f":{A}", A)
def test_two_identifiers_have_two_names(one: str, other: str) -> None:
    first, second = make_key(one), make_key(other)
    if one != other and first is not None and second is not None:
        assert first.name != second.name
        assert first.digest != second.digest


def test_a_content_hash_keeps_its_name() -> None:
    assert key_of(A).name == f"{A[:2]}/{A}.safetensors"


def test_a_readable_adapter_becomes_a_folder() -> None:
    assert key_of(f"my-lora-2:{A}").name == f"my-lora-2/{A[:2]}/{A}.safetensors"


@pytest.mark.parametrize("lora", ["", "..", "a/b", "Up", "ab", "a", "a b", "x" * 64, "-a-", "a:b"])
def test_other_adapters_become_a_digest(lora: str) -> None:
    digest = hashlib.sha256(lora.encode()).hexdigest()
    assert key_of(f"{lora}:{A}").name == f"x-{digest}/{A[:2]}/{A}.safetensors"


@pytest.mark.parametrize("identifier", ["picture.png", f"{A}x", A.upper(), f"lora:{A[1:]}"])
def test_what_a_client_chose_is_hashed_and_marked(identifier: str) -> None:
    digest = hashlib.sha256(identifier.encode()).hexdigest()
    assert key_of(identifier).name == f"{digest[:2]}/x-{digest}.safetensors"


def test_a_name_is_the_same_in_every_release() -> None:
    """Entries in buckets are found by these; a change here empties every corpus."""
    assert key_of("picture.png").name == (
        "3e/x-3e68a4762c65bb1bb1b5d603f08bcc5525dd011a9e4de19b8a144a0a2f53e7d9.safetensors"
    )
    assert key_of("a" * 64).digest.hex() == "17b942761a1f8cc2dbe662bcee572603"


@pytest.mark.parametrize(
    "identifier",
    [
        "renderer0-mm-1-image-0",
        "renderer12-mm-345-video-67",
        "renderer-1-mm-1-image-0",
        "renderer0-mm-1-vision_chunk-0",
        "lora:renderer0-mm-1-image-0",
        "a:b\n:renderer0-mm-1-image-0",
        ":" * 4000 + ":renderer0-mm-1-image-0",
    ],
)
def test_a_counter_of_one_process_has_no_key(identifier: str) -> None:
    assert is_request_scoped(identifier)
    assert make_key(identifier) is None


@pytest.mark.parametrize(
    "identifier",
    ["renderer-mm-1-image-0", "xrenderer0-mm-1-image-0", "renderer0-mm-1-image-0:x", A],
)
def test_what_only_resembles_a_counter_has_a_key(identifier: str) -> None:
    assert not is_request_scoped(identifier)
    assert make_key(identifier) is not None


@pytest.mark.parametrize("identifier", ["", "\ud800", f"\udfff:{A}", "a\ud83d", "\ude00\ud83d"])
def test_what_no_utf8_can_hold_has_no_key(identifier: str) -> None:
    assert make_key(identifier) is None


@pytest.mark.parametrize("text", ["x", "\u00e9", "\U0001f600"])
def test_identifiers_end_at_the_limit_in_bytes(text: str) -> None:
    width = len(text.encode())
    assert make_key(text * (MAX_IDENTIFIER_BYTES // width)) is not None
    assert make_key(text * (MAX_IDENTIFIER_BYTES // width) + "x") is None
    assert make_key(text * 10_000_000) is None


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [(A, True), (f"lora:{A}", True), (A.upper(), False), ("cat", False), (f"{A}:x", False)],
)
def test_content_hashes_are_told_from_the_rest(identifier: str, expected: bool) -> None:
    assert is_content_hash(identifier) is expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        f"{A}.safetensors",
        f"{B[:2]}/{A}.safetensors",
        f"{A[:2]}/{A}",
        f"{A[:2]}/{A}.safetensors.tmp",
        f"{A[:2]}/{A}.safetensors/",
        f"/{A[:2]}/{A}.safetensors",
        f"{A[:2]}//{A}.safetensors",
        f"{A[:2]}/{A.upper()}.safetensors",
        f"{A[:2]}/{A}.safetensors\n",
        f"{A[:2]}/{A[:-1]}.safetensors",
        f"{A[:2]}/y-{A}.safetensors",
        f"../{A[:2]}/{A}.safetensors",
        f"Lora/{A[:2]}/{A}.safetensors",
        f"ab/{A[:2]}/{A}.safetensors",  # a fan-out folder is no adapter's
        f"a/{A[:2]}/{A}.safetensors",
        f"lora/{A[:2]}/x-{A}.safetensors",  # what clients choose has no adapter
        f"x-{B}/{A[:2]}/x-{A}.safetensors",
        f"one/two/{A[:2]}/{A}.safetensors",
        f"{A[:2]}/{A}.r1.safetensors",
        f"{A[:2]}/{A}.1.safetensors",
        f"{A[:2]}/.tmp-1-abc",
    ],
)
def test_junk_in_a_listing_is_no_object_name(name: str) -> None:
    assert not is_object_name(name)


# -- namespaces --------------------------------------------------------------------------------

DESCRIPTOR = {
    "model": "google/gemma-3-27b-it",
    "revision": None,
    "dtype": "bfloat16",
    "quantization": None,
    "encoder": {"vision_config": {"image_size": 896, "layers": [1, 2]}},
    "mm_processor_kwargs": {},
}
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_namespace_is_readable_and_recognised() -> None:
    namespace = Namespace.from_descriptor(DESCRIPTOR)
    assert re.fullmatch(r"google-gemma-3-27b-it-[0-9a-f]{16}", namespace.name)
    assert is_namespace_name(namespace.name)
    assert json.loads(namespace.to_json())["model"] == "google/gemma-3-27b-it"
    assert json.loads(namespace.to_json())["format"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": "google/gemma-3-27b-it/"},
        {"model": "google/gemma-3-27b-IT"},
        {"revision": "main"},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"encoder": {"vision_config": {"image_size": 895, "layers": [1, 2]}}},
        {"encoder": {"vision_config": {"image_size": 896, "layers": [2, 1]}}},
        {"encoder": {"vision_config": {"image_size": "896", "layers": [1, 2]}}},
        {"mm_processor_kwargs": {"max_pixels": 50176}},
        {"mm_processor_kwargs": {"do_resize": True}},
        {"mm_processor_kwargs": {"do_resize": 1}},
        {"mm_processor_kwargs": None},
        {"more": None},
    ],
)
def test_any_difference_makes_another_namespace(change: Mapping[str, object]) -> None:
    one = Namespace.from_descriptor(DESCRIPTOR)
    assert Namespace.from_descriptor({**DESCRIPTOR, **change}).name != one.name


@given(plain_json, plain_json)
def test_namespaces_are_equal_where_descriptors_are(one: object, other: object) -> None:
    first = Namespace.from_descriptor({"model": "m", "encoder": one})
    second = Namespace.from_descriptor({"encoder": other, "model": "m"})
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (first.name == second.name) is same


@given(st.text(min_size=1))
@example("/")
@example("../..")
@example("-" * 100)
@example("models/" + "x" * 300)
@example("模型")
@example("C:\\models\\gemma")
def test_every_model_string_makes_a_safe_namespace(model: str) -> None:
    name = Namespace.from_descriptor({"model": model}).name
    assert is_namespace_name(name)
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)
    assert len(name) <= 40 + 1 + 16


@pytest.mark.parametrize("descriptor", [{}, {"model": ""}, {"model": None}, {"model": 7}])
def test_a_descriptor_without_a_model_is_refused(descriptor: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match="model_identity") as caught:
        Namespace.from_descriptor(descriptor)
    assert caught.value.field == "model_identity"


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), object(), b"bytes", {1: "a", "b": 2}, {(1, 2): 3}],
    ids=["nan", "inf", "object", "bytes", "mixed keys", "tuple keys"],
)
def test_a_descriptor_that_is_not_plain_json_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="plain JSON"):
        Namespace.from_descriptor({"model": "m", "x": value})


@pytest.mark.parametrize(
    "name",
    ["", "gemma", "gemma-0123", f"../{'0' * 16}", f"Gemma-{'0' * 16}", f"-gemma-{'0' * 16}",
     f"gemma-{'0' * 16}\n", f"a/b-{'0' * 16}", f"{'a' * 64}-{'0' * 16}"],
)  # fmt: skip
def test_foreign_folders_are_no_namespaces(name: str) -> None:
    assert not is_namespace_name(name)


# -- layout ------------------------------------------------------------------------------------


def test_the_layout_of_a_namespace() -> None:
    layout = Layout("gemma-0123456789abcdef")
    assert layout.descriptor == "gemma-0123456789abcdef/namespace.json"
    assert layout.objects == "gemma-0123456789abcdef/objects/"
    assert layout.object(key_of(A)) == f"gemma-0123456789abcdef/objects/{A[:2]}/{A}.safetensors"
    assert layout.modality("image") == "gemma-0123456789abcdef/modality/image.json"
    assert layout.manifest == "gemma-0123456789abcdef/manifest/"


@given(st.text(), st.text())
@example("image", "Image")
@example("../namespace", "..")
def test_modalities_have_distinct_safe_names(one: str, other: str) -> None:
    names = [modality_name(one), modality_name(other)]
    assert all(re.fullmatch(r"[a-z0-9_]{1,64}", name) for name in names)
    assert (names[0] == names[1]) is (one == other)


# -- the memory of recent keys --------------------------------------------------------------------


def test_key_cache_answers_as_make_key_does() -> None:
    make = KeyCache(KeyPolicy(), Counters(), capacity=8)
    for identifier in [*TRICKY, "renderer0-mm-1-image-0", "", *TRICKY]:
        assert make(identifier) == make_key(identifier)


def test_key_cache_remembers_a_bounded_number_and_nothing_refused() -> None:
    asked: list[str] = []

    class Asked(KeyPolicy):
        def make_key(self, identifier: str) -> Key | None:
            asked.append(identifier)
            return make_key(identifier)

    make = KeyCache(Asked(), Counters(), capacity=8)
    for number in range(100):
        make(f"picture {number}")
        make(f"renderer0-mm-{number}-image-0")
        make(f"{number}" * 5000)
    kept = [make(f"picture {number}") for number in range(92, 100)]
    assert all(make(key.identifier) is key for key in kept if key is not None)
    before = len(asked)
    make("picture 0")
    make("renderer0-mm-0-image-0")
    make("0" * 5000)
    make("renderer0-mm-0-image-0")
    make("0" * 5000)
    assert len(asked) == before + 5


@pytest.mark.parametrize("tenant", [None, Tenant(b"0123456789abcdef")])
def test_a_renamed_identifier_stands_for_the_entry_of_the_other_one(tenant: Tenant | None) -> None:
    make = KeyCache(KeyPolicy(tenant), Counters(), capacity=8)
    plain = make(A)
    make.rename(A, f"video-1:{A}")
    key, other = make(A), make_key(f"video-1:{A}", tenant)
    assert key is not None
    assert other is not None
    assert (key.identifier, key.renamed) == (A, f"video-1:{A}")
    assert (key.name, key.digest, key.stored) == (other.name, other.digest, other.stored)
    for number in range(100):
        make(f"picture {number}")
    assert make(A) == key != plain
    make.rename(A, f"video-2:{A}")
    assert make(A) not in (key, plain, None)
    make.rename(A, "\ud800")  # which has no key
    assert make(A) is None
    make.rename(A, A)
    assert make(A) == plain


def test_a_policy_that_refuses_clients_names_looks_at_the_name_that_is_stored() -> None:
    make = KeyCache(KeyPolicy(trust_client_ids=False), Counters())
    make.rename(A, f"video-1:{A}")
    assert make(A) is not None
    make.rename("cat", "video-1:cat")
    assert make("cat") is None


@pytest.mark.parametrize("character", ["x", "\U0001f600"])
@pytest.mark.parametrize("tenant", [None, Tenant(b"0123456789abcdef")])
def test_names_in_any_number_and_of_any_length_take_a_bounded_memory(
    character: str, tenant: Tenant | None
) -> None:
    """Measured with a small one: 1 KiB an entry, so 64 MiB with the default capacity."""
    capacity = 512

    def used(characters: int) -> int:
        make = KeyCache(KeyPolicy(tenant), Counters(), capacity=capacity)
        tracemalloc.start()
        for number in range(capacity + 100):
            name = f"{number:06}".ljust(characters, character)
            key = make(name)
            assert (key is None) is (len(name.encode()) > 4096)
        nbytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return nbytes

    for characters in (128, 129, 1000):
        most = (capacity * 1024 if characters == 128 else 0) + 16 * 1024
        # What other threads allocate counts as well, but not each time.
        assert any(used(characters) <= most for _ in range(3))
