# SPDX-License-Identifier: Apache-2.0
"""Checks of bucket, node and model before a fleet starts. They return outcomes; the CLI prints."""
