# SPDX-License-Identifier: Apache-2.0
"""What the tests of the scheduler half share."""

from __future__ import annotations

import pytest

from tests.unit.connector.scheduling import World


@pytest.fixture
def world() -> World:
    return World()
