# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: what a request names in ``ec_transfer_params``, in its unit and in vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from s3ec.connector.item_tracker import FIRST_PAUSE_S
from s3ec.connector.request_waits import MOST_IN_VAIN, VAIN_REST_S
from s3ec.connector.waiting import EngineLoad, WaitPolicy
from s3ec.encode_costs import EncodeCosts
from s3ec.prefetch import FetchOutcome
from tests.unit.connector.scheduling import ROWS, World, feature, identifier_of, request

if TYPE_CHECKING:
    from tests.fuzz.connectors import Bench

PASS_S = FIRST_PAUSE_S / 4


def naming(name: str, *texts: object, **more: Any) -> Any:
    """A request that names all of its pictures, as a proxy sends it."""
    made = request(name, *(feature(text, 10 * n, **more) for n, text in enumerate(texts)))
    made.ec_transfer_params = {
        one.identifier: {"item_indices": [n], "metadata": {}}
        for n, one in enumerate(made.mm_features)
    }
    return made


def policy(learned: dict[tuple[str, int], float] | None = None) -> WaitPolicy:
    return WaitPolicy(EncodeCosts(learned), EngineLoad(2))


def wait_in_vain(world: World, asker: Any, *texts: str) -> float:
    """Passes until the request goes on, while nobody uploads anything; how long that took."""
    began_s = world.clock.now_s
    while not world.ask(asker):
        world.step()
        for text in texts:
            if identifier_of(text) in world.prefetcher.open:
                world.finish(text, FetchOutcome.ABSENT)
        world.clock.now_s += PASS_S
    return world.clock.now_s - began_s


def until_fetched_again(world: World, asker: Any, text: str) -> None:
    """Passes until the embedding that was not there is asked for once more."""
    assert not world.ask(asker)
    while identifier_of(text) not in world.prefetcher.open:
        world.clock.now_s += PASS_S
        assert not world.ask(asker)
        world.step()


# -- what is named is fetched, and awaited ---------------------------------------------------------


def test_what_a_request_names_is_fetched_whatever_the_index_says(world: World) -> None:
    asker = world.deferred(naming("r", "a"))
    assert world.wanted == [identifier_of("a")]
    world.finish("a")
    assert world.run(asker) == [True]


def test_it_is_asked_for_again_until_its_upload_has_ended(world: World) -> None:
    asker = world.deferred(naming("r", "a"))
    for _ in range(3):
        world.finish("a", FetchOutcome.ABSENT)
        until_fetched_again(world, asker, "a")
    world.finish("a")
    assert world.run(asker) == [True]
    waited_s = world.clock.now_s - 1000.0
    assert waited_s == pytest.approx((1 + 1.5 + 2.25) * FIRST_PAUSE_S)
    assert world.counters.get("deferred_seconds") == pytest.approx(waited_s)
    world.end(asker)


def test_it_is_encoded_when_it_has_not_come_in_time(world: World) -> None:
    asker = naming("r", "a")
    assert wait_in_vain(world, asker, "a") == pytest.approx(2.0, abs=2 * PASS_S)
    assert world.run(asker) == [False]
    assert world.failed() == set()


def test_it_is_fetched_at_once_when_it_comes_to_this_nodes_disk(world: World) -> None:
    asker = world.deferred(naming("r", "a"))
    world.finish("a", FetchOutcome.ABSENT)
    assert not world.ask(asker)
    world.put_here("a")
    assert not world.ask(asker)
    world.step()
    world.finish("a", source="tier")
    assert world.run(asker) == [True]


@pytest.mark.parametrize(
    "outcome", [FetchOutcome.UNAVAILABLE, FetchOutcome.CORRUPT, FetchOutcome.MISMATCH]
)
def test_what_is_no_upload_that_takes_its_time_is_not_awaited(
    world: World, outcome: FetchOutcome
) -> None:
    asker = world.deferred(naming("r", "a"))
    world.finish("a", outcome)
    assert world.run(asker) == [False]


def test_nothing_is_fetched_by_name_while_the_store_is_down(world: World) -> None:
    world.store.is_open = True
    assert world.run(naming("r", "a")) == [False]
    assert world.wanted == []


