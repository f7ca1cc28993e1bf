# SPDX-License-Identifier: Apache-2.0
"""This node's disk: entries kept as files that all processes of the node share."""
