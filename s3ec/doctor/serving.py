# SPDX-License-Identifier: Apache-2.0
"""Checks of the vLLM that is installed here, and of the model it is to serve.

vLLM is examined in a child process, since it may hang, crash, exit or print anything.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from s3ec.doctor.check import CheckContext, Outcome, fail, ok, skip, warn
from s3ec.errors import S3ECError
from s3ec.identity import Namespace
from s3ec.namespaces import (
    Neighbour,
    list_namespaces,
    neighbours,
    read_namespaces,
    slug_of,
)
from s3ec.settings import Settings
from s3ec.store.base import Store

_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN = "s3ec"
_CONNECTOR = "S3ECConnector"
_ROLES = ("ec_producer", "ec_consumer", "ec_both")
_MANAGER_OPTION = "--ec-manager-config"
_SHOWN_DIFFERENCES = 5
_SHOWN_NAMESPACES = 5
# The most namespaces that are compared, the first ones; a bucket has a few.
_READ_NAMESPACES = 64
# A listing, and descriptors that are fetched several at a time.
_CORPUS_REQUESTS = 4


def has_vllm() -> bool:
    """True if vLLM is installed; does not import it."""
    return importlib.util.find_spec("vllm") is not None


def vllm(context: CheckContext) -> Outcome:
    """Check whether vLLM imports here, and whether its version is known."""
    if not context.with_vllm:
        return skip("left out by --no-vllm")
    if context.child is None and not has_vllm():
        return warn(
            "not installed in this environment",
            "run the doctor again where vLLM runs; looking into a corpus does without",
        )
    if context.child is None:
        context.child = VllmChild(context.settings, context.vllm_args)
    answer = _answer(context, "vllm")
    if answer is not None:
        return _by_release(f"version {answer['version']}", answer)
    if "ec_transfer" in context.child.last_words():
        return fail("it has no encoder-cache connectors", "install vLLM 0.26 or later")
    mend = "mend the installation until `python -c 'import s3ec.connector.compat'` works"
    return _ended_early(context.child, "installed, but does not import", mend)


def _answer(context: CheckContext, stage: str) -> Mapping[str, Any] | None:
    """The child's reply in a stage; None if it did not get there, or was not started."""
    return context.child.stage(stage) if context.child else None


def _ended_early(child: VllmChild | None, found: str, mend: str) -> Outcome:
    """The outcome of a stage that the child did not reach."""
    if child is None:
        return skip("vLLM could not be asked")
    if child.is_given_up:
        return skip(f"not checked: {child.last_words()}")
    return fail(f"{found}: {child.last_words()}", mend)


def _by_release(found: str, hooks: Mapping[str, Any]) -> Outcome:
    """The outcome for a release, and for the connector hooks that it has."""
    oldest, newest = (".".join(map(str, hooks[name])) for name in ("oldest", "newest"))
    supported, release = f"{oldest} to {newest}", hooks["release"]
    if release is not None and release < hooks["oldest"]:
        return fail(f"{found} is too old", f"install vLLM {supported}")
    missing = [name for name, there in hooks["present"].items() if not there]
    costs = "".join(f"; no {name}: {hooks['costs'].get(name, 'required')}" for name in missing)
    if any(name not in hooks["costs"] for name in missing):
        return fail(f"{found}{costs}", f"install vLLM {supported}")
    if release is None or release > hooks["newest"]:
        kind = "a build of its own" if release is None else "newer than s3ec knows"
        return warn(f"{found}, {kind}{costs}", f"s3ec is tested with {supported}")
    return ok(f"{found}, of {supported}{costs}")


