# SPDX-License-Identifier: Apache-2.0
"""Which file system holds the folder, and which ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.errors import TierError
from s3ec.tier import mounts
from tests.support.disks import dead_share
from tests.unit.tier.cases import new_tier

TABLE = """\
22 1 0:21 / / rw - overlay overlay rw
23 22 0:22 / /dev/shm rw - tmpfs tmpfs rw
24 22 0:23 / /mnt/my\\040disk rw shared:1 - ext4 /dev/sda1 rw
25 22 0:24 / /mnt/share rw - nfs4 server:/x rw
26 22 0:25 / /mnt/remote rw - fuse.sshfs host:/ rw
27 22 0:26 / /mnt/twice rw - ext4 /dev/sdb rw
28 22 0:27 / /mnt/twice rw - xfs /dev/sdc rw
29 22 0:28 / /mnt/share/local rw - xfs /dev/sdd rw
30 22 0:29 / /home/auto rw - autofs systemd-1 rw
31 22 0:30 / /home/auto rw - nfs server:/home rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/cache", "overlay"),
        ("/dev/shm/s3ec", "tmpfs"),
        ("/mnt/my disk/x", "ext4"),
        ("/mnt/share/x", "nfs4"),
        ("/mnt/share/local/x", "xfs"),
        ("/mnt/sharedelse", "overlay"),
        ("/mnt/remote", "fuse.sshfs"),
        ("/mnt/twice", "xfs"),
        ("/home/auto/me/.cache/s3ec", "nfs"),
    ],
)
def test_file_system_is_that_of_the_nearest_mount(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "mountinfo").write_text(TABLE)
    assert mounts.file_system(Path(path), mounts=tmp_path / "mountinfo") == kind


def test_file_system_is_unknown_without_a_table(tmp_path: Path) -> None:
    assert mounts.file_system(Path("/"), mounts=tmp_path / "none") == "unknown"


@pytest.mark.parametrize(
    "kind",
    [
        *("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "beegfs", "gpfs"),
        *("fuse", "fuse.s3fs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.mount-s3"),
    ],
)
def test_folder_that_other_machines_share_is_refused_in_one_line_before_it_is_touched(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = root.with_name("mountinfo")
    table.write_text(f"22 1 0:21 / {root.parent} rw - {kind} server:/x rw\n")
    monkeypatch.setattr(mounts, "MOUNTS", table)
    with pytest.raises(TierError, match=rf"{root} is on .*\({kind}\); set `cache_dir` to") as said:
        new_tier(root)
    assert "\n" not in str(said.value)
    assert not root.exists()


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs"]
)
def test_folder_of_this_machine_is_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = root.with_name("mountinfo")
    table.write_text(f"22 1 0:21 / {root.parent} rw - {kind} /dev/sda rw\n")
    monkeypatch.setattr(mounts, "MOUNTS", table)
    new_tier(root).close()


def test_share_that_does_not_answer_is_refused_like_any_other(tmp_path: Path) -> None:
    """A real mount."""
    with dead_share(tmp_path / "share"), pytest.raises(TierError, match=r"\(fuse\.sshfs\); set"):
        new_tier(tmp_path / "share")
