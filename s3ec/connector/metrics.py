# SPDX-License-Identifier: Apache-2.0
"""Every count of s3ec: its name on /metrics, its type and what it means.

Data only. ``stats.py`` makes vLLM's metrics of it, and ``make docs`` makes docs/metrics.md of it,
without vLLM.
"""

from __future__ import annotations

# counter of ours -> (Prometheus name without _total, help)
PLAIN = {
    "hits": ("vllm:s3ec_hits", "Encoder inputs answered from the cache instead of encoded."),
    "misses": ("vllm:s3ec_misses", "Encoder inputs that were encoded."),
    "deferred_requests": ("vllm:s3ec_deferred_requests", "Requests that waited for embeddings."),
    "deferred_seconds": ("vllm:s3ec_deferred_seconds", "Time that requests were deferred."),
    "defer_timeouts": ("vllm:s3ec_defer_timeouts", "Deferrals that ended without the embedding."),
    "waits_declined": (
        "vllm:s3ec_waits_declined",
        "Decisions to encode at once, because waiting was expected to cost more (`wait`).",
    ),
    "encode.seconds": (
        "vllm:s3ec_encode_seconds",
        "Time that the encoder ran, as rank 0 measured it.",
    ),
    "encode.saved_seconds": (
        "vllm:s3ec_saved_encoder_seconds",
        "Time that the encoder would have run for the hits, by what encoding has cost (nothing is "
        "counted before that is known).",
    ),
    "encode.rows": ("vllm:s3ec_encoded_rows", "Rows of embeddings that it made in that time."),
    "load.items": ("vllm:s3ec_loads", "Embeddings read into the encoder cache."),
    "load.bytes": ("vllm:s3ec_load_bytes", "Bytes of embeddings read into the encoder cache."),
    "load.seconds": ("vllm:s3ec_load_seconds", "Time spent inside start_load_caches."),
    "load.failed": ("vllm:s3ec_load_failures", "Reads of granted files that failed."),
    "load.rescued": (
        "vllm:s3ec_load_rescues",
        "Loads that the bucket served after such a failure.",
    ),
    "load.hung": ("vllm:s3ec_load_hangs", "Loads that the disk did not answer in time."),
    "save.items": ("vllm:s3ec_saves", "Embeddings that the bucket confirmed."),
    "save.bytes": ("vllm:s3ec_save_bytes", "Bytes of embeddings that the bucket confirmed."),
    "save.seconds": ("vllm:s3ec_save_seconds", "Time uploads took, in sum."),
    "save.queued": ("vllm:s3ec_saves_queued", "Embeddings that were taken into the save queue."),
    "save.existed": ("vllm:s3ec_saves_existing", "Uploads that found the object stored already."),
    "save.blocked": ("vllm:s3ec_save_blocked", "Times that a full save queue held the encoder up."),
    "announced": (
        "vllm:s3ec_announced",
        "Stored embeddings that were announced in the index.",
    ),
    "announce_failed": (
        "vllm:s3ec_announce_failures",
        "Announcements in the index that failed. They are tried again.",
    ),
    "announce_dropped": (
        "vllm:s3ec_announce_dropped",
        "Stored embeddings that the index does not hold until the next listing.",
    ),
    "tier.evicted": ("vllm:s3ec_evictions", "Entries that this process evicted from the tier."),
    "tier.evicted_bytes": ("vllm:s3ec_evicted_bytes", "Bytes that this process evicted."),
    "tier.never_read_bytes": (
        "vllm:s3ec_never_read_bytes",
        "Bytes that this process evicted and that nobody on this node had asked for since they "
        "were saved, or brought by `s3ec hydrate`.",
    ),
    "tier.bad_files": ("vllm:s3ec_bad_files", "Bad files of this node's tier, deleted."),
    "bad_objects": (
        "vllm:s3ec_bad_objects",
        "Objects of the bucket that came bad twice; each is a miss for this process for an hour.",
    ),
    "tier.errors": ("vllm:s3ec_tier_errors", "Times that the disk refused."),
    "tier.hung": ("vllm:s3ec_tier_hangs", "Times that the disk was found not to answer."),
    "store.retries": ("vllm:s3ec_store_retries", "Requests to the store that were repeated."),
    "store.slow_starts": (
        "vllm:s3ec_store_slow_starts",
        "Requests without an answer after a time that is long for this store.",
    ),
    "hedge.sent": ("vllm:s3ec_hedges", "Late requests that were sent a second time."),
    "pace.slowed": ("vllm:s3ec_slowdowns", "Times that the store asked for fewer requests."),
    "index.refresh_failed": (
        "vllm:s3ec_index_failures",
        "Refreshes of the index that failed.",
    ),
    "index.fetch_failed": (
        "vllm:s3ec_index_fetch_failures",
        "Snapshots of the index that could not be downloaded. It is tried again.",
    ),
    "index.unions": (
        "vllm:s3ec_index_unions",
        "Snapshots of the index that this engine made of what writers announced.",
    ),
    "index.listings": (
        "vllm:s3ec_index_listings",
        "Snapshots of the index that this engine made by listing the bucket.",
    ),
    "index.make_failed": (
        "vllm:s3ec_index_make_failures",
        "Snapshots of the index that could not be made. It is tried again.",
    ),
    "index.refused": ("vllm:s3ec_index_refused", "Files of the index that could not be used."),
    "index.vanished": (
        "vllm:s3ec_index_vanished",
        "Embeddings that the index holds and the bucket lacks.",
    ),
    "refused_identifiers": (
        "vllm:s3ec_refused_identifiers",
        "Lookups of identifiers that may not be shared (request-scoped, too long).",
    ),
    "ids.refused": (
        "vllm:s3ec_refused_client_ids",
        "Lookups of identifiers that are no content hash, with trust_client_ids off.",
    ),
    "unavailable_requests": (
        "vllm:s3ec_unavailable_requests",
        "Requests without pixels whose embedding could not be had.",
    ),
    "stopped_by_weights": (
        "vllm:s3ec_stopped_by_weights",
        "1 once nothing is loaded or saved any more, since the weights may have changed.",
    ),
    "breaker.opened": (
        "vllm:s3ec_breaker_opened",
        "Times that the breaker opened: the store is not asked for a while.",
    ),
    "internal_errors": ("vllm:s3ec_internal_errors", "Errors inside s3ec that were contained."),
}
# figure of ours that is sent as it is -> (Prometheus name, help, how those of the scheduler's
# process and of all ranks make one: their sum or the largest)
GAUGES = {
    "level.spool_entries": (
        "vllm:s3ec_spool_entries",
        "Embeddings on this node's disk that the bucket, or its index, has not confirmed: those of "
        "this engine's processes.",
        "sum",
    ),
    "level.spool_oldest_seconds": (
        "vllm:s3ec_spool_oldest_seconds",
        "How long the oldest of them has waited. Of what a dead process left, the time since its "
        "last use on this node.",
        "max",
    ),
    "level.save_queue_entries": (
        "vllm:s3ec_save_queue_entries",
        "Embeddings in memory that are on no disk yet.",
        "sum",
    ),
    "level.breaker_open": (
        "vllm:s3ec_breaker_open",
        "1 while the store is not asked, in any process of this engine, since it failed.",
        "max",
    ),
    "level.index_entries": (
        "vllm:s3ec_index_entries",
        "Rows of the index: of its snapshot and of what writers announced since.",
        "max",
    ),
    "level.index_age_seconds": (
        "vllm:s3ec_index_age_seconds",
        "Time since the bucket last answered a refresh of this node. Absent before the first.",
        "max",
    ),
    "level.tier_bytes": (
        "vllm:s3ec_tier_bytes",
        "Bytes in `cache_dir`. All engines of a node say the same: do not add them up.",
        "max",
    ),
    "level.tier_budget_bytes": (
        "vllm:s3ec_tier_budget_bytes",
        "What that is kept below (`cache_bytes`).",
        "max",
    ),
}
_SOURCES = {
    "tier": "It was on this node's disk. It only had to be verified and opened.",
    "bucket": "It was downloaded.",
}
_REASONS = {
    "checksum": "The bytes of the tensor do not have the checksum that the header names.",
    "dtype": "The data type is none that s3ec stores.",
    "header": "The header is not what s3ec writes.",
    "identifier": "It was written for another identifier.",
    "length": "There are fewer or more bytes than the header says.",
    "namespace": "It was written for another namespace.",
    "nonfinite": "The tensor holds NaN or infinity.",
    "shape": "Rows and width are not two positive numbers, or contradict each other.",
    "size": "It is larger than any sound entry can be.",
    "version": "It has a format that this release does not know.",
}
# prefix of counters -> (Prometheus name, help, label name, what the label's values mean)
LABELLED: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "fetch_items.": (
        "vllm:s3ec_fetches",
        "Embeddings brought to this node.",
        "source",
        _SOURCES,
    ),
    "fetch_bytes.": (
        "vllm:s3ec_fetch_bytes",
        "Bytes brought to this node.",
        "source",
        _SOURCES,
    ),
    "fetch_seconds.": (
        "vllm:s3ec_fetch_seconds",
        "Time fetches took, in sum.",
        "source",
        _SOURCES,
    ),
    "fetch.": (
        "vllm:s3ec_fetch_outcomes",
        "How fetches ended.",
        "outcome",
        {
            "ready": "The embedding is on this node, verified and held open.",
            "absent": "Neither this node nor the bucket has it.",
            "mismatch": "It is there, but it is not what the request needs.",
            "corrupt": "It is there, but it is unusable.",
            "unavailable": "Bucket or disk did not answer in time.",
            "denied": "The bucket refused. The fetch is also counted as absent or unavailable.",
        },
    ),
    "corrupt.": ("vllm:s3ec_corrupt", "Stored entries that were unusable.", "reason", _REASONS),
    "mismatch.": (
        "vllm:s3ec_mismatches",
        "Entries that did not fit the request.",
        "field",
        {
            "rows": "The entry has other rows than the request has room for.",
            "width": "The entry has another width than the namespace's record.",
            "dtype": "The entry has another data type than the namespace's record.",
            "modality": "The entry is of another modality than the request's item.",
            "placeholder": "A request without pixels claims another size than the entry has.",
            "size": "The object is larger than the request's embedding can be.",
            "no_record": "The namespace has no record of width and data type yet.",
            "namespace": "Also counted as corrupt for that reason.",
            "version": "Also counted as corrupt for that reason.",
            "nonfinite": "Also counted as corrupt for that reason.",
        },
    ),
    "save_declined.": (
        "vllm:s3ec_saves_declined",
        "Embeddings that were not stored because they are not worth it (`save` = worth).",
        "reason",
        {
            "first": "It was encoded for the first time, as far as this engine remembers.",
            "cheap": "To encode it takes less time than to bring it from the bucket.",
        },
    ),
    "spool.": (
        "vllm:s3ec_spool",
        "Embeddings that were taken over, uploaded late, left behind, or refused by the disk.",
        "event",
        {
            "adopted": "Taken over from a process that ended.",
            "replayed": "Of those, the ones that the bucket has answered for.",
            "left": "Left for the next process when this one ended.",
            "refused": "Not written to the disk. They are uploaded from memory.",
        },
    ),
    "save_problem.": (
        "vllm:s3ec_save_problems",
        "Embeddings that were not stored, or not at the first try.",
        "reason",
        {
            "unavailable": "An upload failed and is tried again: the bucket gave no good answer.",
            "denied": "An upload failed and is tried again: the bucket refused.",
            "dropped": "The save queue was full. Not stored.",
            "abandoned": "Neither bucket nor spool took it before the process ended. Not stored.",
            "record": "Its width or data type is not that of the namespace's record. Not stored.",
            "bad_object": "A bad object of the bucket has its name. Given up, see "
            "`s3ec_bad_objects`.",
            "shape": "The encoder's output was no tensor. Not stored.",
            "refused.adapter": "The LoRA adapter's files have changed. Not stored.",
            "unreadable": "The spooled file cannot be read. It is tried again.",
            "vanished": "The spooled file is gone. Not stored.",
            "refused.identifier": "The identifier may not be shared. Not stored.",
            "refused.REASON": "The tensor cannot be stored, for a reason as of `s3ec_corrupt`.",
        },
    ),
}
# (Prometheus name, help, labels, counter of ours -> the labels' values)
LOOKUPS = (
    "vllm:s3ec_lookups",
    "Where the encoder inputs of requests were found, once for each input that a step needed. What "
    "one tier misses the next is asked for, so device misses are node hits and misses, node misses "
    "are bucket hits and misses, and bucket misses were encoded (`s3ec_misses`).",
    ("tier", "outcome"),
    {
        "lookups.device.hit": ("device", "hit"),
        "lookups.device.miss": ("device", "miss"),
        "lookups.node.hit": ("node", "hit"),
        "lookups.node.miss": ("node", "miss"),
        "lookups.bucket.hit": ("bucket", "hit"),
        "lookups.bucket.miss": ("bucket", "miss"),
    },
)
LOOKUP_MEANINGS = {
    "device hit": "vLLM's encoder cache held it when a step needed it, or got it in this very step "
    "for another input.",
    "device miss": "The device did not hold it: `s3ec_hits` and `s3ec_misses` together.",
    "node hit": "It was granted from this node's disk. It had been used here before, or saved.",
    "node miss": "This node's disk did not give it in time.",
    "bucket hit": "It was granted after a download, and nobody had loaded it since. In a pure "
    "producer, which loads nothing and asks no disk: the corpus holds it.",
    "bucket miss": "The bucket did not give it in time: it is not there, not known to be there, "
    "too slow, or not asked since it is down. So it was encoded.",
}
# histogram of ours, up to the label's value -> (Prometheus name, help, label, what its values mean)
HISTOGRAMS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "fetch_time.": (
        "vllm:s3ec_fetch_time_seconds",
        "Time that one fetch took, from its start until the entry was open.",
        "source",
        _SOURCES,
    ),
    "load_time": (
        "vllm:s3ec_load_time_seconds",
        "Time that one rank's step spent bringing its embeddings into the encoder cache.",
        "",
        {},
    ),
    "save_time": (
        "vllm:s3ec_save_time_seconds",
        "Time from the copy of an embedding off the device to the bucket's confirmation. Not of "
        "what the bucket had already, nor of what a dead process left.",
        "",
        {},
    ),
    "wait_time": (
        "vllm:s3ec_wait_time_seconds",
        "Time that a request was deferred, without the time in which vLLM did not ask for it.",
        "",
        {},
    ),
}
# Of interest to a debugger only: counted, and not on /metrics.
NOT_EXPORTED = {
    "fetch_parked": "Fetches that waited for another process of the node.",
    "index.downloads": "Deltas and snapshots of the index that were downloaded.",
    "index.missing": "Times that a key was denied for a while, since it was not to be had.",
    "skip.": "Chat requests that SkipPictures saw; it has a metric of its own.",
}


def zeros() -> dict[str, float]:
    """Every counter with a label, as 0; without those of which nobody knows all values.

    Prometheus sees no increase in a series that begins at 1. An alert on the first error of a kind
    would stay silent.
    """
    return {
        prefix + value: 0.0
        for prefix, (_name, _text, _label, meanings) in LABELLED.items()
        for value in meanings
        if not value.endswith(".REASON")  # stands for many
    }
