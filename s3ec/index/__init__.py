# SPDX-License-Identifier: Apache-2.0
"""What the corpus holds, answered from memory."""
