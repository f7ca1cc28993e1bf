# SPDX-License-Identifier: Apache-2.0
"""Ask vLLM about itself in a child process: it may hang, crash, exit or print what it likes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from s3ec.settings import Settings

# Importing vLLM takes 5 to 20 s, and describing a model may fetch its configuration.
DEADLINE_S = 180.0
# -P, because with the current folder on its path a child started in a checkout of vLLM would
# import that one. Where s3ec itself runs from a checkout, the child is told so.
_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); import s3ec.doctor.vllm_probe as p; p.main()"
)
_PACKAGES = Path(__file__).parents[2]
_EXCEPTION = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit)\b|.*\berror:)", re.MULTILINE)
_NOISE = re.compile(r"\s*(?:\[type=\w+, input_value=.*|For further information visit \S+.*)")
# Options whose values are secrets; vLLM's messages can repeat what it was given.
_SECRET_OPTIONS = ("--api-key", "--hf-token")


class VllmChild:
    """One run of ``s3ec.doctor.vllm_probe``; it works while the network checks run."""

    def __init__(self, settings: Settings, vllm_args: Sequence[str] | None) -> None:
        self._secrets = _secret_values(vllm_args or ())
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - close() does
        self._given_up = False
        self._stages: dict[str, Any] | None = None
        request = {"settings": settings.model_dump(mode="json"), "args": vllm_args}
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(_PACKAGES), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=self._messages,
                stderr=self._messages,
                pass_fds=(write_end,),
                start_new_session=True,  # Ctrl-C is for this process, which then ends the child
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._replies = os.fdopen(read_end, "rb")
        self._send(json.dumps(request).encode())

    def _send(self, request: bytes) -> None:
        stdin = self._process.stdin
        if stdin is None:
            return
        try:
            stdin.write(request)
            stdin.close()
        except BrokenPipeError:
            pass  # it died at once; its messages say why

    def stage(self, name: str) -> Mapping[str, Any] | None:
        """What the child found out in one of its stages, None where it did not get there.

        Waits for the child to end, at most DEADLINE_S.
        """
        if self._stages is None:
            try:
                self._process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._given_up = True
                self._process.kill()
                self._process.wait()
            # A reply is a few kilobytes and fits the pipe, so the child never waited for us.
            self._stages = {}
            for line in self._replies.read().splitlines():
                self._stages.update(json.loads(line))
        found: Mapping[str, Any] | None = self._stages.get(name)
        return found

    def last_words(self) -> str:
        """Why the child ended early, in one line without secrets."""
        status = self._process.returncode
        if self._given_up:
            return f"no answer within {DEADLINE_S:.0f} s"
        self._messages.seek(0)
        text = self._messages.read().decode(errors="replace").strip()
        if status is not None and status < 0:  # such as SIGILL: built for another CPU
            return f"killed by {signal.Signals(-status).name}"
        if not text:
            return f"exit status {status} and no message"
        starts = [found.start() for found in _EXCEPTION.finditer(text)]
        message = text[starts[-1] :] if starts else text.splitlines()[-1]
        message = " ".join(_NOISE.sub("", message).split())[:400]
        for secret in self._secrets:
            message = message.replace(secret, "***")
        return message

    def close(self) -> None:
        """End the child if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._messages.close()


def _secret_values(args: Sequence[str]) -> list[str]:
    values = []
    for position, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") not in _SECRET_OPTIONS:
            continue
        if equals:
            values.append(value)
        else:  # --api-key takes several
            for later in args[position + 1 :]:
                if later.startswith("--"):
                    break
                values.append(later)
    return [value for value in values if value]
