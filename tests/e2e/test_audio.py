# SPDX-License-Identifier: Apache-2.0
"""Recordings instead of pictures: encoded once, answered from the bucket, also without samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from s3ec import codec
from s3ec.dev.rigs.engine import EngineProcess, ec_config, text
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, STEADY
from tests.e2e.audio_model import write_qwen2_audio, write_recordings
from tests.e2e.rig import FROM_BUCKET, HITS, LOADS, MISSES, eventually, moved, until_index_is_read

_COUNT = 3
_ROWS = 25  # of a second
_PROMPT = (
    "<|im_start|>user\n<|audio_bos|><|AUDIO|><|audio_eos|>what is this?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def _recording(path: Path, uuid: str | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "audio_url", "audio_url": {"url": path.resolve().as_uri()}}
    return part if uuid is None else {**part, "uuid": uuid}


@dataclass(frozen=True)
class _Rig:
    engine: EngineProcess
    recordings: list[Path]
    stored: list[bytes]

    def ask(self, *parts: dict[str, Any]) -> dict[str, Any]:
        return self.engine.chat([[*parts, text("what is this?")]], logprobs=3)[0]

    def without_samples(self, uuid: str, rows: int = _ROWS) -> dict[str, Any]:
        return self.engine.generate(
            _PROMPT, {"audio": {"audio_num_tokens": [rows]}}, {"audio": [uuid]}
        )


@pytest.fixture(scope="module")
def rig(workdir: Path, nursery: EngineForkServer) -> Iterator[_Rig]:
    model = write_qwen2_audio(workdir / "qwen2-audio")
    recordings = write_recordings(workdir / "recordings", _COUNT)
    folder = workdir / "audio corpus"
    folder.mkdir()

    def entries() -> list[Path]:
        return list(folder.rglob("objects/**/*.safetensors"))

    def engine(role: str, env: dict[str, str]) -> EngineProcess:
        place = {"url": folder.as_uri(), "cache_dir": str(workdir / f"audio-{role}-tier")}
        ec = ec_config(
            role, {**place, "cache_bytes": "1GiB", "min_free_bytes": 0, "wait": "always"}
        )
        return EngineProcess(
            model,
            ec=ec,
            log_path=workdir / f"audio-{role}.log",
            media=workdir,
            env=env,
            options={"limit_mm_per_prompt": {"audio": 4}},
            nursery=nursery,
        )

    with engine("ec_producer", ONE_PROCESS) as producer:
        prompts = [[_recording(path), text("?")] for path in recordings]
        prompts.append([_recording(recordings[0], "named"), text("?")])
        producer.chat(prompts, max_tokens=1)
        eventually(lambda: len(entries()) == _COUNT + 1, "all embeddings are stored")
    stored = [path.read_bytes() for path in entries()]
    with engine("ec_consumer", STEADY) as consumer:
        until_index_is_read(consumer, len(stored))
        yield _Rig(consumer, recordings, stored)


def test_recordings_are_answered_from_the_bucket_as_they_are_when_encoded(rig: _Rig) -> None:
    before = rig.engine.counters()
    loaded = [rig.ask(_recording(path)) for path in rig.recordings]
    counts = moved(before, rig.engine.counters())
    # Under names that nobody stored these are encoded here.
    encoded = [rig.ask(_recording(path, f"unknown-{path.stem}")) for path in rig.recordings]
    total = moved(before, rig.engine.counters())
    assert [each["token_ids"] for each in loaded] == [each["token_ids"] for each in encoded]
    assert [each["logprobs"] for each in loaded] == [each["logprobs"] for each in encoded]
    assert len({tuple(each["token_ids"]) for each in loaded}) == _COUNT
    assert counts[HITS] == counts[LOADS] == counts[FROM_BUCKET] == _COUNT
    assert MISSES not in counts
    assert total[MISSES] == _COUNT


def test_entries_say_that_they_are_audio(rig: _Rig) -> None:
    headers = [codec.parse_header(blob) for blob in rig.stored]
    assert {header.modality for header in headers} == {"audio"}
    assert {header.shape.rows for header in headers} == {_ROWS}


def test_a_name_and_a_length_give_the_answer_that_the_samples_give(rig: _Rig) -> None:
    asked = rig.without_samples("named")
    again = rig.ask(_recording(rig.recordings[0], "not-known"))
    assert asked["finish_reason"] == "length"
    assert asked["token_ids"] == again["token_ids"]


def test_a_length_that_is_not_the_entrys_ends_alone_with_an_error(rig: _Rig) -> None:
    """What nobody stored is refused as for pictures, in test_ask_without_pixels.py."""
    assert rig.without_samples("named", _ROWS - 1)["finish_reason"] == "error"
    assert rig.ask(_recording(rig.recordings[1]))["finish_reason"] == "length"
