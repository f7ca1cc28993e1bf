# SPDX-License-Identifier: Apache-2.0
"""What a file in the spool is called: whose entry it is, and which bucket waits for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from s3ec.identity import OBJECT_SUFFIX, is_namespace_name

_NAME = re.compile(r"(.+)--([0-9a-f]{16})--([0-9a-f]{32})" + re.escape(OBJECT_SUFFIX))


@dataclass(frozen=True, slots=True)
class SpoolName:
    """The parts of ``NAMESPACE--DESTINATION--DIGEST.safetensors``.

    Attributes:
        namespace: ``Namespace.name``.
        destination: 16 hex digits that stand for a bucket and a folder in it. Namespaces do
            not tell those apart, and what was saved for one bucket must not end in another.
        digest: ``Key.digest``.
    """

    namespace: str
    destination: str
    digest: bytes

    def __str__(self) -> str:
        return f"{self.namespace}--{self.destination}--{self.digest.hex()}{OBJECT_SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> SpoolName | None:
        """The parts of a file name, None where it is no such name."""
        match = _NAME.fullmatch(name)
        if match is None or not is_namespace_name(match[1]):
            return None
        return cls(match[1], match[2], bytes.fromhex(match[3]))
