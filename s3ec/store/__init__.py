# SPDX-License-Identifier: Apache-2.0
"""Object storage behind one small protocol."""
