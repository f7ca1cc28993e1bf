# SPDX-License-Identifier: Apache-2.0
"""Processes that save, to be killed: this one forks a child per line of JSON that it reads.

It imports torch and the SDK once, which takes seconds, and has no thread when it forks. Each
child does what a worker does with its save queue, for a node whose scheduler does not ask for
an encode of what the tier holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from s3ec.identity import OBJECT_SUFFIX, Key, Namespace, make_key

ROWS, WIDTH = 64, 128
NAMESPACE = Namespace.from_descriptor({"model": "tiny"})


def identifier_at(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def key_at(number: int) -> Key:
    key = make_key(identifier_at(number))
    assert key is not None
    return key


def data_at(number: int, rows: int = ROWS) -> bytes:
    """A bfloat16 tensor's bytes, all finite: every other byte holds most of the exponent."""
    nbytes = rows * WIDTH * 2
    start = hashlib.sha512(str(number).encode()).digest()
    data = bytearray(start * (nbytes // len(start)))
    data[1::2] = b"\x3f" * (nbytes // 2)
    return bytes(data)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def spooled_below(cache_dir: Path) -> set[str]:
    """Digests, as hex. Two looks: an entry that is adopted moves, and a walk can miss it."""
    return _look_below(cache_dir) | _look_below(cache_dir)


def _look_below(cache_dir: Path) -> set[str]:
    # Not Path.rglob: it does not bear folders that vanish meanwhile.
    names = (name for _, _, files in os.walk(cache_dir / "v1" / "spool") for name in files)
    return {name[: -len(OBJECT_SUFFIX)].rpartition("--")[2] for name in names if "--" in name}


def save(*, settings: dict[str, str], overflow: str, count: int, finish: bool) -> None:
    """Save what the tier does not hold; then wait to be killed, or see it into the bucket."""
    import torch

    from s3ec.connector.messages import Save
    from s3ec.connector.saves import SaveQueue
    from s3ec.node import Node
    from s3ec.settings import Settings

    node = Node(Settings.model_validate(settings), NAMESPACE)
    queue = SaveQueue(node, budget_bytes=2**20, overflow=overflow)  # type: ignore[arg-type]
    for number in range(count):
        if not node.tier.entries.contains(key_at(number)):
            tensor = torch.frombuffer(bytearray(data_at(number)), dtype=torch.bfloat16)
            taken = queue.put(identifier_at(number), Save("image", {}), tensor.view(ROWS, WIDTH))
            say(f"put {number}" if taken else f"refused {number}")
    say("all")
    while not finish or spooled_below(Path(settings["cache_dir"])):
        time.sleep(0.01)
    left = queue.drain(30)
    node.close(5)
    say(f"left {left} errors {node.counters.get('internal_errors'):g}")


def main() -> None:
    import torch

    import s3ec.connector.saves
    import s3ec.store.aioboto3_s3  # noqa: F401

    torch.set_num_threads(1)
    say("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                save(**json.loads(line))
                status = 0
            except Exception:  # noqa: BLE001 - the top of a process
                traceback.print_exc()
            finally:
                os._exit(status)
        say(f"pid {pid}")
        os.waitpid(pid, 0)
        say("gone")


if __name__ == "__main__":
    main()
