# SPDX-License-Identifier: Apache-2.0
"""Imports that fail beside a CPU torch are mended, and all others are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from s3ec.dev.rigs.vllm_cpu import SITE_DIR, engine_env

_ROOT = Path(__file__).parents[3]

# Packages like torchvision and torchaudio as far as the mends know them.
_EXTENSION = "def _has_ops():\n    return {works}\n"
_UTILS = """
def _load_lib(name):
    {body}
"""
_USE_AUDIO = """
from torchaudio._extension import utils
try:
    print(utils._load_lib('a'))
except Exception as error:
    print(type(error).__name__)
"""


def _python(code: str, *paths: Path, mended: bool = True) -> str:
    base = {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(map(str, (*paths, _ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=engine_env(base) if mended else base,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sitecustomize" not in done.stderr
    return done.stdout.strip()


def _package(folder: Path, name: str, content: str) -> Path:
    path = folder.joinpath(*name.split("."))
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.relative_to(folder).parents:
        if parent != Path():
            (folder / parent / "__init__.py").touch()
    path.with_suffix(".py").write_text(content)
    return folder


def test_start_of_python_imports_neither_torch_nor_sdk() -> None:
    code = "import sys; print([m for m in ('torch', 'boto3', 'vllm') if m in sys.modules])"
    assert _python(code) == "[]"


def test_next_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.marked = __file__")
    assert _python("import sys; print(sys.marked)", tmp_path) == str(tmp_path / "sitecustomize.py")


@pytest.mark.parametrize(
    ("body", "expected"),
    [("raise OSError(name)", "False"), ("return True", "True"), ("raise KeyError(1)", "KeyError")],
)
def test_library_that_does_not_load_counts_as_absent(
    tmp_path: Path, body: str, expected: str
) -> None:
    _package(tmp_path, "torchaudio._extension.utils", _UTILS.format(body=body))
    assert _python(_USE_AUDIO, tmp_path) == expected


@pytest.mark.parametrize(("body", "expected"), [("raise OSError", "absent"), ("pass", "works")])
def test_codec_whose_library_does_not_load_counts_as_absent(
    tmp_path: Path, body: str, expected: str
) -> None:
    _package(tmp_path, "torchcodec._internally_replaced_utils", f"def load_image_library(): {body}")
    (tmp_path / "torchcodec" / "__init__.py").write_text(
        "from torchcodec._internally_replaced_utils import load_image_library as load\nload()\n"
    )
    code = "try:\n import torchcodec; print('works')\nexcept ImportError: print('absent')"
    assert _python(code, tmp_path) == expected


def test_operators_that_work_are_left_alone(tmp_path: Path) -> None:
    _package(tmp_path, "torchvision.extension", _EXTENSION.format(works=True))
    code = "import torchvision.extension as e; print(hasattr(e, 's3ec_operators'))"
    assert _python(code, tmp_path) == "False"


@pytest.mark.slow
def test_operators_that_are_missing_are_declared(tmp_path: Path) -> None:
    _package(tmp_path, "torchvision.extension", _EXTENSION.format(works=False))
    code = (
        "import torchvision.extension, torch\n"
        "print([str(getattr(torch.ops.torchvision, n).default) for n in ('nms', 'qnms')])"
    )
    assert _python(code, tmp_path) == "['torchvision.nms.default', 'torchvision.qnms.default']"


def test_engine_environment_keeps_tunables_and_forbids_downloads() -> None:
    base = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "0", "PYTHONPATH": "a::b"}
    env = engine_env(base)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["PYTHONPATH"].split(os.pathsep) == [str(SITE_DIR), "a", "b"]
    assert base["PYTHONPATH"] == "a::b"
    assert engine_env(env) == env
