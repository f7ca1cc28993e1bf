# SPDX-License-Identifier: Apache-2.0
"""The dashboard of examples/observability: what it shows, the file for Grafana, and a picture."""
