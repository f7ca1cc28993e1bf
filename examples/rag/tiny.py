# SPDX-License-Identifier: Apache-2.0
"""All that the example needs, on this machine: PDF files, S3 server, `s3ec precompute`, vLLM.

It needs a checkout, since the model and the servers come from `s3ec.dev`. No GPU, no download.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pypdfium2
import pypdfium2.raw as pdfium

from s3ec.dev.demo import forget_other_stores
from s3ec.dev.rigs.api_server import ApiServer
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, engine_env
from s3ec.errors import UnavailableError
from s3ec.testing.server import LocalS3

# Document -> pages -> lines.
DOCUMENTS = {
    "pumps.pdf": [
        ["Pump service report", "Four pumps were inspected in March at the harbour plant."],
        ["Pressure", "Pump 3 lost pressure: 4.1 bar before service, 6.0 bar after it."],
        ["Costs", "Seals cost 310 euros and labour cost 540 euros."],
    ],
    "trains/timetable.pdf": [
        ["Winter timetable", "Trains to Bergen leave every two hours from platform 4."],
        ["Night trains", "The sleeping car to Narvik runs on Friday and Sunday only."],
    ],
    "garden.pdf": [
        ["Apple trees", "Prune apple trees in February, before the buds open."],
        ["Roses", "Roses need water twice a week and full sun."],
    ],
}
# Added after `s3ec precompute` has run, so the bucket does not have it.
ADDED_LATER = {"notice.pdf": [["Notice", "The canteen is closed on Monday for repairs."]]}
QUESTIONS = [
    "Which pump lost pressure?",
    "What did the seals cost?",
    "When does the sleeping car to Narvik run?",
    "When do I prune apple trees?",
    "Why is the canteen closed?",
]
_ENGINE = {"enforce_eager": True, "gpu_memory_utilization": 0.3, "max_model_len": 4096, "seed": 0}
_A4 = (595, 842)


@contextmanager
def everything() -> Iterator[Path]:
    """Run all servers; give the folder of PDF files. The environment names bucket and server."""
    forget_other_stores()
    with (
        tempfile.TemporaryDirectory(prefix="s3ec-rag-") as scratch,
        LocalS3() as s3,
        # It imports vLLM once, for `s3ec precompute` and for the server.
        EngineForkServer(Path(scratch, "imports.log"), ONE_PROCESS) as vllm,
    ):
        work = Path(scratch)
        os.environ |= s3.env() | {
            "S3EC_BUCKET": s3.create_bucket("documents"),
            "S3EC_ENDPOINT_URL": s3.endpoint_url,
            "S3EC_CACHE_DIR": str(work / "tier"),
            "S3EC_CACHE_BYTES": "1GiB",
            "S3EC_MIN_FREE_BYTES": "0",
        }
        with _step("writing PDF files, and a model with random weights whose answers are noise"):
            folder = write_pdfs(work / "documents", DOCUMENTS)
            model = work / "model"
            _run(vllm, work / "model.log", "s3ec.dev.rigs.models", "qwen2-vl", str(model))
        with _step(f"s3ec precompute {folder.name}"):
            _precompute(vllm, folder, model, work)
        write_pdfs(folder, ADDED_LATER)
        server = ApiServer(
            model,
            ec=json.dumps({"ec_connector": "S3ECConnector", "ec_role": "ec_both"}),
            log_path=work / "server.log",
            env=ONE_PROCESS,
            flags={
                f"--{name.replace('_', '-')}": None if value is True else value
                for name, value in _ENGINE.items()
            },
            nursery=vllm,
        )
        with ExitStack() as stack:
            with _step("vllm serve"):
                stack.enter_context(server)
            os.environ |= {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"}
            yield folder


def _run(vllm: EngineForkServer, log_path: Path, module: str, *arguments: str) -> None:
    """Run a module as `python -m` does, in a process that has vLLM imported."""
    with open(log_path, "ab") as log:
        env = engine_env({**os.environ, **ONE_PROCESS})
        job = vllm.fork(module, arguments, env=env, log=log.fileno(), fds=())
    try:
        job.wait()
    finally:
        job.terminate()  # after Ctrl-C
        job.wait()


def _precompute(vllm: EngineForkServer, folder: Path, model: Path, work: Path) -> None:
    """Encode all pages into the bucket.

    Raises:
        UnavailableError: It failed; the message has its last lines.
    """
    report, log_path = work / "report.json", work / "precompute.log"
    words = ["precompute", str(folder), "--model", str(model), "--report", str(report)]
    words += ["--engine-args", json.dumps(_ENGINE), "--verbose"]
    _run(vllm, log_path, "s3ec", *words)
    if not report.exists() or json.loads(report.read_text())["status"] != "complete":
        raise UnavailableError(f"s3ec precompute failed: {log_path.read_text()[-4000:]}")


@contextmanager
def _step(title: str) -> Iterator[None]:
    print(f"{title} ...", file=sys.stderr, flush=True)
    started = time.monotonic()
    yield
    print(f"    done in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def write_pdfs(folder: Path, documents: Mapping[str, Sequence[Sequence[str]]]) -> Path:
    """Write PDF files with these lines of text on their pages; return the folder."""
    for name, pages in documents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with pypdfium2.PdfDocument.new() as pdf:
            for lines in pages:
                page = pdf.new_page(*_A4)
                for number, line in enumerate(lines):
                    _write_line(pdf, page, line, size=14 if number else 24, y=760 - 50 * number)
                page.gen_content()
            pdf.save(path)
    return folder


def _write_line(
    pdf: pypdfium2.PdfDocument, page: pypdfium2.PdfPage, line: str, *, size: int, y: int
) -> None:
    text = pdfium.FPDFPageObj_NewTextObj(pdf, b"Helvetica", size)
    encoded = (line + "\0").encode("utf-16-le")
    pdfium.FPDFText_SetText(text, ctypes.cast(encoded, ctypes.POINTER(ctypes.c_ushort)))
    pdfium.FPDFPageObj_Transform(text, 1, 0, 0, 1, 60, y)
    pdfium.FPDFPage_InsertObject(page, text)
