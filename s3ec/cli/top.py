# SPDX-License-Identifier: Apache-2.0
"""``s3ec top``: a node's engines at a glance, from their /metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from s3ec.cli.options import JsonOption
from s3ec.cli.output import EXIT_WRONG, console, epilog, print_json
from s3ec.errors import ConfigError, UnavailableError
from s3ec.runtime import in_thread

if TYPE_CHECKING:
    from rich.console import RenderableType

    from s3ec.cli.top_figures import Figures, Interval, Snapshot
    from s3ec.cli.top_frame import Engine

DEFAULT_URL = "http://127.0.0.1:8000/metrics"
_TIMEOUT_S = 5.0
# vLLM's page has some 200 KiB; what is far larger is none.
_MAX_PAGE_BYTES = 64 * 2**20


def register(app: typer.Typer) -> None:
    """Add ``top`` to the tree."""
    app.command(
        "top",
        epilog=epilog(
            ("s3ec top", "the engine on this machine, every 2 s"),
            ("s3ec top http://node-1:8000 http://node-2:8000", "two engines, and both together"),
            ("s3ec top --once --json | jq .all.lookups", "for scripts"),
        ),
    )(top)


def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="Where an engine's metrics are; `/metrics` is added where no path is given. "
            f"\\[{DEFAULT_URL}]",
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(min=0.2, max=3600, metavar="SECONDS", help="Time between two frames."),
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Look twice, `--interval` apart, print one frame, and end. So it is also where "
            "stdout is no terminal.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a node's engines: hits by tier, times, queues and problems.

    Reads vLLM's /metrics and nothing else. An engine that cannot be reached or that starts again
    is named in the frame. With --once, exit status 1 where no engine answers. Ctrl-C ends it.
    """
    once = once or not sys.stdout.isatty()
    if as_json and not once:
        raise ConfigError("`--json` prints one document; add `--once`", field="json")
    watch = Watch([_page(url) for url in urls or [DEFAULT_URL]])
    if once:
        watch.look()
        if watch.answers:
            time.sleep(interval)
            watch.look()
        if as_json:
            print_json(watch.document)
        else:
            console().print(watch.frame())
        if not watch.answers:
            raise typer.Exit(EXIT_WRONG)
        return
    _live(watch, interval)


def _live(watch: Watch, interval_s: float) -> None:
    from rich.live import Live

    with (
        suppress(KeyboardInterrupt),
        Live(console=console(), screen=True, auto_refresh=False) as screen,
    ):
        while True:
            watch.look()
            screen.update(watch.frame(), refresh=True)
            time.sleep(interval_s)


def _page(url: str) -> str:
    """A whole URL, of what was typed.

    Raises:
        typer.BadParameter: It is none.
    """
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        host, _port = parts.hostname, parts.port
    except ValueError as exc:
        raise typer.BadParameter(f"`{url}`: {exc}", param_hint="URL") from exc
    if parts.scheme not in ("http", "https") or not host:
        raise typer.BadParameter(f"`{url}`: give http://HOST:PORT", param_hint="URL")
    return whole if parts.path not in ("", "/") else f"{whole.rstrip('/')}/metrics"


@dataclass
class _Seen:
    """What is known of one engine.

    Attributes:
        last: Its newest page. One that does not answer keeps it: its next interval begins there.
        interval: What happened up to that page; None where the one before is missing.
        is_up: It has answered the last look.
        state: What is to be said about it.
    """

    last: Snapshot | None = None
    interval: Interval | None = None
    is_up: bool = False
    state: str = ""


class Watch:
    """What was seen of some engines so far; each look asks all of them at the same time."""

    def __init__(self, urls: Sequence[str]) -> None:
        import urllib3

        self._seen = {url: _Seen() for url in urls}
        # Without a proxy: metrics are asked for inside of a network.
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(_TIMEOUT_S))

    @property
    def answers(self) -> bool:
        """Whether any engine has answered the last look."""
        return any(seen.is_up for seen in self._seen.values())

    def look(self) -> None:
        """Ask all engines."""
        asked = {url: in_thread(partial(self._ask, url), "s3ec-top") for url in self._seen}
        end_s = time.monotonic() + _TIMEOUT_S
        for url, answer in asked.items():
            seen = self._seen[url]
            seen.interval, seen.is_up = None, False
            try:
                # One that sends a byte now and then keeps the client's own limit.
                now = answer.result(max(0.0, end_s - time.monotonic()))
            except TimeoutError:
                seen.state = f"no answer within {_TIMEOUT_S:.0f} s"
                continue
            except UnavailableError as exc:
                seen.state = str(exc)
                continue
            _take(seen, now)

    def _ask(self, url: str) -> Snapshot:
        import urllib3

        from s3ec.cli.top_figures import parsed

        try:
            answer = self._http.request("GET", url, preload_content=False)
            try:
                body = answer.read(_MAX_PAGE_BYTES)
            finally:
                answer.close()
        except (urllib3.exceptions.HTTPError, OSError) as exc:
            raise UnavailableError(f"cannot be reached ({type(exc).__name__})") from exc
        if answer.status != 200:
            raise UnavailableError(f"answers with status {answer.status}")
        return parsed(body.decode(errors="replace"), time.monotonic())

    def engines(self) -> list[Engine]:
        """Each engine as it is now."""
        from s3ec.cli.top_figures import figures
        from s3ec.cli.top_frame import Engine

        return [
            Engine(
                url,
                seen.state,
                seen.is_up,
                seen.last.models if seen.last else (),
                figures(seen.last, seen.interval) if seen.last and seen.is_up else None,
            )
            for url, seen in self._seen.items()
        ]

    def everything(self) -> Figures | None:
        """Those that answer, as one."""
        from s3ec.cli.top_figures import figures, merged, merged_intervals

        up = [
            (urlsplit(url).hostname or "", seen.last, seen.interval)
            for url, seen in self._seen.items()
            if seen.is_up and seen.last is not None
        ]
        if not up:
            return None
        intervals = [interval for _, _, interval in up if interval is not None]
        return figures(
            merged([(host, last) for host, last, _ in up]),
            merged_intervals(intervals) if intervals else None,
        )

    @property
    def _seconds(self) -> float | None:
        """Length of the longest interval, which is that of an engine that was away."""
        intervals = [seen.interval for seen in self._seen.values() if seen.interval]
        return max((one.seconds for one in intervals), default=None)

    def frame(self) -> RenderableType:
        """What to draw."""
        from s3ec.cli.top_frame import frame

        clock = time.strftime("%H:%M:%S")
        return frame(self.engines(), self.everything(), clock=clock, seconds=self._seconds)

    @property
    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        everything = self.everything()
        return {
            "interval_s": self._seconds,
            "engines": [asdict(engine) for engine in self.engines()],
            "all": None if everything is None else asdict(everything),
        }


def _take(seen: _Seen, now: Snapshot) -> None:
    """Note an engine's new page."""
    from s3ec.cli.top_figures import between

    seen.interval = None if seen.last is None else between(seen.last, now)
    seen.last, seen.is_up, seen.state = now, True, ""
    if now.is_empty:
        seen.state = "no metrics of s3ec here: vLLM before 0.31 needs `metrics_port`"
    elif seen.interval is not None and seen.interval.restarted:
        seen.state = "started again: counts are those since then"
