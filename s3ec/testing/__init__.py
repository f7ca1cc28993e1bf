# SPDX-License-Identifier: Apache-2.0
"""What s3ec ships for tests and try-outs: stores, a local S3 server, tiny models, pictures.

Importing this package imports none of them: one of its modules is loaded at the start of
every Python process of an engine (see ``vllm_cpu``), so it must cost nothing.
"""

from __future__ import annotations
