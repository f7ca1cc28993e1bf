# SPDX-License-Identifier: Apache-2.0
"""``python -m s3ec``: the command line where the console script is not on PATH."""

from __future__ import annotations

from s3ec.cli import main

if __name__ == "__main__":
    main()