def connector(context: CheckContext) -> Outcome:
    """Check whether vLLM will find S3ECConnector, by its name or by a module path."""
    named = context.transfer.get("ec_connector", _CONNECTOR)
    if named != _CONNECTOR:
        return fail(f"ec_connector is `{named}`", f"set it to `{_CONNECTOR}`")
    role = context.transfer.get("ec_role", _ROLES[-1])
    if role not in _ROLES:
        return fail(f"ec_role is `{role}`", f"set it to one of {', '.join(_ROLES)}")
    if context.transfer.get("ec_connector_module_path"):
        return ok("found by ec_connector_module_path")
    by_path = 'add "ec_connector_module_path": "s3ec.connector" to --ec-transfer-config'
    if not importlib.metadata.entry_points(group=_PLUGIN_GROUP, name=_PLUGIN):
        return warn(
            f"no entry point `{_PLUGIN}` in {_PLUGIN_GROUP}",
            f"install s3ec into vLLM's environment, or {by_path}",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        return warn(
            "VLLM_PLUGINS does not name s3ec, so vLLM will not load it",
            f"add `{_PLUGIN}` to VLLM_PLUGINS, or {by_path}",
        )
    return ok(f"vLLM finds {_CONNECTOR} by its name ({_PLUGIN_GROUP})")


def model(context: CheckContext) -> Outcome:
    """Check whether the model has an encoder cache, and names images by their content hashes."""
    if not context.with_vllm:
        return skip("left out by --no-vllm")
    if context.vllm_args is None:
        return skip("no model was named; s3ec doctor ... -- --model MODEL --dtype bfloat16 does")
    answer = _answer(context, "model")
    if context.child is None:
        return fail("vLLM, which it needs, is not installed", "run the doctor where vLLM runs")
    if answer is None:
        return _ended_early(context.child, "vLLM does not accept these arguments", "correct them")
    found = str(answer["model"])
    if answer["ignored"]:
        found += f" (left to the server: {', '.join(answer['ignored'])})"
    if _MANAGER_OPTION in answer["ignored"]:
        told = f"{found}: this vLLM does not know {_MANAGER_OPTION}"
        return fail(told, "use vLLM 0.32 or newer, or leave it out")
    if answer["problem"]:
        return fail(f"{found}: {answer['problem']}", "serve it without s3ec")
    if answer["identifiers"]:  # images would be known by a number, not by their content
        problem, _, mend = str(answer["identifiers"]).rpartition("; ")
        return fail(f"{found}: {problem}", mend)
    return ok(found)


def namespace(context: CheckContext) -> Outcome:
    """Find where in the bucket this model reads and writes."""
    answer = _answer(context, "namespace")
    if answer is None:
        mend = "set `model_identity`, or report it"
        return _ended_early(context.child, "the model cannot be described", mend)
    if answer["weights_problem"]:
        return warn(
            f"nothing would be loaded or saved: {answer['weights_problem']}",
            "run the doctor where the engine runs, once the model is there; or set `weights` = "
            "name everywhere to trust the model's name",
        )
    context.namespace = Namespace(answer["name"], answer["descriptor"])
    facts = answer["descriptor"]
    more = "".join(f", {name} {facts[name]}" for name in ("revision", "weights") if facts.get(name))
    return ok(f"{answer['name']} for {facts.get('model')}, {facts.get('dtype')}{more}")


def corpus(context: CheckContext) -> Outcome:
    """Check what the bucket holds already, and why this model may not read it."""
    try:
        return context.ask_store(lambda store: _corpus(store, context), requests=_CORPUS_REQUESTS)
    except S3ECError as exc:
        return fail(str(exc), "see `bucket` and `read`")


async def _corpus(store: Store, context: CheckContext) -> Outcome:
    names = await list_namespaces(store)
    ours = context.namespace
    shown = ", ".join(names[:_SHOWN_NAMESPACES])
    more = f" and {len(names) - _SHOWN_NAMESPACES} more" if len(names) > _SHOWN_NAMESPACES else ""
    found = f"{len(names)} in the bucket: {shown}{more}" if names else "none in the bucket yet"
    if ours is None:
        return ok(found)
    stored = await read_namespaces(store, names[:_READ_NAMESPACES])
    near = neighbours(ours.descriptor, [one for one in stored if one.name != ours.name])
    alone = [f"{one.name} differs from it in {one.differences[0]}" for one in near if one.only]
    if ours.name in names:
        told = [f"this model's is there, 1 of {len(names)}", *alone[:_SHOWN_DIFFERENCES]]
        return ok("; ".join(told))
    alike = [one for one in near if one.only or slug_of(one.name) == slug_of(ours.name)]
    if alike:
        return _unshared(alike[0])
    if context.only_reads:
        return warn(
            f"this model's is not there; {found}",
            "let a producer fill it first, or correct `bucket`, `prefix` and the model",
        )
    return ok(f"{found}; this model's comes with the first save")


def _unshared(nearest: Neighbour) -> Outcome:
    """The outcome if this model's namespace is absent, but a similar one exists."""
    told = "; ".join(nearest.differences[:_SHOWN_DIFFERENCES])
    rest = len(nearest.differences) - _SHOWN_DIFFERENCES
    which = "in one field alone, " if nearest.only else "in "
    return warn(
        f"this model's is not there, but {nearest.name} is, which differs {which}{told}"
        + (f"; {rest} more" if rest > 0 else ""),
        "serve with the same settings as the producer (or set `model_identity` where only "
        "the path differs) to share its embeddings",
    )


# Importing vLLM takes 5 to 20 s, ten times that on a busy machine; describing a model may fetch its
# configuration.
DEADLINE_S = 600.0
# -P, because with the current folder on its path a child started in a checkout of vLLM would
# import that one. The child also gets the path of this s3ec, which may be a checkout.
_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); from s3ec.doctor import serving; "
    "serving.answer_parent()"
)
_PACKAGES = Path(__file__).parents[2]
_EXCEPTION = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit)\b|.*\berror:)", re.MULTILINE)
_NOISE = re.compile(r"\s*(?:\[type=\w+, input_value=.*|For further information visit \S+.*)")
# Options whose values are secrets; vLLM's messages can repeat what it was given.
_SECRET_OPTIONS = ("--api-key", "--hf-token")


