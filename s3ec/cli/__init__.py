# SPDX-License-Identifier: Apache-2.0
"""The command line; nothing is imported before a command needs it."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script ``s3ec``."""
    from s3ec.cli.app import app

    app()
