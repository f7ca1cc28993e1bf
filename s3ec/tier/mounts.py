# SPDX-License-Identifier: Apache-2.0
"""Detects the file system of a folder, and refuses those that a tier cannot use.

A tier needs a file system of this machine alone. Another machine's eviction removes a file that
this one has open, its locks are not seen here, and every hit would wait for a network. The bucket
is the shared copy.
"""

from __future__ import annotations

import re
from pathlib import Path

from s3ec.errors import TierError

MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
# Names as in /proc. 9p and virtiofs share a folder of the host with a virtual machine: their
# locks hold in one machine only, and others may use the same folder.
_SHARED = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "coda", "9p", "virtiofs", "vboxsf"),
        *("ceph", "lustre", "glusterfs", "beegfs", "gpfs", "pvfs2", "panfs", "wekafs"),
        *("gfs2", "ocfs2"),  # one disk, several machines
    )
)
# A process serves a FUSE file system, on servers mostly from a bucket or a share (s3fs, gcsfuse,
# juicefs, sshfs, ceph-fuse), and no list of those would be complete. It may rename an open file
# instead of removing it. The two here are a local disk and the layer of a rootless container.
_LOCAL_FUSE = frozenset(("fuseblk", "fuse.fuse-overlayfs"))
# Their pages are only in memory, and they do not support RWF_NOWAIT.
IN_MEMORY = frozenset(("tmpfs", "ramfs"))


def file_system(path: Path, *, mounts: Path | None = None) -> str:
    """Return the type of file system that holds a path, or would; ``unknown`` if not reported.

    Args:
        mounts: A table of mounts in the form of ``/proc/self/mountinfo``.
    """
    # First, since this access makes an automounter mount.
    real = path.resolve()
    try:
        lines = (mounts or MOUNTS).read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return "unknown"
    kind, depth = "unknown", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), before.split()[4]))
        # The later of two mounts on one folder hides the earlier.
        if real.is_relative_to(mount) and len(mount.parts) >= depth:
            kind, depth = after.split()[0], len(mount.parts)
    return kind


def require_local(root: Path) -> str:
    """Refuse a folder that other machines share, or may share; return its file system's type.

    Raises:
        TierError: Names the file system and the fix.
    """
    kind = file_system(root)
    if kind in _SHARED or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        raise TierError(
            f"{root} is on a network or shared file system ({kind}); set `cache_dir` to a folder "
            "on a local disk or in /dev/shm: the bucket is the shared copy"
        )
    return kind
