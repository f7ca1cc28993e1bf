# SPDX-License-Identifier: Apache-2.0
"""What the doctor's child says of a real vLLM, asked in this process, which has imported one."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.dev.rigs.models import write_gemma3
from s3ec.doctor import serving
from s3ec.doctor.check import Verdict
from s3ec.settings import Settings
from tests.unit.doctor.conftest import MakePatient, says

pytest.importorskip("vllm")
# vLLM and torch import more of themselves as they are used, and warn; that is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """vLLM sets variables when it makes a configuration."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("model") / "tiny")


def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *vllm_args: str) -> dict[str, Any]:
    """The stages of a child that was asked about these arguments."""
    settings = Settings.model_validate({"bucket": "corpus", "cache_dir": tmp_path / "cache"})
    request = {"settings": settings.model_dump(mode="json"), "args": vllm_args, "pages": None}
    replies = tmp_path / "replies"
    descriptor = os.open(replies, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # the probe closes it
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(sys, "argv", ["vllm_probe", str(descriptor)])
    serving.answer_parent()
    stages: dict[str, Any] = {}
    for line in replies.read_text().splitlines():
        stages.update(json.loads(line))
    return stages


@pytest.mark.slow
def test_arguments_that_have_images_numbered_are_found_with_the_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, make_patient: MakePatient
) -> None:
    numbered = ("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching")
    stages = ask(monkeypatch, tmp_path, "--model", str(model), *numbered)
    patient = make_patient()
    patient.vllm_args = ["--model", str(model)]
    patient.child = SimpleNamespace(stage=stages.get)
    says(serving.model(patient), Verdict.FAIL, mend="--mm-processor-cache-gb")
    assert stages["model"]["problem"] is None
    assert stages["namespace"]["descriptor"]["dtype"] == "bfloat16"
    told = serving.namespace(patient)
    assert told.verdict == Verdict.OK
    assert "weights sha256:" in told.found


@pytest.mark.slow
def test_a_manager_of_the_encoder_cache_that_vllm_will_not_find_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    def asked(name: str) -> dict[str, Any]:
        chosen = json.dumps({"encoder_cache_manager_cls": name})
        return ask(monkeypatch, tmp_path, "--model", str(model), "--ec-manager-config", chosen)

    assert "model" in asked("s3ec.TieredEncoderCacheManager")
    with pytest.raises(AttributeError, match="Nothing"):
        asked("s3ec.Nothing")


@pytest.mark.parametrize("ignored", [["--port"], ["--port", "--ec-manager-config"]])
def test_a_vllm_that_cannot_replace_its_manager_says_so_where_that_was_asked_for(
    ignored: list[str], make_patient: MakePatient
) -> None:
    answer = {"model": "m", "problem": None, "identifiers": None, "ignored": ignored}
    patient = make_patient()
    patient.vllm_args = ["--model", "m"]
    patient.child = SimpleNamespace(stage={"model": answer}.get)
    told = serving.model(patient)
    assert told.verdict == (Verdict.FAIL if len(ignored) == 2 else Verdict.OK)
    assert ("0.32" in told.mend) == (len(ignored) == 2)


@pytest.mark.slow
def test_weights_that_are_not_here_are_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path, make_patient: MakePatient
) -> None:
    place = shutil.copytree(
        model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    stages = ask(monkeypatch, tmp_path, "--model", str(place))
    patient = make_patient()
    patient.child = SimpleNamespace(stage=stages.get)
    told = serving.namespace(patient)
    assert told.verdict == Verdict.WARN
    assert "nothing would be loaded or saved: there are no weights of a known kind" in told.found


def test_folder_that_is_not_there_is_not_taken_for_a_name_on_a_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="no folder /nowhere/model"):
        ask(monkeypatch, tmp_path, "--model", "/nowhere/model")
    told = (tmp_path / "replies").read_text().splitlines()
    assert [list(json.loads(line)) for line in told] == [["vllm"]]
