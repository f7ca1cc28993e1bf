# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of real fetches and saves, and nothing at all where nobody traces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from s3ec.dev.rigs.proxy import Rule
from s3ec.dev.rigs.proxy_faults import Answer
from tests.faults.embeddings import ENTRY_BYTES, NAMESPACE, key_at
from tests.faults.engine import Engine
from tests.faults.site import OBJECTS, Site
from tests.support.waiting import eventually

pytest.importorskip("torch")
trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

pytestmark = pytest.mark.usefixtures("signed")

REPOSITORY = Path(__file__).parents[2]


class Tracing:
    """What a process that traces has been told."""

    def __init__(self) -> None:
        self._exporter = in_memory.InMemorySpanExporter()
        self.provider = sdk.TracerProvider()
        self.provider.add_span_processor(export.SimpleSpanProcessor(self._exporter))

    def one(self, name: str, **attributes: Any) -> Any:
        """The one span of this name that says so; it is waited for."""
        found: list[Any] = []

        def is_there() -> bool:
            wanted = {f"s3ec.{key}": value for key, value in attributes.items()}.items()
            spans = self._exporter.get_finished_spans()
            found[:] = [s for s in spans if s.name == name and wanted <= dict(s.attributes).items()]
            return bool(found)

        eventually(is_there, f"a span {name}")
        (span,) = found
        return span


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Tracing:
    """A provider as set_tracer_provider sets it, which no process can take back."""
    it = Tracing()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: it.provider)
    return it


def test_a_save_and_a_fetch_have_a_span_each(site: Site, tracing: Tracing, tmp_path: Path) -> None:
    with Engine(site.settings()) as engine:
        engine.save_and_wait(1)
        save = tracing.one("s3ec.save")
        engine.fetch(1)
        near = tracing.one("s3ec.fetch")
    with Engine.at(site, tmp_path / "other") as engine:
        engine.fetch(1)
        engine.fetch(2)
        far = tracing.one("s3ec.fetch", source="bucket")
        absent = tracing.one("s3ec.fetch", outcome="absent")
    common = {
        "s3ec.namespace": NAMESPACE.name,
        "s3ec.key": key_at(1).digest.hex(),
        "s3ec.bytes": ENTRY_BYTES,
        "aws.s3.bucket": site.bucket,
        "server.address": "127.0.0.1",
        "server.port": int(site.proxy.url.rpartition(":")[2]),
    }
    for span in (save, near, far):
        assert common.items() <= dict(span.attributes).items()
        assert span.parent is None
        assert span.start_time <= span.end_time
        assert span.status.is_unset
        assert span.instrumentation_scope.name == "s3ec"
    assert save.attributes["s3ec.outcome"] == "stored"
    assert save.attributes["s3ec.attempts"] == 1
    assert save.kind is far.kind is trace.SpanKind.CLIENT
    assert near.kind is trace.SpanKind.INTERNAL
    assert near.attributes["s3ec.source"] == "tier"
    assert far.attributes["s3ec.outcome"] == "ready"
    assert absent.status.is_unset  # to look for what is not there is no error
    assert "s3ec.bytes" not in absent.attributes


def test_what_was_tried_again_and_what_failed_is_told(site: Site, tracing: Tracing) -> None:
    site.stock(1, 2)
    # Both times that the first try asks: botocore gives the words.
    site.proxy.add(Rule(Answer(503), method="GET", target=OBJECTS, times=2))
    with Engine(site.settings()) as engine:
        engine.fetch(1)
        again = tracing.one("s3ec.fetch")
        assert (again.attributes["s3ec.retries"], again.attributes["s3ec.outcome"]) == (1, "ready")
        site.put(2, b"not an entry")
        engine.fetch(2)
        bad = tracing.one("s3ec.fetch", outcome="corrupt")
    assert bad.attributes["error.type"] == "corrupt"
    assert bad.status.status_code is trace.StatusCode.ERROR


def test_without_a_provider_no_span_is_made(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.stock(1)
    made: list[str] = []
    monkeypatch.setattr(trace.ProxyTracerProvider, "get_tracer", lambda *_, **__: made.append("t"))
    with Engine(site.settings()) as engine:
        engine.save_and_wait(3)
        engine.fetch(1)
    assert made == []


def test_a_provider_that_fails_costs_the_span_only(site: Site, tracing: Tracing) -> None:
    site.stock(1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no tracer today")

    tracing.provider.get_tracer = fail
    engine = Engine(site.settings())
    engine.fetch(1)
    eventually(lambda: engine.count("internal_errors") == 1)
    engine.node.close(10.0)


# -- in a process of its own ---------------------------------------------------------------------


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_that_does_not_trace_does_not_import_the_api() -> None:
    code = (
        "import sys, s3ec.node; from s3ec.spans import Spans; assert Spans().begin() is None; "
        "print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert run(code) == "False"


def test_a_provider_that_cannot_be_loaded_costs_the_spans_only() -> None:
    code = (
        "import os; os.environ['OTEL_PYTHON_TRACER_PROVIDER'] = 'not-there'; "
        "import opentelemetry.trace; from s3ec.spans import Spans; print(Spans().begin())"
    )
    assert run(code).splitlines()[-1] == "None"


@pytest.mark.slow
def test_what_vllm_has_set_up_in_an_engines_process_is_used_without_a_setting() -> None:
    pytest.importorskip("vllm")
    code = """
import os
os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = "http://127.0.0.1:1"
from vllm.tracing import maybe_init_worker_tracer
from s3ec.spans import Spans, note
assert Spans().begin() is None
maybe_init_worker_tracer("vllm.engine_core", "engine_core", "EngineCore")  # as v1/engine/core.py
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
kept = InMemorySpanExporter()
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(kept))
spans = Spans({"s3ec.namespace": "ns"})
work = spans.begin()
note("retries")
spans.end("s3ec.fetch", work, {"s3ec.outcome": "ready"}, remote=True)
(span,) = kept.get_finished_spans()
print(span.name, dict(span.attributes), span.resource.attributes["vllm.process_kind"], flush=True)
os._exit(0)  # nobody listens to what vLLM exports
"""
    expected = {"s3ec.namespace": "ns", "s3ec.retries": 1, "s3ec.outcome": "ready"}
    assert run(code).splitlines()[-1] == f"s3ec.fetch {expected} engine_core"
