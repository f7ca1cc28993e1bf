# SPDX-License-Identifier: Apache-2.0
"""``python -m s3ec.dev.observability FILE``: the dashboard for Grafana, or its picture (.png).

The picture takes some minutes: a real engine is asked, its bucket goes down and comes back, and a
real Prometheus watches. ``make dashboard`` does both.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from s3ec.cli.output import EXIT_USAGE, print_error, print_note
from s3ec.dev.observability import grafana, picture
from s3ec.dev.observability.run import Pace, play, running
from s3ec.dev.plots import need_matplotlib
from s3ec.errors import ConfigError

_PACE = Pace(
    pictures=200, encode_s=0.25, first_s=30, again_s=45, evicted_s=25, outage_s=40, after_s=60
)
_WINDOW_S = 8.0
_TITLE = (
    "s3ec: a tiny model whose encoder is slowed down to 0.25 s a picture, a bucket 20 ms away, "
    "one engine on 2 CPU cores"
)


def main(out: Path) -> None:
    """Write the file."""
    if out.suffix == ".json":
        out.write_text(grafana.document())
        return
    if out.suffix != ".png":
        raise ConfigError(f"`{out}`: give a .json or a .png file", field="file")
    need_matplotlib()
    with (
        tempfile.TemporaryDirectory(prefix="s3ec-dashboard-") as folder,
        running(Path(folder), _PACE.pictures) as site,
    ):
        print_note(f"s3ec top {site.metrics_url} shows it")
        play(site, _PACE, lambda part: print_note(f"{part} ..."))
        picture.draw(
            out,
            site.prometheus,
            start_s=site.marks[0][0],
            end_s=time.time(),
            window_s=_WINDOW_S,
            marks=site.marks,
            title=_TITLE,
        )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ConfigError as exc:
        print_error(str(exc))
        sys.exit(EXIT_USAGE)
    except IndexError:
        print_error("name a .json or a .png file")
        sys.exit(EXIT_USAGE)
