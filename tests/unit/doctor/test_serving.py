# SPDX-License-Identifier: Apache-2.0
"""vLLM asked in a child process, with packages that play vLLM; the real one has its own test."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from s3ec.doctor import serving
from s3ec.doctor.check import CheckContext, Verdict
from s3ec.doctor.serving import VllmChild, without_command
from tests.unit.doctor.conftest import MakePatient, says

HOOKS = (
    "has_cache_item",
    "ensure_cache_available",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
)
LATER = ("build_connector_worker_meta",)
Install = Callable[..., None]
Examine = Callable[..., CheckContext]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Puts a package that plays vLLM on the path of the child, and an empty torch beside it."""
    root = tmp_path / "packages"

    def write(module: str, text: str, package: str = "vllm") -> None:
        file = root / package / module
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def install(init: str, hooks: Sequence[str] | None = None) -> None:
        write("__init__.py", init)
        write("__init__.py", "", "torch")
        if hooks is not None:
            methods = "".join(f"    def {name}(self): ...\n" for name in hooks) or "    pass\n"
            for package in ("distributed", "distributed/ec_transfer"):
                write(f"{package}/__init__.py", "")
            connectors = "distributed/ec_transfer/ec_connector"
            write(f"{connectors}/__init__.py", "")
            write(f"{connectors}/base.py", f"class ECConnectorBase:\n{methods}")
        monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return install


@pytest.fixture
def examine(make_patient: MakePatient) -> Examine:
    """Asks the child of a patient."""

    def start(vllm_args: list[str] | None = None, **options: float) -> CheckContext:
        patient = make_patient()
        patient.vllm_args = vllm_args
        patient.child = VllmChild(patient.settings, vllm_args, **options)
        return patient

    return start


@pytest.mark.parametrize(
    ("version", "verdict", "part"),
    [
        ("0.26.0", Verdict.OK, "0.26 to"),
        ("0.32.1rc2+cpu", Verdict.OK, "version 0.32.1rc2+cpu"),
        ("0.25.1", Verdict.FAIL, "too old"),
        ("7.1.0", Verdict.WARN, "newer"),
        ("dev", Verdict.WARN, "a build of its own"),
    ],
)
def test_version_is_compared_with_the_supported_range(
    install: Install, examine: Examine, version: str, verdict: Verdict, part: str
) -> None:
    install(f"__version__ = {version!r}", (*HOOKS, *LATER))
    says(serving.vllm(examine()), verdict, found=part)


@pytest.mark.parametrize(
    ("hooks", "verdict", "part"),
    [
        ((*HOOKS, *LATER), Verdict.OK, "no take_unavailable_requests"),
        (HOOKS[1:], Verdict.FAIL, "no has_cache_item: required"),
        (HOOKS[:-1], Verdict.FAIL, "no request_finished: required"),
    ],
)
def test_missing_hooks_are_named_with_what_they_cost(
    install: Install, examine: Examine, hooks: Sequence[str], verdict: Verdict, part: str
) -> None:
    install("__version__ = '0.26.0'", hooks)
    says(serving.vllm(examine()), verdict, found=part)


@pytest.mark.parametrize(
    ("init", "part"),
    [
        ("raise RuntimeError('no CUDA driver')", "RuntimeError: no CUDA driver"),
        ("import s3ec_no_such_package", "s3ec_no_such_package"),
        ("import os; os._exit(3)", "exit status 3 and no message"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "killed by SIGILL"),
        ("import sys; sys.exit('error: go away')", "go away"),
        ("print('noise'); import sys; print('more', file=sys.stderr); 1/0", "ZeroDivisionError"),
    ],
)
def test_vllm_that_does_not_import_fails_with_its_last_words(
    install: Install, examine: Examine, init: str, part: str
) -> None:
    install(init)
    patient = examine()
    outcome = serving.vllm(patient)
    assert outcome.verdict == Verdict.FAIL
    assert part in outcome.found
    assert "\n" not in outcome.found


def test_what_is_to_work_again_does_not_while_vllm_does_not_import(
    install: Install, examine: Examine
) -> None:
    install("raise RuntimeError('no CUDA driver')")
    _, _, rest = serving.vllm(examine()).mend.partition("`python -c '")
    code, _, _ = rest.partition("'`")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert b"no CUDA driver" in ended.stderr


def test_vllm_without_encoder_cache_connectors_is_too_old(
    install: Install, examine: Examine
) -> None:
    install("__version__ = '0.9.0'\ndef __getattr__(name): raise AttributeError(name)")
    (Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0]) / "vllm" / "distributed").mkdir()
    says(serving.vllm(examine()), Verdict.FAIL, found="no encoder-cache connectors")


