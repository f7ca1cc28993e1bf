# SPDX-License-Identifier: Apache-2.0
"""What holds for all commands: help at 80 columns, one vocabulary of JSON, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator

import s3ec
from s3ec.cli.app import app
from s3ec.corpus.precompute import PrecomputeReport
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Stall
from s3ec.identity import Layout
from s3ec.testing.server import MotoServer
from tests.docs_pages import SCHEMA
from tests.support.catalogues import row
from tests.support.waiting import eventually
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes
from tests.unit.cli.test_catalog import append
from tests.unit.cli.test_manifest import announce

FITS = Draft202012Validator(SCHEMA)
ONE, BAD = content_hash("one"), content_hash("bad")

# A line for each command, and its exit status where that is not 0. FOLDER is an empty one.
COMMANDS: list[tuple[str, str, int]] = [
    ("ns", "", 0),
    ("ns", "--count", 0),
    ("ns show", "--count", 0),
    ("ns rm", "NAMESPACE", 0),
    ("ls", "", 0),
    ("stat", ONE, 0),
    ("stat", f"{ONE[:12]} --verify", 0),
    ("stat", f"{BAD} --verify", 1),
    ("get", f"{ONE} -o FOLDER/one", 0),
    ("rm", f"{ONE} nobody", 1),
    ("gc", "--older-than 1d", 0),
    ("manifest rebuild", "", 0),
    ("verify", "", 0),
    ("verify", "--deep --repair", 1),
    ("catalog show", "", 0),
    ("catalog find", "a.pdf", 0),
    ("catalog export", "FOLDER/c.parquet", 0),
    ("hydrate", "", 3),
    ("tier", "", 0),
    ("tier ls", "", 0),
    ("tier check", "", 0),
    ("tier evict", "--to 0", 0),
    ("export", "FOLDER/out", 3),
    ("import", "FOLDER/out", 0),
    ("config show", "", 0),
    ("doctor", "--no-vllm --timeout 100", 0),
    ("advise", "--like gemma3-27b --no-probe", 0),
]
# These are asked elsewhere: in an engine, as a server, and about developers' benchmarks.
ELSEWHERE = {"precompute", "serve-s3", "bench"}


def leaves(command: Any, context: Any, path: str = "") -> Iterator[str]:
    """The path of every command; a group that does something alone is one too."""
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    if path and (not names or command.invoke_without_command):
        yield path
    for name in names:
        below = command.get_command(context, name)
        inner = below.context_class(below, info_name=name, parent=context)
        yield from leaves(below, inner, f"{path} {name}".strip())


ROOT: Any = typer.main.get_command(app)
ROOT_CONTEXT = ROOT.context_class(ROOT, info_name="s3ec")
LEAVES = list(leaves(ROOT, ROOT_CONTEXT))


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    """A namespace with one sound and one damaged entry, an index and a catalogue."""
    name = corpus.namespace(MODEL)
    corpus.put(Layout(name).modality("image"), b'{"width": 8, "dtype": "bfloat16"}')
    announce(corpus, name, ONE, BAD, ago_s=3600)
    corpus.entry(name, BAD, entry_bytes(BAD, name)[:-1] + b"\0")
    append(corpus, name, [row("a.pdf", identifier=ONE)])
    return name


def words_of(path: str, options: str, namespace: str, folder: Path) -> list[str]:
    line = f"{path} {options}".replace("NAMESPACE", namespace).replace("FOLDER", str(folder))
    return line.split()


# -- help ------------------------------------------------------------------------------------------


def test_every_command_is_asked_for_its_json_or_elsewhere() -> None:
    asked = {path for path, *_ in COMMANDS}
    rest = {path for path in LEAVES if not ELSEWHERE & {path, path.split()[0]}}
    assert rest == asked


@pytest.mark.parametrize("path", ["", *LEAVES])
def test_help_has_examples_and_exit_codes_in_80_columns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    lines = cli(*path.split(), "--help").stdout.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    text = "\n".join(lines)
    assert all(part in text for part in ("Examples", f"s3ec {path}".strip(), "Exit status"))
    assert "<bool>" not in text
    prose = "\n".join(lines).partition("╭")[0]
    # A paragraph is broken where the terminal ends, and not where the code's line did.
    for paragraph in re.split(r"\n\s*\n", prose):
        *full, _last = [line.strip() for line in paragraph.strip().splitlines()] or [""]
        following = [line.split()[0] for line in paragraph.strip().splitlines()[1:]]
        for line, word in zip(full, following, strict=True):
            assert len(line) + 1 + len(word) > 78, (line, word)


def test_root_help_has_its_commands_in_panels(cli: Cli) -> None:
    text = cli("--help").stdout
    panels = [text.index(f"─ {title} ─") for title in ("Start", "Look", "Fill", "Clean", "Node")]
    assert panels == sorted(panels)
    assert text.index("doctor") < panels[1] < text.index("manifest")


# -- JSON ------------------------------------------------------------------------------------------


def test_every_document_fits_the_schema(
    cli: Cli, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, options, code in COMMANDS:
        words = words_of(path, options, namespace, tmp_path)
        result = cli(*words, "--json", code=code)
        assert result.stdout.count("\n") == 1, words
        document = json.loads(result.stdout)
        FITS.validate(document)
        if "error" not in document:
            assert set(SCHEMA["$defs"][path]["required"]) <= set(document), words
        assert "Traceback" not in result.stderr
        if path.split()[0] in ("ns", "ls", "tier"):
            cli(*words, code=code)
            lines = cli(*words, code=code).stdout.splitlines()
            assert [line for line in lines if len(line) > 80 and "/" not in line] == []
    FITS.validate(PrecomputeReport().to_json())
    assert set(SCHEMA["$defs"]["precompute"]["required"]) <= set(PrecomputeReport().to_json())


def test_the_schema_names_no_command_and_no_key_that_is_none() -> None:
    assert set(SCHEMA["$defs"]) <= set(LEAVES)
    package = Path(s3ec.__file__).parent
    code = "\n".join(path.read_text() for path in package.rglob("*.py") if "dev" not in path.parts)
    words = set(re.findall(r"\w+", code))
    assert {key for key in SCHEMA["properties"] if key not in words} == set()


def test_a_column_without_a_value_is_left_out_and_fingerprints_have_12_digits(
    cli: Cli, corpus: Corpus
) -> None:
    weights = f"sha256:{content_hash('weights')}"
    corpus.namespace({**MODEL, "weights": weights})
    head, line = cli("ns").stdout.splitlines()
    assert head.split() == ["namespace", "dtype", "weights", "age"]
    assert line.split()[2] == content_hash("weights")[:12]
    assert weights in cli("ns", "show").stdout


# -- the place as an argument ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "options"),
    [(path, options) for path, options, _ in COMMANDS if path.split()[0] != "tier"]
    + [("precompute", "FOLDER --model MODEL"), ("doctor", "-- --model MODEL")],
)
def test_every_command_of_a_corpus_takes_the_place_as_an_argument(path: str, options: str) -> None:
    command, context = ROOT, ROOT_CONTEXT
    for name in path.split():
        command = command.get_command(context, name)
        context = command.context_class(command, info_name=name, parent=context)
    words, place = options.split(), "s3://one/two"
    end = words.index("--") if "--" in words else len(words)
    for line in ([place, *words], [*words[:end], place, *words[end:]]):
        read = command.make_context(path, line, parent=context.parent)
        assert read.params["url"] == place
        assert place not in [value for key, value in read.params.items() if key != "url"]


def test_the_place_as_an_argument_is_looked_at(
    cli: Cli, corpus: Corpus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("S3EC_BUCKET")
    monkeypatch.delenv("S3EC_PREFIX")
    assert cli.json("ls", f"s3://{corpus.bucket}")["namespace"] == namespace


def test_a_place_is_given_once(cli: Cli) -> None:
    for words in (["s3://one", "s3://two"], ["--url", "s3://one", "file:///two"]):
        assert "leave one out" in cli("ls", *words, code=2).stderr
    found = cli.json("config", "show", "s3://one/two", "--region", "eu-north-1")["settings"]
    assert (found["bucket"]["value"], found["prefix"]["value"]) == ("one", "two")
    assert "unexpected" in cli("tier", "ls", "s3://one", code=2).stderr


# -- Ctrl-C ----------------------------------------------------------------------------------------

GOES_ON, BEGINS_AGAIN = "goes on where this one ended", "nothing was changed"
# A line for each command that may take long, and what is said of the rest. Those that delete come
# last, since all are of one corpus.
LONG = [
    ("ns", "--count", BEGINS_AGAIN),
    ("ns show", "--count", BEGINS_AGAIN),
    ("ls", "", BEGINS_AGAIN),
    ("manifest rebuild", "", BEGINS_AGAIN),
    ("verify", "", BEGINS_AGAIN),
    ("verify", "--deep", "with --state FOLDER the next one goes on there"),
    ("verify", "--deep --state FOLDER/state", GOES_ON),
    ("catalog show", "", BEGINS_AGAIN),
    ("catalog find", "a.pdf", BEGINS_AGAIN),
    ("catalog export", "FOLDER/c.parquet", BEGINS_AGAIN),
    ("hydrate", "", GOES_ON),
    ("export", "FOLDER/other", GOES_ON),
    ("import", "FOLDER/out", GOES_ON),
    ("tier", "", BEGINS_AGAIN),
    ("tier ls", "", BEGINS_AGAIN),
    ("tier check", "", BEGINS_AGAIN),
    ("tier evict", "--to 0", BEGINS_AGAIN),
    ("tier evict", "--to 0 --yes", GOES_ON),
    ("doctor", "--no-vllm", BEGINS_AGAIN),
    ("bench encode", "MODEL", BEGINS_AGAIN),
    ("rm", f"{ONE} --yes", GOES_ON),
    ("gc", "--older-than 1d", BEGINS_AGAIN),
    ("gc", "--older-than 1d --yes", GOES_ON),
    ("ns rm", "NAMESPACE --idle 0 --yes", GOES_ON),
]
# One process imports what commands need. Its children run a command each. With `interrupt` they
# get a SIGINT when they first tell how far they are, else nobody reads what they print.
CHILDREN = """
import contextlib, json, os, signal, sys
from s3ec.cli import main, output
from s3ec.corpus import Corpus, catalog, encoder
from s3ec.doctor import run, serving
from s3ec.store import s3_client
import s3ec.cli.app

