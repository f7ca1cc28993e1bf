# SPDX-License-Identifier: Apache-2.0
"""``bench index``: the index of the corpus, at any number of keys.

The digests are made up, which makes no difference: real ones are parts of a SHA-256. Files lie on
this node's disk and in a SeaweedFS on this machine, which takes its share of the same cores.
Where ``--keys`` is above 1e7, what opens, moves or merges a whole snapshot does so with 1e7.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from s3ec.dev.bench.context import Bench, CannotMeasureError, Context, Spec

if TYPE_CHECKING:
    from s3ec.dev.bench.corpus import Corpus
    from s3ec.dev.bench.index_lookups import Heads
    from s3ec.dev.bench.index_made import Made
    from s3ec.testing.server import LocalS3

KEYS = 10_000_000
_KEYS_QUICK = 100_000
# Where lookups have their reach; the largest is compared with it.
_SMALL = 1_000_000
_MOVED = 10_000_000
# On disk: of a key's row and its share of a filter; and of what moves, the server's copies before
# and after a union, two readers', raw downloads, and temporary files.
_BYTES, _COPIES = 24, 6
ROWS = (
    Spec("index.lookup_p50_us", "us", "<= 1.5"),
    Spec("index.lookup_ratio_to_example", "ratio", "< 1"),
    Spec("index.lookup_ratio_to_head", "ratio", "<= 0.002"),
    Spec("index.growth_1e6_to_max", "ratio", "<= 2"),
    Spec("index.private_bytes_per_key", "B", "<= 0.2"),
    Spec("bloom.bytes_per_key", "B", "<= 1.8"),
    Spec("bloom.fpr", "1", "<= 0.01"),
    Spec("index.open_ms", "ms", "<= 50"),
    Spec("index.cold_ratio_to_raw", "ratio", "<= 1.5"),
    Spec("union.peak_mib", "MiB", "<= 512"),
    Spec("union.seconds", "s", "<= 15"),
    Spec("index.visible_p99_s", "s", "<= 15"),
    Spec("index.idle_lists_per_refresh", "1", "<= 1.1"),
    Spec("index.listing_ratio_to_raw", "ratio", "<= 1.5"),
    Spec("index.hooks_p99_ratio", "ratio", "<= 1.1"),
)


def run(context: Context, keys: int | None = None) -> None:
    """Measure; what needs the SeaweedFS binary is last.

    Args:
        context: Where rows go.
        keys: In the largest index.

    Raises:
        CannotMeasureError: There is no server to be had; the other rows are reported by then.
    """
    from s3ec.dev.bench import index_lookups
    from s3ec.dev.bench.corpus import filled
    from s3ec.dev.bench.index_bucket import head_times
    from s3ec.dev.bench.index_made import make

    keys = keys or (_KEYS_QUICK if context.quick else KEYS)
    _need_disk(context, keys)
    context.say(f"an index of {keys} keys")
    largest = make(context.scratch, keys)
    # What has its reach at 1e7 keys, or takes the server long, is measured with no more.
    made = make(context.scratch, _MOVED) if keys > _MOVED else largest
    index_lookups.measure_opening(context, made, largest)
    index_lookups.measure_filters(context, largest)
    with contextlib.ExitStack() as stack:
        try:
            server, corpus = stack.enter_context(filled(context, 1))
        except CannotMeasureError:
            _measure_lookups(context, largest, None)
            raise
        with head_times(corpus, context.scratch / "heads") as heads:
            _measure_lookups(context, largest, heads)
        if made is not largest:
            largest.delete()
        _measure_in_bucket(context, server, corpus, made)


def _need_disk(context: Context, keys: int) -> None:
    """Look before a file system is filled.

    Raises:
        CannotMeasureError: There is too little room.
    """
    need = _BYTES * (keys + _COPIES * min(keys, _MOVED))
    free = shutil.disk_usage(context.scratch).free
    if free < need:
        raise CannotMeasureError(
            f"{keys:.3g} keys need {need / 1e9:.1f} GB of scratch space, and {free / 1e9:.1f} GB "
            "are free; TMPDIR can name another place"
        )


def _measure_lookups(context: Context, largest: Made, heads: Heads | None) -> None:
    from s3ec.dev.bench.index_lookups import measure_lookups
    from s3ec.dev.bench.index_made import make, reader

    with contextlib.ExitStack() as stack:
        readers = {}
        if largest.entries > _SMALL:
            small = make(context.scratch, _SMALL)
            stack.callback(small.delete)
            readers["1e6 keys"] = (small, stack.enter_context(reader(small)))
        label = f"{float(largest.entries):.3g}".replace("e+0", "e") + " keys"
        readers[label] = (largest, stack.enter_context(reader(largest)))
        measure_lookups(context, readers, heads)


def _measure_in_bucket(context: Context, server: LocalS3, corpus: Corpus, made: Made) -> None:
    from s3ec.dev.bench import index_bucket
    from s3ec.dev.bench.index_bucket import measure_visibility
    from s3ec.dev.bench.index_busy import measure_busy

    context.say(f"uploading {made.entries} keys")
    index_bucket.upload(server, corpus, made)
    index_bucket.measure_cold(context, corpus, made)
    # An idle index has been busy before.
    deltas = index_bucket.deltas_for(made)
    context.say(f"uploading {deltas} deltas")
    index_bucket.upload_deltas(server, corpus, deltas)
    index_bucket.measure_idle(context, corpus, made, deltas=deltas)
    measure_busy(context, server, corpus, made)
    index_bucket.measure_union(context, corpus, made, deltas=deltas)
    measure_visibility(context, corpus)


BENCH = Bench(ROWS, run)
