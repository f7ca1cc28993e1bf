# SPDX-License-Identifier: Apache-2.0
"""A real engine with a bucket that has a bad minute, watched by a real Prometheus.

The engine's device cache holds two pictures, and its encoder is slowed down to what one costs on a
GPU. Its bucket is a SeaweedFS server behind a proxy that adds the latency of a network.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from s3ec.dev.rigs.engine import EngineProcess, ec_config, image, text
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.pictures import write_pictures
from s3ec.dev.rigs.prometheus import Prometheus
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import LognormalDelay
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from s3ec.tier.inspection import Inspection

EXAMPLE = Path(__file__).parents[3] / "examples" / "observability"
MODEL = "tiny-gemma3"
DOWN = "down"
"""The part in which the bucket refuses."""
_BUCKET = "embeddings"
_OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 128,  # and with it the device cache: two pictures
    "block_size": 32,
    "served_model_name": MODEL,
}
_TIER_BYTES = 1_000_000  # some hundred embeddings
_SCRAPE_S = 1
# In each part, however busy the machine is; the first of them is new.
_LEAST_PICTURES = 12


@dataclass(frozen=True, slots=True)
class Pace:
    """How long each part of the run takes, in seconds, or longer on a slow machine.

    Attributes:
        pictures: How many there are. Half of them come before the bucket goes down.
        encode_s: What the encoder is slowed down to, for a picture.
        first_s: Pictures come for the first time.
        again_s: They are asked for again.
        evicted_s: They are asked for, and the node's disk was emptied before.
        outage_s: The bucket refuses connections.
        after_s: It answers again.
    """

    pictures: int
    encode_s: float
    first_s: float
    again_s: float
    evicted_s: float
    outage_s: float
    after_s: float


@dataclass
class Site:
    """What runs.

    Attributes:
        metrics_url: Where the engine's metrics are.
        marks: When each part began, seconds since the epoch, and its name.
    """

    engine: EngineProcess
    proxy: FaultProxy
    prometheus: Prometheus
    pictures: list[Path]
    cache_dir: Path
    metrics_url: str
    marks: list[tuple[float, str]] = field(default_factory=list)


@contextmanager
def running(folder: Path, pictures: int, nursery: EngineForkServer | None = None) -> Iterator[Site]:
    """Engine, bucket and Prometheus, all of them ready.

    Args:
        folder: For everything that they write.
        pictures: How many to make.
        nursery: Forks the engine.
    """
    paths = write_pictures(folder / "pictures", pictures)
    cache_dir = folder / "tier"
    with LocalS3() as server, FaultProxy(server.endpoint_url) as proxy:
        server.create_bucket(_BUCKET)
        proxy.add(Rule(LognormalDelay(median_s=0.02, sigma=0.5, seed=0)))
        settings = {
            "bucket": _BUCKET,
            "endpoint_url": proxy.url,
            "cache_dir": str(cache_dir),
            "cache_bytes": _TIER_BYTES,
            "min_free_bytes": 0,
            "wait": "always",
            "index_refresh_s": 2,
        }
        with EngineProcess(
            write_gemma3(folder / "gemma3"),
            ec=ec_config("ec_both", settings),
            log_path=folder / "engine.log",
            media=folder,
            env=server.env() | ONE_PROCESS,
            options=_OPTIONS,
            nursery=nursery,
        ) as engine:
            address = engine.serve_metrics()
            config = prometheus_config(address, _SCRAPE_S)
            with Prometheus(folder / "prometheus", config) as prometheus:
                prometheus.wait_for_targets(1)
                url = f"http://{address}/metrics"
                yield Site(engine, proxy, prometheus, paths, cache_dir, url)


def prometheus_config(address: str, every_s: int) -> dict[str, Any]:
    """The example's configuration, for one engine somewhere else, and with quicker looks."""
    config: dict[str, Any] = yaml.safe_load((EXAMPLE / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{every_s}s"}
    config["rule_files"] = [str(EXAMPLE / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [address]}]
    return config


def play(site: Site, pace: Pace, say: Callable[[str], None] = lambda _: None) -> None:
    """Ask the engine, part after part, as ``Pace`` has it; ``say`` hears when each begins."""
    rng = random.Random(0)
    shown = 0  # pictures that came up so far
    numbers = iter(range(10**6))
    site.engine.slow_encoder(pace.encode_s)

    def ask(part: str, seconds: float, *, new: float, until: float = 1.0) -> None:
        """Questions about pictures, of which a share is new, until so many of all have come up."""
        nonlocal shown
        say(part)
        site.marks.append((time.time(), part))
        end_s, asked = time.monotonic() + seconds, 0
        while asked < _LEAST_PICTURES or time.monotonic() < end_s:
            is_new = asked == 0 or rng.random() < new
            asked += 1
            if is_new and shown < until * len(site.pictures):
                picture, shown = site.pictures[shown], shown + 1
            else:
                # A few get most questions.
                picture = site.pictures[min(int(rng.expovariate(0.15)), shown - 1)]
            # Two questions about it, the second while the device still holds it.
            for _ in range(2):
                # Another text in front, or vLLM's prefix cache would answer.
                number = text(f"{next(numbers)}: ")
                site.engine.chat([[number, image(picture), text("What is it?")]], max_tokens=2)

    ask("new pictures", pace.first_s, new=0.9, until=0.5)
    ask("again", pace.again_s, new=0.05)
    Inspection.open(site.cache_dir).evict_to(0, now_s=time.time())
    ask("disk emptied", pace.evicted_s, new=0.05)
    with site.proxy.refusing():
        Inspection.open(site.cache_dir).evict_to(0, now_s=time.time())
        ask(DOWN, pace.outage_s, new=0.15)
    ask("back", pace.after_s, new=0.05)
