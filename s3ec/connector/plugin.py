# SPDX-License-Identifier: Apache-2.0
"""Registers the connector's name with vLLM; the ``vllm.general_plugins`` entry point."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

NAME = "S3ECConnector"


def register() -> None:
    """Make ``"ec_connector": "S3ECConnector"`` work without a module path.

    vLLM calls this in every process and sometimes twice; its factory refuses a name it
    already knows, so ask first.
    """
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    except ImportError as exc:
        # vLLM ends a process whose plugin raises; one without encoder-cache connectors still
        # serves everything else.
        log.warning("this vLLM has no encoder-cache connectors: %s", exc)
        return
    if NAME not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(NAME, "s3ec.connector", NAME)