class Encoder:
    def __init__(self, *_, **__): pass
    def close(self): pass
    def encode(self, pictures):
        with contextlib.suppress(KeyboardInterrupt):  # vLLM's start may lose it
            next(pictures)
        return iter(list(pictures))

encoder.VllmEncoder = Encoder
serving.has_vllm = lambda: True
report, read = output.Progress.__call__, catalog.read_table

async def read_interrupted(*args, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return await read(*args, **options)

def interrupted(self, *told):
    output.Progress.__call__ = report
    report(self, *told)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
folder, interrupt = sys.argv[1:]
for number, words in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if not child:
        out, err = (os.open(f"{folder}/{number}.{name}", os.O_RDWR | os.O_CREAT)
                    for name in ("out", "err"))
        if interrupt == "interrupt":
            output.Progress.__call__ = interrupted
            if words[0] == "catalog":  # it tells nothing of its way
                catalog.read_table = read_interrupted
        else:
            unread, out = os.pipe()
            os.close(unread)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.argv[1:] = words
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def in_children(
    commands: list[list[str]], folder: Path, mode: str
) -> Iterator[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each command."""
    run = [sys.executable, "-c", CHILDREN, str(folder), mode]
    lines = json.dumps(commands)
    ended = subprocess.run(run, input=lines, capture_output=True, text=True, check=True)
    for number, code in enumerate(ended.stdout.split()):
        out, err = ((folder / f"{number}.{name}").read_text() for name in ("out", "err"))
        yield int(code), out, err


def test_ctrl_c_ends_every_long_command_and_says_what_was_done_and_how_to_get_the_rest(
    cli: Cli, namespace: str, tmp_path: Path
) -> None:
    cli("hydrate", code=3)
    cli("export", str(tmp_path / "out"), code=3)
    given = [words_of(path, options, namespace, tmp_path) for path, options, _ in LONG]
    ended = in_children([[*words, "--json"] for words in given], tmp_path, "interrupt")
    for (code, out, err), line, words in zip(ended, LONG, given, strict=True):
        assert (code, "Traceback" in err) == (130, False), (words, err)
        document = json.loads(out)
        FITS.validate(document)
        error = document["error"]
        assert (error["kind"], error["field"]) == ("interrupted", None)
        assert line[2] in error["fix"], words
        assert document["step"], words
        assert error["message"].startswith(f"interrupted while {document['step']}")
        assert err.endswith(f"error: {error['message']}\n")
    for words in given[:-4]:
        if words[0] not in ("bench", "doctor"):
            assert cli.run(*words, "--json").exit_code in (0, 1, 3), words


def test_ctrl_c_while_the_server_is_silent_ends_the_process_without_a_traceback(
    cli: Cli, namespace: str, moto_server: MotoServer
) -> None:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        proxy.add(Rule(Stall(), target="list-type"))
        command = [sys.executable, "-m", "s3ec", "ls", "--json"]
        env = {**os.environ, "S3EC_ENDPOINT_URL": proxy.url}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        ) as asked:
            eventually(lambda: any("list-type" in one.target for one in proxy.requests))
            asked.send_signal(signal.SIGINT)
            out, err = asked.communicate()
    assert asked.returncode == 130
    assert json.loads(out)["error"]["kind"] == "interrupted"
    assert err.startswith("error: interrupted")
    assert "Traceback" not in err


# -- a reader that has seen enough -----------------------------------------------------------------


SHOWING = [
    *("--help", "config show", "config show --json", "bench list", "ns", "ns --count"),
    *("ns show", "ls", "ls --json", "ls --ndjson", f"stat {ONE}", f"get {ONE} -o -"),
    *("catalog show", "catalog find a.pdf"),
    *("tier", "tier ls", "tier ls --names", "advise --no-probe --like gemma3-27b"),
]


def test_a_reader_that_has_seen_enough_is_no_failure(
    cli: Cli, namespace: str, tmp_path: Path
) -> None:
    cli("hydrate", code=3)
    ended = in_children([line.split() for line in SHOWING], tmp_path, "unread")
    for line, (code, _, err) in zip(SHOWING, ended, strict=True):
        assert (code, "rror" in err) == (0, False), (line, err)
