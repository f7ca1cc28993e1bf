# SPDX-License-Identifier: Apache-2.0
"""Terraform in a copy of ``terraform/``, with the provider from a folder and no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from s3ec.testing.engine import ec_config

SOURCE = Path(__file__).parents[2] / "terraform"
PLUGINS_VARIABLE = "S3EC_TERRAFORM_PLUGINS"
HOW = (
    f"needs Terraform 1.7 or newer, and hashicorp/aws 5.86 or newer in a folder that "
    f"{PLUGINS_VARIABLE} names: `terraform -chdir=terraform/examples/single-region providers "
    f"mirror FOLDER` fills one"
)


def _plugins() -> Path | None:
    folder = os.environ.get(PLUGINS_VARIABLE, "")
    if not folder or shutil.which("terraform") is None:
        return None
    found = Path(folder)
    return found if (found / "registry.terraform.io" / "hashicorp" / "aws").is_dir() else None


# The folder of providers, where it and Terraform are here. Asked when this is imported: the tests
# run without any S3EC_ variable.
PLUGINS = _plugins()


class Terraform:
    """Runs in one folder of the copy.

    Args:
        folder: A module or an example.
        env: Variables beside those of this process.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TF_", "AWS_"))
        }
        self._env = {**kept, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1", **(env or {})}

    def run(self, *args: str, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """One command; its output is in the error where it ends otherwise than ``codes``."""
        done = subprocess.run(
            ["terraform", *args], cwd=self.folder, env=self._env, capture_output=True, text=True
        )
        if done.returncode not in codes:
            raise AssertionError(
                f"terraform {' '.join(args)} in {self.folder.name} ended with {done.returncode}:\n"
                f"{done.stdout}\n{done.stderr}"
            )
        return done

    def init(self) -> None:
        """Find modules and providers."""
        self.run("init", "-backend=false", "-input=false", f"-plugin-dir={PLUGINS}")

    def outputs(self) -> dict[str, Any]:
        """All outputs of what was applied."""
        found: dict[str, Any] = json.loads(self.run("output", "-json").stdout)
        return {name: entry["value"] for name, entry in found.items()}


def transfer_json(role: str, **extra: str) -> str:
    """The text that an example has in its output ``ec_transfer_config``.

    Where examples are applied, their text is compared with this; so other tests may take it
    without Terraform.
    """
    return json.dumps(ec_config(role, extra), sort_keys=True, separators=(",", ":"))


def copy(to: Path) -> Path:
    """The tree without what Terraform left in it; providers' folders stay out of the checkout."""
    ignored = shutil.ignore_patterns(".terraform", ".terraform.lock.hcl", "*.tfstate*")
    shutil.copytree(SOURCE, to, ignore=ignored)
    return to
