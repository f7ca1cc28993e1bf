# SPDX-License-Identifier: Apache-2.0
"""Models are written once, and again only when they would differ. Engines run them in e2e."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from s3ec.dev.rigs import models
from s3ec.dev.rigs.vllm_cpu import engine_env

# Importing what writes a model takes most of the time, so a process writes several.
_WRITE = """
import sys
from s3ec.dev.rigs.models import main
for arguments in sys.argv[1:]:
    main(arguments.split())
"""


def _write(*commands: str) -> str:
    """Run ``python -m s3ec.dev.rigs.models`` with each of them; what it complained of."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _WRITE, *commands],
        env=engine_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All families by two processes, which also have other hashes of strings."""
    root = tmp_path_factory.mktemp("models")
    families = ("gemma3", *models.QWEN_VL_FAMILIES)
    for name in ("one", "same"):
        assert _write(*(f"{family} {root}/{family}/{name}" for family in families)) == ""
    return root


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("gemma3", "vision_tower.vision_model.embeddings.position_embedding.weight"),
        ("qwen2-vl", "visual.patch_embed.proj.weight"),
        ("qwen2.5-vl", "visual.patch_embed.proj.weight"),
        ("qwen3-vl", "model.visual.deepstack_merger_list.1.linear_fc1.weight"),
    ],
)
def test_model_is_quiet_and_repeatable(written: Path, family: str, tensor: str) -> None:
    folder = written / family / "one"
    one = _contents(folder)
    assert one == _contents(written / family / "same")
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert tensor in file.keys()  # noqa: SIM118 - not a dictionary
    assert json.loads(one["preprocessor_config.json"])["image_mean"]


def _count_builds(out: Path, recipe: dict[str, int], built: list[dict[str, int]]) -> None:
    models.build_once(out, recipe, lambda: built.append(recipe))


def test_second_call_builds_nothing_and_other_recipe_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[dict[str, int]] = []
    for seed in (1, 1, 2, 2, 1):
        _count_builds(tmp_path / "new" / "model", {"seed": seed}, built)
    assert built == [{"seed": 1}, {"seed": 2}, {"seed": 1}]
    monkeypatch.setattr(models, "version", lambda _name: "another release")
    _count_builds(tmp_path / "new" / "model", {"seed": 1}, built)
    assert len(built) == 4


def test_broken_build_is_built_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk full")

    built: list[dict[str, int]] = []
    _count_builds(tmp_path, {"seed": 1}, built)
    with pytest.raises(OSError, match="disk full"):
        models.build_once(tmp_path, {"seed": 2}, fail)
    # Its files may be half the one model and half the other.
    _count_builds(tmp_path, {"seed": 1}, built)
    assert len(built) == 2


def test_unknown_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="huge"):
        models.write_gemma3(tmp_path, "huge")
    with pytest.raises(KeyError, match="qwen9"):
        models.write_qwen_vl(tmp_path, "qwen9")
