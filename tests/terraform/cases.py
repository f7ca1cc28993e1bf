# SPDX-License-Identifier: Apache-2.0
"""Terraform in a copy of ``terraform/``, with the provider from a folder and no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from s3ec.dev.rigs.engine import ec_config

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


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of a command: of this process those that do not steer Terraform, and ``more``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    # Most of what a command computes is the provider's schema, 1500 resources, decoded anew; with
    # Go's own pace of collecting garbage that takes twice as long.
    quick = {"GOGC": "400", "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    return {**kept, **quick, **(more or {})}


class Provider:
    """The provider as one process for many commands; by itself each command starts it anew.

    This is how the provider's own acceptance tests run it. All commands share what the last of them
    configured, so it serves no folder that has several ``provider "aws"`` unless they are mocked.

    Args:
        of: A folder in which ``terraform init`` found the provider.
        env: Variables beside those of this process: credentials and addresses are the provider's.
    """

    def __init__(self, of: Path, env: Mapping[str, str] | None = None) -> None:
        found = of.glob(
            ".terraform/providers/registry.terraform.io/hashicorp/aws/*/*/terraform-provider-aws*"
        )
        # A shell around it ends it when this process is gone, however that came.
        script = '"$@" & exec >&-; read -r _; kill -INT $!; wait'
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", str(next(found)), "-debug"],
            env=environment(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.env: dict[str, str] = {}

    def __enter__(self) -> Provider:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            name, assigned, value = line.strip().partition("=")
            if assigned and name == "TF_REATTACH_PROVIDERS":
                self.env = {name: value.strip("'")}
                return self
        self.close()
        raise AssertionError("the provider ended before it said where it listens")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._shell.communicate()


class Terraform:
    """Runs in one folder of the copy.

    Args:
        folder: A module or an example.
        env: Variables beside those of this process.
        provider: A running one; without it each command starts its own.
    """

    def __init__(
        self, folder: Path, env: Mapping[str, str] | None = None, provider: Provider | None = None
    ) -> None:
        self.folder = folder
        self._env = environment({**(env or {}), **(provider.env if provider else {})})

    def run(self, *args: str, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """One command; its output is in the error where it ends otherwise than ``codes``."""
        done = subprocess.run(
            ["terraform", *args],
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in codes:
            raise AssertionError(
                f"terraform {' '.join(args)} in {self.folder.name} ended with {done.returncode}:\n"
                f"{done.stdout}\n{done.stderr}"
            )
        return done

    def init(self) -> None:
        """Find modules, and where none is running a provider of the versions asked for."""
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
