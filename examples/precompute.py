#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Encode every picture below a folder into the bucket.

    python examples/precompute.py --model google/gemma-3-27b-it --images /data/pages \
        --config '{"bucket": "embeddings", "region": "eu-central-1"}'

Run it again after it was interrupted, or for pictures that came later: what the bucket has is not
encoded again. Several at once share the work with --shard 0/4, --shard 1/4 and so on. Exit status 0
means that the bucket has confirmed every picture; 1 that some are missing, which are named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


def main() -> int:
    """Encode them; returns the exit status."""
    args = _arguments()
    from vllm import LLM
    from vllm.config import ECTransferConfig

    root = args.images.resolve()
    found = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
    shard, shards = args.shard
    pictures = found[shard::shards]
    print(f"{len(pictures)} of {len(found)} pictures below {root}", flush=True)
    if not pictures:
        return 0 if found else 1
    llm = LLM(
        model=args.model,
        # Pictures are named by a file's URL, so that they are hashed as a server hashes what its
        # clients send: by the file's bytes.
        allowed_local_media_path=str(root),
        ec_transfer_config=ECTransferConfig(
            ec_connector="S3ECConnector",
            ec_role="ec_producer",
            # Only exact columns say for sure that the bucket has a picture; filters may be wrong.
            ec_connector_extra_config={"index": "exact", **args.config},
        ),
        **args.engine,
    )
    failed: dict[Path, str] = {}
    for start in range(0, len(pictures), args.batch):
        failed |= _encode(llm, pictures[start : start + args.batch])
        print(f"{min(start + args.batch, len(pictures))} of {len(pictures)}", flush=True)
    # Waits until the bucket has confirmed every save; what it has not by then stays on this disk.
    llm.llm_engine.engine_core.shutdown(timeout=args.timeout_s)
    for path, reason in failed.items():
        print(f"not encoded: {path}: {reason}", file=sys.stderr)
    nbytes = _waiting_nbytes(args.config)
    if nbytes:
        print(
            f"{nbytes} bytes of embeddings wait on this node for the bucket; run this again to "
            "upload them",
            file=sys.stderr,
        )
    return 1 if failed or nbytes else 0


def _encode(llm: Any, pictures: list[Path]) -> dict[Path, str]:
    """Encode a batch; returns the pictures that could not be, with the reason."""
    try:
        _chat(llm, pictures)
        return {}
    except Exception as exc:  # noqa: BLE001  vLLM's own, of any class: a file that is no picture
        if len(pictures) == 1:
            return {pictures[0]: f"{type(exc).__name__}: {exc}"}
    # One of them spoilt the batch: find it, and encode the others.
    failed: dict[Path, str] = {}
    for picture in pictures:
        failed |= _encode(llm, [picture])
    return failed


def _chat(llm: Any, pictures: list[Path]) -> None:
    parts = [{"type": "image_url", "image_url": {"url": path.as_uri()}} for path in pictures]
    conversations = [[{"role": "user", "content": [part]}] for part in parts]
    llm.chat(conversations, _sampling(), use_tqdm=False)


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1)


def _waiting_nbytes(config: dict[str, Any]) -> int:
    """Bytes of the embeddings on this node's disk that no bucket has confirmed yet."""
    command = [sys.executable, "-m", "s3ec", "tier", "--json", "--config", json.dumps(config)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    nbytes: int = json.loads(done.stdout)["spool"]["bytes"]
    return nbytes


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="as the server's --model, letter by letter")
    parser.add_argument("--images", required=True, type=Path, help="folder of the pictures")
    parser.add_argument(
        "--config", type=json.loads, default={}, help="JSON: ec_connector_extra_config"
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="JSON: further arguments of vllm.LLM"
    )
    parser.add_argument("--batch", type=int, default=256, help="pictures handed over at a time")
    parser.add_argument("--shard", type=_shard, default=(0, 1), help="this one's part, as 0/4")
    parser.add_argument("--timeout-s", type=int, default=600, help="for the last uploads")
    return parser.parse_args()


def _shard(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as 0/4, from 0/4 to 3/4")
    return int(number), int(of)


if __name__ == "__main__":
    sys.exit(main())
