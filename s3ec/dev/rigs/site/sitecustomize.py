# SPDX-License-Identifier: Apache-2.0
"""Run by Python at start-up from PYTHONPATH: mends imports that fail beside a CPU torch.

Only one ``sitecustomize`` is imported, the first on the path; this one runs the next one too.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from s3ec.dev.rigs.vllm_cpu import install_here

install_here()

_here = Path(__file__).parent
_spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if Path(p) != _here])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