def test_vllm_that_hangs_is_given_up_and_not_called_broken(
    install: Install, examine: Examine
) -> None:
    install("import threading; threading.Event().wait()")
    """On a busy machine its import takes minutes, which is no fault of the installation."""
    patient = examine(["--model", "m"], deadline_s=0.5)
    for check in (serving.vllm, serving.model, serving.namespace):
        says(check(patient), Verdict.SKIP, found="not checked: no answer within 0.5 s")
        assert check(patient).mend == ""


def test_vllm_in_the_current_folder_is_not_the_installed_one(
    install: Install, examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("__version__ = '0.26.0'", HOOKS)
    checkout = tmp_path / "checkout" / "vllm"
    checkout.mkdir(parents=True)
    (checkout / "__init__.py").write_text("raise RuntimeError('a checkout')")
    monkeypatch.chdir(checkout.parent)
    assert serving.vllm(examine()).verdict == Verdict.OK


def test_model_that_was_not_named_is_skipped_with_how_to_ask(make_patient: MakePatient) -> None:
    says(serving.model(make_patient()), Verdict.SKIP, found="-- --model")


def test_a_model_cannot_be_described_without_vllm(make_patient: MakePatient) -> None:
    patient = make_patient()
    patient.vllm_args = ["--model", "acme/vision"]
    says(serving.model(patient), Verdict.FAIL, mend="where vLLM runs")
    assert serving.namespace(patient).verdict == Verdict.SKIP


def test_refused_arguments_fail_without_their_secrets(install: Install, examine: Examine) -> None:
    install(
        "import sys\n__version__ = '0.26.0'\n"
        "class Refusing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'vllm.engine.arg_utils':\n"
        "            raise ValueError('bad key hush-hush and hush-too and token-hush')\n"
        "sys.meta_path.insert(0, Refusing())\n",
        HOOKS,
    )
    engine = Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0]) / "vllm" / "engine"
    engine.mkdir()
    (engine / "__init__.py").write_text("")
    keys = ["--api-key", "hush-hush", "hush-too", "--hf_token=token-hush"]
    says(
        serving.model(examine(["--model", "m", *keys])),
        Verdict.FAIL,
        found="ValueError: bad key *** and *** and ***",
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model", "m", "--dtype", "half"], ["--model", "m", "--dtype", "half"]),
        (["vllm", "serve", "m", "--port", "1"], ["--model", "m", "--port", "1"]),
        (["/usr/bin/vllm", "serve", "--model", "m"], ["--model", "m"]),
        (["serve", "m"], ["--model", "m"]),
        (["m"], ["--model", "m"]),
        ([], []),
    ],
)
def test_pasted_command_lines_are_understood(args: list[str], expected: list[str]) -> None:
    assert without_command(args) == expected


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Installs the plugin's entry point, or takes it away."""

    def set_installed(installed: bool) -> None:
        points = [EntryPoint("s3ec", "s3ec.connector.plugin:register", "vllm.general_plugins")]
        found = EntryPoints(points if installed else [])
        monkeypatch.setattr(
            serving.importlib.metadata, "entry_points", lambda **query: found.select(**query)
        )

    return set_installed


@pytest.mark.parametrize(
    ("installed", "plugins", "transfer", "verdict", "part"),
    [
        (True, None, {}, Verdict.OK, "by its name"),
        (True, "other,s3ec", {}, Verdict.OK, "by its name"),
        (True, "other", {}, Verdict.WARN, "VLLM_PLUGINS"),
        (False, None, {}, Verdict.WARN, "no entry point"),
        (False, None, {"ec_connector_module_path": "s3ec.connector"}, Verdict.OK, "module_path"),
        (True, None, {"ec_connector": "S3EConnector"}, Verdict.FAIL, "S3EConnector"),
        (True, None, {"ec_role": "consumer"}, Verdict.FAIL, "`consumer`"),
    ],
)
def test_connector_is_found_by_name_or_path(
    make_patient: MakePatient,
    monkeypatch: pytest.MonkeyPatch,
    entry_point: Callable[[bool], None],
    installed: bool,
    plugins: str | None,
    transfer: dict[str, str],
    verdict: Verdict,
    part: str,
) -> None:
    entry_point(installed)
    if plugins is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    says(serving.connector(make_patient(transfer)), verdict, found=part)


def test_an_interrupt_ends_the_child(
    install: Install, make_patient: MakePatient, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    install(f"import threading; file = open({str(pipe)!r}, 'w'); threading.Event().wait()")
    before = sys.modules.get("vllm")
    left: list[str] = []

    def interrupt() -> None:
        with pipe.open() as end:  # once the child has it open too
            _thread.interrupt_main()
            left.append(end.read())  # until nobody has it open any more

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        VllmChild(make_patient().settings, None)
    waiting.join()
    assert left == [""]
    assert sys.modules.get("vllm") is before  # asked in the child, never imported here
