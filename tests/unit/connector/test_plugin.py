# SPDX-License-Identifier: Apache-2.0
"""The entry point that every vLLM process calls."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from s3ec.config import load_settings
from s3ec.connector.plugin import NAME, register
from tests.terraform.cases import transfer_json

FACTORY = "vllm.distributed.ec_transfer.ec_connector.factory"
REPOSITORY = Path(__file__).parents[3]
KUBERNETES = REPOSITORY / "examples/kubernetes/site/values/ec-transfer-config.json"
# Where the other two examples made a bucket.
HERE = {"bucket": "corpus", "prefix": "team-a", "region": "eu-central-1"}


def test_registering_twice_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, tuple[str, str]] = {}

    class Factory:
        """As vLLM 0.32's: it refuses a name that it knows."""

        _registry = known

        @classmethod
        def register_connector(cls, name: str, module: str, class_name: str) -> None:
            if name in known:
                raise ValueError(f"Connector '{name}' is already registered.")
            known[name] = (module, class_name)

    module: Any = SimpleNamespace(ECConnectorFactory=Factory)
    monkeypatch.setitem(sys.modules, FACTORY, module)
    register()
    register()
    assert known == {NAME: ("s3ec.connector", "S3ECConnector")}


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_a_vllm_without_encoder_connectors_is_told_in_one_line_and_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any
) -> None:
    """vLLM ends a process whose plugin raises."""
    monkeypatch.setitem(sys.modules, FACTORY, module)
    register()
    assert len(caplog.records) == 1
    assert "no encoder-cache connectors" in caplog.text


def test_the_entry_point_names_this_function() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert 's3ec = "s3ec.connector.plugin:register"' in text
    entry = EntryPoint("s3ec", "s3ec.connector.plugin:register", "vllm.general_plugins")
    assert entry.load() is register


def test_a_real_vllm_knows_the_name() -> None:
    factory = pytest.importorskip(FACTORY).ECConnectorFactory
    base = pytest.importorskip("vllm.distributed.ec_transfer.ec_connector.base").ECConnectorBase
    register()
    register()
    from s3ec.connector import S3ECConnector

    asked = SimpleNamespace(ec_connector=NAME, ec_connector_module_path=None)
    assert factory.get_connector_class(asked) is S3ECConnector
    assert issubclass(S3ECConnector, base)


# vLLM and torch import more of themselves as they are used, and warn; that is theirs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "bucket", "prefix"),
    [
        (KUBERNETES.read_text(), "embeddings", "corpus"),
        (transfer_json("ec_both", **HERE, endpoint_url="https://minio:9000"), "corpus", "team-a"),
        (transfer_json("ec_producer", **HERE), "corpus", "team-a"),
    ],
    ids=["kubernetes", "terraform, S3-compatible", "terraform, AWS"],
)
def test_what_examples_give_for_the_flag_is_taken_by_a_real_vllm_and_by_the_connector(
    tmp_path: Path, text: str, bucket: str, prefix: str
) -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    parser = pytest.importorskip("vllm.utils.argparse_utils").FlexibleArgumentParser()
    arguments.EngineArgs.add_cli_args(parser)
    config = parser.parse_args(["--ec-transfer-config", text]).ec_transfer_config
    assert config.ec_connector == NAME
    assert config.is_ec_producer
    extra = config.ec_connector_extra_config
    if "ca_bundle" in extra:
        extra["ca_bundle"] = str(tmp_path / "ca.pem")
        (tmp_path / "ca.pem").touch()
    settings = load_settings(extra).settings
    assert (settings.bucket, settings.prefix) == (bucket, prefix)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_arguments_of_the_examples_are_those_of_a_real_vllm() -> None:
    arguments = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    parser = pytest.importorskip("vllm.utils.argparse_utils").FlexibleArgumentParser()
    parser = arguments.make_arg_parser(parser)
    examples = REPOSITORY / "examples"
    compose = yaml.safe_load((examples / "compose/compose.yaml").read_text())
    deployment = yaml.safe_load((examples / "kubernetes/base/deployment.yaml").read_text())
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    values = yaml.safe_load((examples / "kubernetes/production-stack/values.yaml").read_text())
    [model] = values["servingEngineSpec"]["modelSpec"]
    given = {"MODEL": "model", "GPUS": "1", "EC_TRANSFER_CONFIG": KUBERNETES.read_text()}
    for words in (
        compose["services"]["vllm"]["command"],
        container["args"],
        ["model", *model["vllmConfig"]["extraArgs"]],
    ):
        # As Compose and Kubernetes put variables in.
        line = [re.sub(r"\$[({](\w+).*[)}]", lambda found: given[found[1]], word) for word in words]
        parsed = parser.parse_args(line)
        assert parsed.ec_transfer_config.ec_connector == NAME
        assert parsed.shutdown_timeout > 0
