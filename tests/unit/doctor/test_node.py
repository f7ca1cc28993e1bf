# SPDX-License-Identifier: Apache-2.0
"""The cache folder of this node."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from s3ec.doctor import node
from s3ec.doctor.check import Verdict
from tests.support.disks import dead_share
from tests.unit.doctor.conftest import MakePatient, says


def test_absent_folder_is_tried_and_taken_away_again(
    make_patient: MakePatient, tmp_path: Path
) -> None:
    patient = make_patient(cache_dir=str(tmp_path / "a" / "b"))
    for check in (node.cache_folder, node.cache_space):
        assert check(patient).verdict != Verdict.FAIL
    assert os.listdir(tmp_path) == []


def test_present_folder_is_left_as_it_was(make_patient: MakePatient, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (folder / "other").write_text("mine")
    patient = make_patient()
    assert node.cache_folder(patient).verdict != Verdict.FAIL
    assert os.listdir(folder) == ["other"]


def test_folder_that_others_may_write_fails(make_patient: MakePatient, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    says(
        node.cache_folder(make_patient()),
        Verdict.FAIL,
        found="writable by other users",
        mend="chmod 700",
    )


def test_folder_of_another_user_fails(make_patient: MakePatient, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        folder = Path("/usr")  # root's
    says(
        node.cache_folder(make_patient(cache_dir=str(folder))), Verdict.FAIL, found="belongs to uid"
    )


def test_file_in_place_of_the_folder_fails(make_patient: MakePatient, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert node.cache_folder(make_patient()).verdict == Verdict.FAIL


def test_folder_that_cannot_be_made_fails(make_patient: MakePatient) -> None:
    says(
        node.cache_folder(make_patient(cache_dir="/proc/s3ec-cache")),
        Verdict.FAIL,
        found="/proc/s3ec-cache",
    )


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "chown"),
        (errno.EIO, "local disk"),
    ],
)
def test_refusals_of_the_disk_have_remedies(
    make_patient: MakePatient, monkeypatch: pytest.MonkeyPatch, number: int, part: str
) -> None:
    def write_bytes(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    says(node.cache_folder(make_patient()), Verdict.FAIL, mend=part)


@pytest.mark.parametrize(
    ("kind", "verdict", "part"),
    [
        ("ext4", Verdict.OK, "on ext4"),
        ("tmpfs", Verdict.OK, "memory"),
        ("overlay", Verdict.WARN, "container"),
        ("fuse.fuse-overlayfs", Verdict.OK, "on fuse"),
    ],
)
def test_kind_of_file_system_is_judged(
    make_patient: MakePatient,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    verdict: Verdict,
    part: str,
) -> None:
    monkeypatch.setattr(node, "file_system", lambda path: kind)
    says(node.cache_folder(make_patient()), verdict, found=part)


def test_folder_that_other_machines_share_fails_and_is_not_touched(
    make_patient: MakePatient, tmp_path: Path
) -> None:
    with dead_share(tmp_path / "share"):
        patient = make_patient(cache_dir=str(tmp_path / "share" / "cache"))
        says(
            node.cache_folder(patient),
            Verdict.FAIL,
            found="(fuse.sshfs)",
            mend="set `cache_dir` to a folder on a local disk",
        )


def test_no_hard_links_is_a_warning(
    make_patient: MakePatient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    outcome = node.cache_folder(make_patient())
    assert outcome.verdict == Verdict.WARN
    assert "Operation not permitted" in outcome.found
    assert "not kept here" in outcome.mend
    assert os.listdir(tmp_path) == []


def test_room_for_the_budget_is_well(make_patient: MakePatient) -> None:
    says(node.cache_space(make_patient(cache_bytes="1MiB", min_free_bytes=0)), Verdict.OK)


def test_budget_larger_than_the_disk_is_a_warning(make_patient: MakePatient) -> None:
    says(
        node.cache_space(make_patient(cache_bytes=10**18, min_free_bytes=0)),
        Verdict.WARN,
        mend="set `cache_bytes` to",
    )


def test_disk_below_min_free_bytes_fails(make_patient: MakePatient) -> None:
    says(node.cache_space(make_patient(cache_bytes="1GiB", min_free_bytes=10**18)), Verdict.FAIL)


def test_bytes_of_the_tier_count_as_room(
    make_patient: MakePatient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "v1" / "objects" / "ns-0123456789abcdef" / "ab"
    folder.mkdir(parents=True)
    (folder / f"{'ab' * 32}.safetensors").write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(node, "free_bytes", lambda path: 2**20)
    patient = make_patient(cache_bytes="4MiB", min_free_bytes=0)
    says(node.cache_space(patient), Verdict.OK, found="3MiB in use")
