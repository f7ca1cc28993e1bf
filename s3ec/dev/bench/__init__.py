# SPDX-License-Identifier: Apache-2.0
"""Measurements: each compares with something in the same run, and says what it must reach.

A benchmark is a module of this package with a ``BENCH`` (see ``context.Bench``) and a line in
``command.ENTRIES``. The module is imported to show its rows, so whatever is heavy (torch, vllm,
a server) is imported inside ``run``.
"""
