# SPDX-License-Identifier: Apache-2.0
"""Who may have a body read."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.middleware.bodies import has_key, hashed_keys


@pytest.mark.parametrize(
    ("given", "variable", "keys"),
    [
        (None, "", []),
        (None, "b", ["b"]),
        (["a", "c"], "b", ["a", "c"]),
        (["", "c"], "", ["c"]),
        ("a", "", ["a"]),
    ],
)
def test_keys_are_those_that_vllm_asks_for(
    given: Any, variable: str, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)
    hashed = hashed_keys(SimpleNamespace(api_key=given))
    assert hashed == tuple(hashlib.sha256(key.encode()).digest() for key in keys)
    assert hashed_keys(None) == hashed_keys(SimpleNamespace(api_key=None))


PATHS = ["/v1/chat/completions", "/api/v1/chat/completions", "/v2/x", "/inference/v1/generate",
         "/tokenize", "/v10", "/"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("root_path", ["", "/api"])
@pytest.mark.parametrize(
    "key", ["Bearer secret", "bearer secret", "Bearer  secret", "secret", None]
)
async def test_a_key_is_asked_for_where_vllm_asks_for_it(
    path: str, root_path: str, key: str
) -> None:
    authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    passed: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(1)

    async def send(message: Any) -> None:
        """Nothing."""

    headers = [(b"authorization", key.encode())] if key else []
    scope = {"type": "http", "method": "POST", "path": path, "root_path": root_path,
             "headers": headers}  # fmt: skip
    await authenticate.AuthenticationMiddleware(app, ["other", "secret"])(scope, None, send)
    args = SimpleNamespace(api_key=["other", "secret"])
    assert has_key(scope, hashed_keys(args)) == bool(passed)
