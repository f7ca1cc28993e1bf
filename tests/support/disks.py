# SPDX-License-Identifier: Apache-2.0
"""Real disks that are small, read-only, fail or hang; they need root, or the test is skipped."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NOBODY = 65534
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878  # _IOWR('X', 119 and 120, int)
_EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)


def run_or_skip(*command: str, pass_fds: tuple[int, ...] = ()) -> str:
    """What it says; without the right or the program to do so the test is skipped."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, pass_fds=pass_fds
        )
    except FileNotFoundError:
        pytest.skip(f"no {command[0]} command")
    if done.returncode:
        pytest.skip(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def small_tmpfs(folder: Path, *, size: int, inodes: int) -> Iterator[Path]:
    """A file system of its own at ``folder``; 0 inodes are as many as it likes."""
    folder.mkdir(mode=0o700)
    options = f"size={size},nr_inodes={inodes},mode=700"
    run_or_skip("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Inside, whoever comes by its path finds a read-only file system."""
    # A second mount on top: the first one is busy, since a tier keeps lock files open.
    run_or_skip("mount", "--bind", str(folder), str(folder))
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def as_plain_user(folder: str) -> Iterator[None]:
    """Inside, permissions hold: a root user is nobody, who owns ``folder``."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, _NOBODY, _NOBODY)
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def give_to_group(volume: Path, gid: int) -> None:
    """What Kubernetes does whenever it mounts a volume of a pod with ``fsGroup``; needs root."""
    # In a process of its own: the threads of this one may be at work as another user.
    folders, files = ("-type", "d", "-exec", "chmod", "g+rwxs"), ("-exec", "chmod", "g+rw")
    find = ["find", str(volume), *folders, "{}", "+", "-o", *files, "{}", "+"]
    for command in (["chgrp", "-R", str(gid), str(volume)], find):
        subprocess.run(command, user=0, check=True)


@contextmanager
def dead_share(folder: Path) -> Iterator[None]:
    """A mount of sshfs whose server is gone: the kernel answers ENOTCONN to all but the table."""
    folder.mkdir(mode=0o700)
    fd = os.open("/dev/fuse", os.O_RDWR) if os.access("/dev/fuse", os.W_OK) else -1
    if fd < 0:
        pytest.skip("no /dev/fuse")
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
        mount = ("mount", "-i", "-t", "fuse.sshfs", "-o", options, "host:/", str(folder))
        run_or_skip(*mount, pass_fds=(fd,))
    finally:
        os.close(fd)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Hang:
    """A file system that does not answer, until ``end``.

    Attributes:
        held_up: Somebody else had to end it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._over = False
        self.held_up = False
        self.timer = threading.Timer(300.0, self._help)

    def end(self) -> None:
        """Let all go on that wait; more than once is fine."""
        self.timer.cancel()
        if not self._over:
            self._over = True
            fcntl.ioctl(self._fd, _FITHAW, 0)

    def _help(self) -> None:
        self.held_up = True
        self.end()


class FailingDisk:
    """An ext4 file system on a loop device, at ``path``, that can be made to fail.

    Shut down by the kernel (what it does itself after an error of the device), every call that
    reads, writes or changes a folder ends in EIO.
    """

    def __init__(self, path: Path, image: Path) -> None:
        self.path = path
        self._image = image
        self._loops: list[str] = []
        path.mkdir(mode=0o700)
        self._mount()
        path.chmod(0o700)

    def fail(self) -> None:
        """Write all there is to the device; from here on EIO."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", 0))
        finally:
            os.close(fd)

    @contextmanager
    def hanging(self) -> Iterator[Hang]:
        """Inside, every call that would change something waits, in the kernel and unkillable.

        What is in memory can be read. Should the test itself hang, the disk is let go after
        five minutes, and the test fails.
        """
        fd = os.open(self.path, os.O_RDONLY)
        hang = Hang(fd)
        try:
            fcntl.ioctl(fd, _FIFREEZE, 0)
            hang.timer.start()
            yield hang
        finally:
            hang.end()
            os.close(fd)
        assert not hang.held_up, "the test's own thread had to wait for the disk"

    def mend(self) -> None:
        """Mount what the device has anew; who has files open keeps the failed one."""
        self.close()
        self._mount()

    def close(self) -> None:
        """Unmount it, though files may be open."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)
        # Freed by the kernel when the last file is closed.
        subprocess.run(["losetup", "--detach", self._loops[-1]], check=False)

    def _mount(self) -> None:
        # A device of its own each time: on the old one the kernel would find the failed one.
        self._loops.append(run_or_skip("losetup", "--find", "--show", str(self._image)))
        run_or_skip("mount", "-t", "ext4", self._loops[-1], str(self.path))


@contextmanager
def failing_disk(folder: Path) -> Iterator[FailingDisk]:
    """A disk of 16 MiB; gone afterwards."""
    image = folder / "image"
    image.touch()
    os.truncate(image, 2**24)
    run_or_skip("mkfs.ext4", "-q", "-O", "^metadata_csum", str(image))
    disk = FailingDisk(folder / "disk", image)
    try:
        yield disk
    finally:
        disk.close()