def test_another_request_does_not_wait_for_what_it_does_not_name(world: World) -> None:
    asker = world.deferred(naming("r", "a"))
    world.finish("a", FetchOutcome.ABSENT)
    until_fetched_again(world, asker, "a")
    assert world.run(request("other", feature("a"))) == [False]


@pytest.mark.parametrize("params", [None, [], ["a"], "a", 7, {}, {"ec_items": [{"mm_hash": 1}]}])
def test_whatever_else_stands_in_the_parameters_names_nothing(world: World, params: Any) -> None:
    asker = request("r", feature("a"))
    asker.ec_transfer_params = params
    assert world.run(asker) == [False]
    assert world.wanted == []


# -- encoders that do not keep their word ----------------------------------------------------------


def test_after_some_waits_in_vain_names_are_not_trusted_for_a_while(world: World) -> None:
    for number in range(MOST_IN_VAIN):
        asker = naming(f"r{number}", f"a{number}")
        assert wait_in_vain(world, asker, f"a{number}") > 1
        world.end(asker)
    assert wait_in_vain(world, naming("next", "b"), "b") < 0.1
    # The bucket is as quick as before.
    world.stock("c")
    assert not world.ask(request("r", feature("c")))
    world.clock.now_s += VAIN_REST_S
    assert wait_in_vain(world, naming("later", "d"), "d") > 1


def test_one_that_keeps_its_word_is_trusted_again(world: World) -> None:
    for number in range(MOST_IN_VAIN - 1):
        asker = naming(f"r{number}", f"a{number}")
        wait_in_vain(world, asker, f"a{number}")
        world.end(asker)
    asker = world.deferred(naming("r", "kept"))
    world.finish("kept", FetchOutcome.ABSENT)
    until_fetched_again(world, asker, "kept")
    world.finish("kept")
    assert world.run(asker) == [True]
    for number in range(2):
        assert wait_in_vain(world, naming(f"s{number}", f"b{number}"), f"b{number}") > 1


# -- waits that are weighed against encoding -------------------------------------------------------


def test_a_cost_that_nobody_knows_is_not_learned_from_what_others_encode() -> None:
    world = World(policy=policy())
    asker = world.deferred(naming("r", "a"))
    world.finish("a")
    assert world.run(asker) == [True]
    assert world.counters.get("waits_declined") == 0


@pytest.mark.parametrize(("row_s", "waits"), [(1e-5, False), (1.0, True)])
def test_where_the_cost_is_known_a_wait_must_pay(row_s: float, waits: bool) -> None:
    size = ROWS.bit_length()
    world = World(policy=policy({("image", size): row_s}))
    assert world.ask(naming("r", "a")) is not waits


def test_how_long_uploads_take_is_learned() -> None:
    """After one that took longer than its encoding, the next one is not waited for as long."""
    weighs = policy({("image", ROWS.bit_length()): 0.2 / ROWS})
    world = World(policy=weighs)
    asker = naming("r", "a")
    first_s = wait_in_vain(world, asker, "a")
    assert 0.1 < first_s < 0.41  # at most twice what the encoder would have taken
    world.end(asker)
    assert wait_in_vain(world, naming("next", "b"), "b") < first_s / 2
    assert weighs.times.of("promise", ROWS).likely_s > 0.2
    world.clock.now_s += VAIN_REST_S + 1
    assert not world.ask(naming("later", "c"))  # or a bad day would last for ever


# -- what an encoder instance answers --------------------------------------------------------------


def test_an_encoder_tells_which_of_its_items_are_not_stored() -> None:
    world = World(producer=True, consumer=False)
    asker = request("r", feature("a"), feature("", 10, raw=True), feature("c", 20))
    asker.mm_features[2].modality = "prompt_embeds"
    assert world.half.request_finished(asker) == [1, 2]


# -- vLLM's scheduler ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    pytest.importorskip("vllm")
    from tests.fuzz.connectors import bench

    with bench() as made:
        yield made


