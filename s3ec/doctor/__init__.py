# SPDX-License-Identifier: Apache-2.0
"""Finds what is wrong with bucket, node and model before a fleet starts; prints nothing."""
