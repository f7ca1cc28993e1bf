# SPDX-License-Identifier: Apache-2.0
"""`metrics_port`, and the line in the log: an engine's figures without vLLM's help.

The port is for releases before 0.31, for jobs that start no API server, and for who scrapes nodes
and not engines. The line is there on every release.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from s3ec.connector.metrics import GAUGES, HISTOGRAMS, LABELLED, LEVELS, LOOKUPS, PLAIN, zeros
from s3ec.counters import TIME_BOUNDS_S, Counters, observed
from s3ec.errors import ConfigError
from s3ec.runtime import LoopThread, contained, in_thread, keep_socket
from s3ec.settings import Settings

if TYPE_CHECKING:
    from prometheus_client import Metric

    from s3ec.connector.figures import Figures

log = logging.getLogger(__name__)

LINE_EVERY_S = 60.0
# While another process has the port. It may be the one that this one replaces.
_TRY_AGAIN_S = 10.0
# What the line is about: nothing is said while all of these stay as they are.
_OF_INTEREST = ("lookups.", "hits", "misses", "fetch_items.", "save.items", "save_problem.")


def require_client() -> None:
    """Find out whether the port can be served.

    Raises:
        ConfigError: What serves it is not installed.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            "`metrics_port` needs prometheus-client: pip install 's3ec[metrics]'",
            field="metrics_port",
        ) from exc