class VllmChild:
    """The results of a child process that imports vLLM, stage by stage.

    Attributes:
        is_given_up: True if it ran out of time, so that the remaining stages are unknown.
    """

    def __init__(
        self,
        settings: Settings,
        vllm_args: Sequence[str] | None,
        *,
        pages: Sequence[str] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Run the child to its end. An interrupt ends it.

        Args:
            settings: The settings under examination.
            vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
            pages: Pictures for the model's processor; empty for a blank page, None to leave it out.
            deadline_s: How long the child may take.
        """
        self.is_given_up = False
        self._status = 0
        self._deadline_s = deadline_s
        self._secrets = _secret_values(vllm_args or ())
        request = {
            "settings": settings.model_dump(mode="json"),
            "args": vllm_args,
            "pages": None if pages is None else list(pages),
        }
        with contextlib.ExitStack() as stack:
            # Files without a name, which no other user can read: arguments may hold keys.
            asked, messages, replies = (
                stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)
            )
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, str(_PACKAGES), str(replies.fileno())],
                stdin=asked,
                stdout=messages,
                stderr=messages,
                pass_fds=(replies.fileno(),),
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the child
            )
            try:
                self._status = process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                self.is_given_up = True
            finally:
                process.kill()
                process.wait()
            messages.seek(0)
            self._messages = messages.read().decode(errors="replace").strip()
            replies.seek(0)
            self._stages: dict[str, Any] = {}
            for line in replies.read().splitlines():
                self._stages.update(json.loads(line))

    def stage(self, name: str) -> Mapping[str, Any] | None:
        """The child's reply in one of its stages; None if it did not get there."""
        found: Mapping[str, Any] | None = self._stages.get(name)
        return found

    def last_words(self) -> str:
        """Why the child ended early, in one line without secrets."""
        if self.is_given_up:
            return f"no answer within {self._deadline_s:g} s"
        text = self._messages
        if self._status < 0:  # such as SIGILL: built for another CPU
            return f"killed by {signal.Signals(-self._status).name}"
        if not text:
            return f"exit status {self._status} and no message"
        starts = [found.start() for found in _EXCEPTION.finditer(text)]
        message = text[starts[-1] :] if starts else text.splitlines()[-1]
        message = " ".join(_NOISE.sub("", message).split())[:400]
        for secret in self._secrets:
            message = message.replace(secret, "***")
        return message


def _secret_values(args: Sequence[str]) -> list[str]:
    values = []
    for position, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") not in _SECRET_OPTIONS:
            continue
        if equals:
            values.append(value)
        else:  # --api-key takes several
            for later in args[position + 1 :]:
                if later.startswith("--"):
                    break
                values.append(later)
    return [value for value in values if value]


def answer_parent() -> None:
    """Run the child: import vLLM, and describe a model as vLLM would.

    Reads one JSON request from stdin, and writes one JSON line per stage to the file descriptor
    that its argument names. An exception ends it. Replies of earlier stages remain, and the parent
    reads the last line of the traceback.
    """
    request = json.load(sys.stdin)
    settings = Settings.model_validate(request["settings"])
    with os.fdopen(int(sys.argv[1]), "w") as replies:

        def reply(stage: str, **facts: Any) -> None:
            replies.write(json.dumps({stage: facts}) + "\n")
            replies.flush()

        import vllm

        from s3ec.connector import compat

        reply(
            "vllm",
            version=str(vllm.__version__),
            present=compat.installed_hooks(),
            costs=compat.OPTIONAL_HOOKS,
            release=compat.release(compat.vllm_version()),
            oldest=compat.OLDEST,
            newest=compat.NEWEST_TESTED,
        )
        if request["args"] is not None:
            _describe(request["args"], settings, request["pages"], reply)


def _describe(
    args: Sequence[str], settings: Settings, pages: Sequence[str] | None, reply: Any
) -> None:
    from s3ec.connector.vllm_config import (
        encoder_weights,
        identifier_problem,
        model_problem,
        namespace_of,
    )

    vllm_config, ignored = _vllm_config(args)
    problem = model_problem(vllm_config)
    reply(
        "model",
        model=vllm_config.model_config.model,
        problem=problem,
        identifiers=None if problem else identifier_problem(vllm_config),
        ignored=ignored,
    )
    if problem is None:
        weights = encoder_weights(vllm_config, settings)
        namespace = None if weights.problem else namespace_of(vllm_config, settings, weights)
        reply(
            "namespace",
            name=namespace and namespace.name,
            descriptor=namespace and dict(namespace.descriptor),
            weights_problem=weights.problem,
        )
    if problem is None and pages is not None:
        from s3ec.doctor.pages import describe_pages

        reply("pages", **describe_pages(vllm_config, pages))


def _vllm_config(args: Sequence[str]) -> tuple[Any, list[str]]:
    """vLLM's configuration for a command line, and the options that it leaves to the server."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class EngineParser(FlexibleArgumentParser):  # type: ignore[misc]
        """Leaves out options of the HTTP server (--port, --api-key...)."""

        rest: list[str]

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, Any]:
            found, self.rest = super().parse_known_args(args, namespace)
            return found, []

    parser = AsyncEngineArgs.add_cli_args(EngineParser())
    found = parser.parse_args(without_command(args))
    load_general_plugins()  # as vLLM does at start-up: other plugins may add models
    if found.model.startswith(("/", "./", "../", "~")) and not os.path.isdir(found.model):
        # vLLM would take it for a name on a hub, and report an invalid one.
        raise FileNotFoundError(f"no folder {found.model}")
    config = AsyncEngineArgs.from_cli_args(found).create_engine_config()
    manager = getattr(config, "ec_manager_config", None)  # vLLM 0.32 and newer
    if manager is not None:
        manager.get_encoder_cache_manager_obj()  # as the scheduler does, and fails
    return config, [arg.partition("=")[0] for arg in parser.rest if arg.startswith("--")]


def without_command(args: Sequence[str]) -> list[str]:
    """Rewrite ``vllm serve MODEL ...`` and ``MODEL ...`` as ``--model MODEL ...``."""
    rest = list(args)
    if rest[:1] and rest[0].rpartition("/")[2] == "vllm":
        rest.pop(0)
    if rest[:1] == ["serve"]:
        rest.pop(0)
    if rest and not rest[0].startswith("-"):
        rest.insert(0, "--model")
    return rest
