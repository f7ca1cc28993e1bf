# SPDX-License-Identifier: Apache-2.0
"""The environment in which a vLLM engine runs on the CPU, and the mends its imports need there.

Loaded at the start of every Python process of such an engine (``site/sitecustomize.py``), so
it imports nothing but the standard library.

The torchvision, torchaudio and torchcodec of the package index are CUDA builds. Beside a CPU
torch their C++ libraries cannot be loaded and importing them fails (torchvision 0.28: ``operator
torchvision::nms does not exist``; torchaudio 2.11 and torchcodec 0.17: ``Could not load this
library``), although image processing uses only the Python part of the first and nothing of the
others. vLLM 0.32 imports all three at its start.

vLLM's V2 model runner, the default of CUDA users since 0.32, needs Triton. Triton's interpreter
runs its kernels on a CPU (``V2_RUNNER``), but vLLM looks for a compiler for the CPU, which the
published Triton lacks. So the interpreter is made to look like one.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader

SITE_DIR = Path(__file__).with_name("site")
# One thread: the same sums in the same order in every engine, so that answers can be compared to
# the last bit, and nobody bound to a core that other engines use.
STEADY = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# vLLM in one process instead of three: it starts in half the time, scheduler and worker half share
# one Node, and its steps and its encoder can be timed and slowed down from outside.
ONE_PROCESS = STEADY | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# The model runner that CUDA users get, on a CPU (0.32 and newer). Triton reads its variable while
# vLLM's kernels are imported, so an engine from a nursery needs a nursery with it.
V2_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
# Arguments of ``vllm.LLM`` where each picture is a new one.
NEW_PICTURES = {
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
    # vLLM's own cache of processed pictures would grow to 4 GiB.
    "mm_processor_cache_gb": 0.01,
}

_PROBE = """
import sys
known = {"torchvision": RuntimeError, "torchaudio": OSError, "torchcodec": OSError}
for name, error in known.items():
    try:
        __import__(name)
    except error:
        sys.exit(1)
    except Exception:
        pass  # absent, or lacking what no CPU build mends, as torchcodec without FFmpeg
"""
_FIXED = {
    "HF_HUB_OFFLINE": "1",  # models are folders; nothing may be looked up
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # vLLM's own choice. A child with another HOME would not find what is known of a model's class,
    # and vLLM would start one more process to look at it.
    "VLLM_CACHE_ROOT": os.path.expanduser("~/.cache/vllm"),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def engine_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process that runs a vLLM engine on the CPU.

    Args:
        base: Where to start from, ``os.environ`` if None. What it sets of the tunables
            (KV cache space, log level) is kept.

    Returns:
        A new dictionary: no downloads, no usage reports, and ``PYTHONPATH`` beginning with
        the folder whose ``sitecustomize`` does ``install_here`` in the child and its children.
    """
    env = _DEFAULTS | dict(os.environ if base is None else base) | _FIXED
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [str(SITE_DIR), *(path for path in others if path != str(SITE_DIR))]
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


def install_here() -> None:
    """Mend these packages in this process, as they are imported; free until then.

    Changes nothing where their libraries load. Call it before the first import of one of them,
    of transformers' processors or of vllm. A second call does nothing.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def install_for_environment() -> Path | None:
    """Have every Python of this environment do ``install_here``, where an import fails without.

    For an environment of one's own only: it writes a ``.pth`` file into site-packages.

    Returns:
        The file, or None where nothing needs mending.
    """
    import subprocess

    path = Path(sysconfig.get_path("purelib")) / "s3ec_vllm_cpu.pth"
    if not path.exists():
        probe = [sys.executable, "-c", _PROBE]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return None
    path.write_text("import s3ec.dev.rigs.vllm_cpu as mend; mend.install_here()\n")
    return path


def _declare_operators(extension: ModuleType) -> None:
    """Declare the two operators that torchvision's Python part names and could not load."""
    if extension._has_ops():
        return
    import torch

    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(operator + signature)  # type: ignore[no-untyped-call]
    # The operators vanish with the library object.
    extension.s3ec_operators = library  # type: ignore[attr-defined]


def _tolerate_missing_library(utils: ModuleType) -> None:
    """Have torchaudio treat a library that does not load as it treats one that is not there."""
    load: Callable[[str], bool] = utils._load_lib

    def load_or_absent(name: str) -> bool:
        try:
            return load(name)
        except OSError:
            return False

    utils._load_lib = load_or_absent  # type: ignore[attr-defined]


def _report_as_absent(utils: ModuleType) -> None:
    """Have torchcodec fail with the ImportError that vLLM expects of it, not with an OSError."""
    load: Callable[[], None] = utils.load_image_library

    def load_or_absent() -> None:
        try:
            load()
        except OSError as exc:
            raise ImportError("torchcodec's libraries do not load beside this torch") from exc

    utils.load_image_library = load_or_absent  # type: ignore[attr-defined]


def _offer_the_interpreter(backends: ModuleType) -> None:
    """Have vLLM find one active driver where the interpreter runs Triton's kernels."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from types import SimpleNamespace

        # vLLM's build for the CPU asks for this name, other builds do not count it. None compiles.
        for name, is_active in {"cpu": False, "interpreter": True}.items():
            driver = SimpleNamespace(is_active=lambda is_active=is_active: is_active)
            backends.backends[name] = SimpleNamespace(driver=driver, compiler=None)


def _encode_as_on_a_gpu(runners: ModuleType) -> None:
    """Have a pure producer run the encoder's own V2 runner, as workers with a GPU do."""
    with contextlib.suppress(ImportError):  # 0.31 has none
        from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

        whole: Any = runners.CPUModelRunner
        encoder: Any = type("CPUEncoderModelRunner", (MMEncoderModelRunner, whole), {})

        def made(vllm_config: Any, device: Any) -> Any:
            return (encoder if vllm_config.is_mm_encoder_only else whole)(vllm_config, device)

        runners.CPUModelRunner = made  # type: ignore[attr-defined]


# What to do right after a module's own code ran. torchvision.extension is the first module of
# its package to run, and the one that tries to load the operators; the modules after it fail
# where that did not work. torchaudio and torchcodec load theirs through functions of these.
_MENDS: Mapping[str, Callable[[ModuleType], None]] = {
    "torchvision.extension": _declare_operators,
    "torchaudio._extension.utils": _tolerate_missing_library,
    "torchcodec._internally_replaced_utils": _report_as_absent,
    "triton.backends": _offer_the_interpreter,
    "vllm.v1.worker.cpu.model_runner": _encode_as_on_a_gpu,
}


class _Finder:
    """Finds the modules to mend as Python does, and hands them out with a loader of ours."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MENDS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            # Has all that Python asks of a loader; its base class takes 8 ms to import.
            spec.loader = _Loader(spec.loader, _MENDS[name])  # type: ignore[assignment]
        return spec


class _Loader:
    """Runs a module, then its mend."""

    def __init__(self, inner: Loader, mend: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._mend = mend

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._mend(module)
