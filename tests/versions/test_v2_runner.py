# SPDX-License-Identifier: Apache-2.0
"""The worker half behind what calls it in vLLM's V2 model runner, which GPU users get since 0.32.

vLLM's ``ActiveECConnector`` and ``EncoderCache`` are the real ones; they need no GPU. What the
runner does between the connector's hooks is played: it puts what it encodes into the encoder cache.
``tests/fuzz`` has the scheduler beside it, and ``tests/e2e/test_v2_runner.py`` whole engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from s3ec.connector.messages import Encode, Load, Save, StepPlan, WorkerReport
from tests.support.waiting import eventually
from tests.unit.connector.processes import HASHES, Process, tensor

# What vLLM's own imports warn of differs from release to release.
pytestmark = pytest.mark.filterwarnings("ignore")

torch = pytest.importorskip("torch")
compat = pytest.importorskip("s3ec.connector.compat")
if (compat.release(compat.vllm_version()) or (1, 0)) < (0, 32):
    pytest.skip("the V2 model runner is the default from vLLM 0.32 on", allow_module_level=True)

STORED, FRESH, OTHER = HASHES[:3]


class Worker(Process):
    """One worker of an engine that loads and saves.

    Attributes:
        runner: What vLLM's runner has of the connector.
        held: vLLM's encoder cache.
        shell: Ours.
    """

    def __init__(self, folder: Path) -> None:
        v2 = pytest.importorskip("vllm.v1.worker.gpu.ec_connector")
        from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache

        from s3ec.dev.bench.worker_rig import worker_shell

        super().__init__(folder)
        self.shell = worker_shell(self.node)
        self.held = EncoderCache()
        self._step = 0
        with mock.patch.object(v2, "get_ec_transfer", return_value=self.shell):
            self.runner = v2.ActiveECConnector(None, self.held.encoder_outputs)

    def orders(self, loads: Sequence[Load] = (), saves: Sequence[str] = ()) -> Any:
        """What the scheduler sends of one step."""
        from s3ec.connector.connector import S3ECMetadata

        self._step += 1
        plan = StepPlan(
            step=self._step,
            loads=list(loads),
            saves={name: Save("image", {}) for name in saves},
            encodes={name: Encode("image", 4) for name in saves},
        )
        metadata = S3ECMetadata(plan)
        return SimpleNamespace(ec_connector_metadata=metadata, finished_req_ids=set())

    def run(
        self, orders: Any, *, failure: Exception | None = None, **encoded: Any
    ) -> WorkerReport | None:
        """A step with a forward; what the scheduler is told of it."""
        with self.runner.maybe_get_output(orders) as output:
            self.held.encoder_outputs.update(encoded)
            if failure is not None:
                raise failure
        return self._report(output)

    def rest(self) -> WorkerReport | None:
        """A step without one."""
        return self._report(self.runner.no_forward(self.orders()).ec_connector_output)

    def _report(self, output: Any) -> WorkerReport | None:
        metadata = None if output is None else output.ec_connector_worker_meta
        return None if metadata is None else metadata.report

    def until_stored(self, *names: str) -> None:
        """Steps without a forward, until they have told that the bucket holds these."""
        left = set(names)

        def told() -> bool:
            report = self.rest()
            left.difference_update(report.stored if report else ())
            return not left

        eventually(told, "the scheduler is told of what is stored")

    def close(self) -> None:
        assert self.counted("internal_errors") == 0
        self.node.users += 1  # shutdown gives a shared node back
        self.shell.shutdown()
        super().close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.close()


def test_what_is_granted_is_there_before_the_encoder_and_only_what_it_makes_is_saved(
    worker: Worker,
) -> None:
    load = worker.granted(STORED, tensor(1))
    with worker.runner.maybe_get_output(worker.orders([load], [FRESH])) as output:
        assert torch.equal(worker.held.encoder_outputs[STORED], tensor(1))
        # Embeddings that a client sends pass through the encoder cache, and nobody asked for them.
        worker.held.encoder_outputs |= {FRESH: tensor(2), OTHER: tensor(3)}
    assert output.ec_connector_worker_meta.report.loaded == {1: {0}}
    assert output.ec_connector_stats is None  # they are told by the scheduler's half
    worker.until_stored(FRESH)
    assert torch.equal(worker.read(FRESH), tensor(2))
    assert worker.stored(STORED) is None
    assert worker.stored(OTHER) is None
    assert worker.counted("encode.rows") == 4


def test_what_the_cache_holds_already_is_neither_saved_again_nor_taken_for_a_fast_encode(
    worker: Worker,
) -> None:
    """vLLM's scheduler may evict an embedding and order it anew in one pass."""
    worker.run(worker.orders(saves=[FRESH]), **{FRESH: tensor(2)})
    worker.until_stored(FRESH)
    worker.run(worker.orders(saves=[FRESH]))
    assert worker.counted("save.queued") == 1
    assert worker.counted("encode.rows") == 4


def test_a_step_without_a_forward_tells_nothing_where_nothing_happened(worker: Worker) -> None:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    def tells_nothing(orders: Any) -> bool:
        return worker.runner.no_forward(orders) is EMPTY_MODEL_RUNNER_OUTPUT

    assert tells_nothing(SimpleNamespace(ec_connector_metadata=None))
    eventually(lambda: tells_nothing(worker.orders()), "all counts of the start are told")


def test_after_an_encoder_that_fails_nothing_of_that_step_is_saved_and_the_next_one_is_whole(
    worker: Worker,
) -> None:
    first, second = worker.granted(STORED, tensor(1)), worker.granted(OTHER, tensor(3))
    out_of_memory = torch.OutOfMemoryError()
    with pytest.raises(torch.OutOfMemoryError):
        worker.run(worker.orders([first], [FRESH]), failure=out_of_memory, **{FRESH: tensor(2)})
    worker.held.free_encoder_cache(FRESH)
    report = worker.run(worker.orders([second], [FRESH]), **{FRESH: tensor(4)})
    assert report is not None
    assert report.loaded == {2: {0}}
    worker.until_stored(FRESH)
    assert torch.equal(worker.read(FRESH), tensor(4))
    assert torch.equal(worker.held.encoder_outputs[OTHER], tensor(3))
