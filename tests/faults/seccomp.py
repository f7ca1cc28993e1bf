# SPDX-License-Identifier: Apache-2.0
"""Has the kernel refuse hard links to this process, as it does on FAT and some network disks."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

# linkat and, where there is one, link; with the value that seccomp gives for the architecture.
_CALLS = {"x86_64": (0xC000003E, (86, 265)), "aarch64": (0xC00000B7, (37,))}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_hard_links() -> bool:
    """From here on link(2) fails with EPERM in this thread and all that it starts, for good.

    Returns:
        False where this machine cannot do that.
    """
    if platform.machine() not in _CALLS:
        return False
    architecture, numbers = _CALLS[platform.machine()]
    lines = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
        *((_JUMP_IF_EQUAL, len(numbers) - at, 0, nr) for at, nr in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
    ]
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = _Program(len(lines), program)
    done = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    return done and libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_)) == 0