class Exposition:
    """A collector of prometheus_client: all metrics of one engine, as they are when it is asked."""

    def __init__(self, figures: Figures, labels: Mapping[str, str]) -> None:
        """Nothing is read yet.

        Args:
            figures: Of the engine.
            labels: That every metric gets: vLLM's own.
        """
        self._figures = figures
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        """Every metric that has a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = {**zeros(), **self._figures.counts()}
        for ours, (name, text) in PLAIN.items():
            counter = CounterMetricFamily(name, text, labels=self._names)
            counter.add_metric(self._values, counts.get(ours, 0))
            yield counter
        levels = self._figures.levels()
        gauges = {
            ours: (name, text, float(counts.get(ours, 0))) for ours, (name, text) in LEVELS.items()
        }
        for ours, (name, text, _) in GAUGES.items():
            if ours in levels:
                gauges[ours] = (name, text, levels[ours])
        for name, text, level in gauges.values():
            gauge = GaugeMetricFamily(name, text, labels=self._names)
            gauge.add_metric(self._values, level)
            yield gauge
        for prefix, (name, text, label, _) in LABELLED.items():
            counter = CounterMetricFamily(name, text, labels=[*self._names, label])
            for ours, total in counts.items():
                if ours.startswith(prefix):
                    counter.add_metric([*self._values, ours[len(prefix) :]], total)
            yield counter
        name, text, of_tier, cases = LOOKUPS
        counter = CounterMetricFamily(name, text, labels=[*self._names, *of_tier])
        for ours, values in cases.items():
            counter.add_metric([*self._values, *values], counts.get(ours, 0))
        yield counter
        yield from self._histograms(counts)

    def _histograms(self, counts: Mapping[str, float]) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        found: dict[str, tuple[list[float], float]] = {}
        for histogram, number, many, seconds in observed(counts):
            buckets, total = found.setdefault(histogram, ([0.0] * (len(TIME_BOUNDS_S) + 1), 0.0))
            buckets[number] += many
            found[histogram] = buckets, total + seconds
        bounds = [*map(str, TIME_BOUNDS_S), "+Inf"]
        for prefix, (name, text, label, _) in HISTOGRAMS.items():
            names = [*self._names, label] if label else self._names
            family = HistogramMetricFamily(name, text, labels=names)
            for histogram, (buckets, total) in found.items():
                if histogram.startswith(prefix):
                    value = [histogram[len(prefix) :]] if label else []
                    below = 0.0
                    cumulative: list[tuple[str, float]] = []
                    for bound, count in zip(bounds, buckets, strict=True):
                        below += count
                        cumulative.append((bound, below))
                    family.add_metric([*self._values, *value], cumulative, sum_value=total)
            yield family


def line_of(counts: Mapping[str, float]) -> str | None:
    """One line about what was counted in a while; None where nothing of interest was.

    Args:
        counts: Increments.
    """
    if not any(name.startswith(_OF_INTEREST) for name in counts):
        return None

    def get(name: str) -> float:
        return counts.get(name, 0)

    device, node, bucket = (get(f"lookups.{tier}.hit") for tier in ("device", "node", "bucket"))
    said = [
        f"{device + node + bucket:.0f} hits ({device:.0f} device, {node:.0f} node, "
        f"{bucket:.0f} bucket)",
        f"{get('misses'):.0f} encoded",
    ]
    if fetched := get("fetch_items.bucket"):
        mean_ms = 1000 * get("fetch_seconds.bucket") / fetched
        said.append(f"{get('fetch_bytes.bucket') / 1e6:.1f} MB fetched in {mean_ms:.1f} ms each")
    if loads := get("load.items"):
        said.append(f"{loads:.0f} loads in {1000 * get('load.seconds') / loads:.2f} ms each")
    if saved := get("save.items"):
        said.append(f"{saved:.0f} saved ({get('save.bytes') / 1e6:.1f} MB)")
    if deferred := get("deferred_requests"):
        said.append(f"{deferred:.0f} requests waited, {get('deferred_seconds'):.2f} s in all")
    problems = sum(amount for name, amount in counts.items() if name.startswith("save_problem."))
    if problems:
        said.append(f"{problems:.0f} problems with saves")
    return "s3ec: " + ", ".join(said)


class Exporter:
    """Writes the line each minute, and serves the port where there is one.

    States of the port: off; taken by another process, which is tried again; served; closed.
    """

    def __init__(
        self,
        figures: Figures,
        settings: Settings,
        loop: LoopThread,
        counters: Counters,
        labels: Mapping[str, str],
        *,
        take: Callable[[], Mapping[str, float]],
    ) -> None:
        """Nothing runs yet.

        Args:
            figures: Of the engine.
            loop: Runs both.
            counters: Where faults of ours are counted.
            labels: That every metric gets.
            take: What was counted since its last call; for this object alone.

        Raises:
            ConfigError: What serves the port is not installed.
        """
        if settings.metrics_port:
            require_client()
        self._figures = figures
        self._address = (settings.metrics_host, settings.metrics_port)
        self._loop = loop
        self._counters = counters
        self._labels = labels
        self._take = take
        self._lock = threading.RLock()  # a signal handler may close it, see Counters
        self._server: Any = None
        self._closed = False
        self._tasks: list[Future[None]] = []

    def start(self) -> None:
        """Begin; returns at once."""
        self._tasks.append(self._loop.submit(self._tell_forever()))
        if self._address[1]:
            self._tasks.append(self._loop.submit(self._serve_when_free()))

    def close(self) -> None:
        """Say what was not said yet, and give the port back. More than once is fine."""
        for task in self._tasks:
            task.cancel()
        with self._lock:
            was_closed, self._closed = self._closed, True
            server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if not was_closed:
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            line = line_of(self._take())
        if line is not None:
            log.info("%s", line)

    async def _tell_forever(self) -> None:
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            with contained(self._counters, "the line in the log"):
                self._tell()

    async def _serve_when_free(self) -> None:
        host, port = self._address
        complained = False
        while True:
            with contained(self._counters, "the port of the metrics"):
                try:
                    # Not in the pool for the disk, which may hang.
                    await asyncio.wrap_future(in_thread(self._serve, "s3ec-metrics"))
                    return
                except OSError as exc:
                    taken = exc.errno == errno.EADDRINUSE
                    if not complained:
                        log.warning(
                            "metrics of this engine are not served on %s:%d: %s; trying again",
                            *(host, port, "another process has it" if taken else exc),
                        )
                    complained = True
            await asyncio.sleep(_TRY_AGAIN_S)

    def _serve(self) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        host, port = self._address
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Exposition(self._figures, self._labels))
        server, _ = start_http_server(port, addr=host, registry=registry)
        keep_socket(server.socket)
        with self._lock:
            if not self._closed:
                self._server = server
                log.info("metrics are served on http://%s:%d/metrics", host, port)
                return
        server.shutdown()
        server.server_close()