class Served:
    """vLLM's scheduler with s3ec's halves, and a bucket that others fill."""

    def __init__(self, bench: Bench, folder: Path, **options: Any) -> None:
        from s3ec.dev.rigs.models import write_qwen2_vl
        from tests.fuzz.connectors import S3EC
        from tests.fuzz.engine import Engine, Options, has_pixels

        chosen = Options(**options)
        self.wire = S3EC(chosen, lambda feature: not has_pixels(feature), bench)
        self.engine = Engine(write_qwen2_vl(folder), chosen, self.wire, self.wire.ranks)
        self.wire.steps = self.engine.steps
        self.wire.requests = self.engine.scheduler.requests
        self.wire.device = self.engine.scheduler.encoder_cache_manager.cached
        self.encoded: list[str] = []

    def ask(self, name: str, *, named: bool) -> None:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        from tests.fuzz.engine import Asked
        from tests.fuzz.workload import ITEMS

        picture = MultiModalFeatureSpec(
            data=ITEMS["image", "pixels"],
            modality="image",
            identifier=identifier_of(name),
            mm_position=PlaceholderRange(2, 16),
            mm_hash=name,
        )
        tokens = [5] * 24
        names = [picture.identifier] if named else []
        self.engine.add(Asked(name, tokens, [picture], max_tokens=1, named=names))

    def turn(self) -> None:
        """One pass, 10 ms; whatever is asked of the bucket is answered by its end."""
        step = self.engine.schedule()
        for name, indices in step.output.scheduled_encoder_inputs.items():
            self.encoded += [name] * len(indices)
        self.engine.execute()
        self.engine.deliver()
        for identifier in sorted(self.wire.prefetcher.open):
            self.wire.prefetcher.end(identifier)
        self.wire.clock.now_s += 0.01

    def upload(self, name: str) -> None:
        """An encoder elsewhere ends its upload; no index tells of it."""
        from tests.fuzz.outside import FIRST_WEIGHTS, Stored

        self.wire.outside.upload(identifier_of(name), Stored(16, FIRST_WEIGHTS))

    def finish(self) -> None:
        while self.engine.alive:
            self.turn()


@pytest.fixture
def served(bench: Bench, tmp_path: Path) -> Iterator[Served]:
    made = Served(bench, tmp_path / "model")
    yield made
    made.wire.close()


@pytest.mark.filterwarnings("ignore")
def test_in_vllms_scheduler_what_is_named_and_comes_late_is_encoded_once(served: Served) -> None:
    served.ask("cat", named=True)
    for _ in range(8):
        served.turn()
    served.upload("cat")
    served.finish()
    assert served.encoded == []
    assert served.engine.stat["ended length_capped"] == 1


@pytest.mark.filterwarnings("ignore")
def test_in_vllms_scheduler_an_encoders_answer_holds_its_items(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    from s3ec.connector.connector import S3ECConnector
    from s3ec.connector.parts import Parts
    from s3ec.connector.vllm_config import FeatureReader

    served = Served(bench, tmp_path / "model", role="producer")
    config = served.engine.scheduler.vllm_config
    transfer = SimpleNamespace(is_ec_producer=True, is_ec_consumer=False)
    parts = Parts(SimpleNamespace(ec_transfer_config=transfer))
    parts.scheduler, parts.features = served.wire.half, FeatureReader(config.model_config)
    shell = S3ECConnector(parts._vllm_config, ECConnectorRole.SCHEDULER, parts=parts)
    monkeypatch.setattr(served.wire, "request_finished", shell.request_finished)
    answers: list[Any] = []
    update = served.engine.scheduler.update_from_output

    def note(*args: Any) -> Any:
        outputs = update(*args)
        answers.extend(
            one.ec_transfer_params for client in outputs.values() for one in client.outputs
        )
        return outputs

    monkeypatch.setattr(served.engine.scheduler, "update_from_output", note)
    served.ask("cat", named=False)
    served.finish()
    served.wire.close()
    assert answers == [
        {identifier_of("cat"): {"item_indices": [0], "metadata": {"image_grid_thw": [1, 16, 16]}}}
    ]
