# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own scheduler needs of s3ec, no less and no more: one scene for each case.

The engine is that of the random lives: real schedulers, managers, files and halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.fuzz.scheduler import Fuzz

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FORMS = ("pixels", "grid", "nothing")
ROWS = 16


class Scene:
    """An engine, a bucket, and requests for one picture or a few."""

    def __init__(self, fuzz: Fuzz, **options: Any) -> None:
        from tests.fuzz.engine import Options

        self.engine, self.s3ec = fuzz.engine(
            Options(**{"batched_tokens": 256, "cache_rows": ROWS} | options)
        )
        self.deferred = 0  # passes of the last spin that scheduled nothing

    def store(self, name: str, rows: int = ROWS) -> None:
        """The bucket holds it, and the index knows."""
        from tests.fuzz.outside import Stored
        from tests.unit.tier.cases import key_of

        self.s3ec.outside.upload(name, Stored(rows, 1))
        self.s3ec.outside.index.add(key_of(name))

    def delete(self) -> None:
        """Nobody has anything any more."""
        self.s3ec.outside.bucket.clear()
        self.s3ec.outside.tier.clear()

    def ask(
        self,
        name: str,
        *pictures: tuple[str, int],
        form: str = "pixels",
        tokens: int = 100,
        rows: int = ROWS,
        mask: Any = None,
        **more: Any,
    ) -> Any:
        """Send a request with pictures at these offsets; vLLM's Request."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        from tests.fuzz.engine import Asked
        from tests.fuzz.workload import ITEMS

        length = rows if mask is None else len(mask)
        features = [
            MultiModalFeatureSpec(
                data=ITEMS["image", form],
                modality="image",
                identifier=picture,
                mm_position=PlaceholderRange(offset, length, mask),
                mm_hash=picture,
            )
            for picture, offset in pictures
        ]
        text = [*range(10, 10 + tokens), *map(ord, name)]
        self.engine.add(Asked(name, text, features, max_tokens=1, **more))
        return self.engine.alive[name]

    def turn(self) -> bool:
        """One pass from the scheduler to its result; whether it had any tokens."""
        step = self.engine.schedule()
        self.engine.execute()
        self.engine.deliver()
        return bool(step.output.total_num_scheduled_tokens)

    def spin(self, *, fetches: bool = True, most: int = 400) -> None:
        """Go on until all requests have ended."""
        self.deferred = 0
        for _ in range(most):
            if not self.engine.alive:
                return
            self.deferred += not self.turn()
            self.s3ec.clock.now_s += 0.05
            for name in sorted(self.s3ec.prefetcher.open) if fetches else ():
                self.s3ec.prefetcher.end(name)
        raise AssertionError(f"{list(self.engine.alive)} did not end")

    def give_up_the_device(self) -> None:
        """Another picture takes its room; prefixes are still in the KV cache."""
        self.ask(f"filler {len(self.engine.journal)}", ("filler", 0))
        self.spin()

    def counts(self) -> tuple[float, float]:
        """Embeddings that were loaded, and encoded."""
        return self.s3ec.counters.get("hits"), self.s3ec.counters.get("misses")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("offset", "loads"), [(70, 1), (56, 1), (20, 0)], ids=["in it", "across its edge", "before it"]
)
def test_a_picture_in_the_replayed_end_of_a_prefix_is_loaded(
    fuzz: Fuzz, form: str, offset: int, loads: int
) -> None:
    """vLLM asks with all tokens of the hit, then goes back by the window (DeepSeek-V4.1)."""
    scene = Scene(fuzz, replay_tokens=32)
    scene.ask("first", ("page", offset))
    scene.spin()
    scene.store("page")
    scene.give_up_the_device()
    before = scene.counts()
    again = scene.ask("second", ("page", offset), form=form)
    scene.spin()
    assert again.status.name == "FINISHED_LENGTH_CAPPED"
    assert scene.counts() == (before[0] + loads, before[1])


def test_a_picture_that_is_gone_in_the_replayed_end_fails_its_request_alone(fuzz: Fuzz) -> None:
    scene = Scene(fuzz, replay_tokens=32)
    scene.ask("first", ("page", 70))
    scene.spin()
    scene.give_up_the_device()
    gone = scene.ask("gone", ("page", 70), form="grid")
    other = scene.ask("other", ("page", 20), form="grid", tokens=60)
    scene.spin()
    assert gone.status.name == "FINISHED_ERROR"
    assert other.status.name == "FINISHED_ERROR"  # another prompt: no prefix


def test_of_two_pictures_only_the_one_in_the_replayed_end_is_waited_for(fuzz: Fuzz) -> None:
    scene = Scene(fuzz, replay_tokens=32)
    scene.ask("first", ("page", 10), ("other", 70))
    scene.spin()
    scene.store("other")
    scene.give_up_the_device()
    before = scene.counts()
    again = scene.ask("second", ("page", 10), ("other", 70), form="grid")
    scene.spin()
    assert again.status.name == "FINISHED_LENGTH_CAPPED"
    assert scene.counts() == (before[0] + 1, before[1])


def with_tokens(rows: int, *, before: int = 0, behind: int = 0) -> Any:
    """Rows of a placeholder with opening or closing tokens, which have none."""
    import torch

    mask = torch.zeros(before + rows + behind, dtype=torch.bool)
    mask[before : before + rows] = True
    return mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stops", [False, True], ids=["", "s3ec has stopped"])
def test_closing_tokens_behind_a_prefix_hit_do_not_wait_for_their_picture(
    fuzz: Fuzz, form: str, stops: bool
) -> None:
    """All its rows are in the KV cache, so vLLM needs no encoder output for the rest."""
    scene = Scene(fuzz)
    picture, mask = ("scan", 12), with_tokens(ROWS, behind=6)  # a hit ends four tokens into those
    scene.ask("first", picture, tokens=34, mask=mask)
    scene.spin()
    scene.give_up_the_device()
    before = scene.counts()
    if form == "pixels":
        scene.store("scan")
    if stops:
        scene.s3ec.weights_may_have_changed("a call", was_reset=False)
    again = scene.ask("second", picture, tokens=34, mask=mask, form=form)
    scene.spin()
    assert again.status.name == "FINISHED_LENGTH_CAPPED"
    assert scene.deferred == 0
    assert scene.counts() == before


def test_opening_tokens_do_not_wait_for_their_picture(fuzz: Fuzz) -> None:
    """The step ends before its first row; the picture is fetched for the one after that."""
    scene = Scene(fuzz, batched_tokens=16)
    scene.store("scan")
    asked = scene.ask("r", ("scan", 28), mask=with_tokens(ROWS, before=8), form="grid")
    assert scene.turn()
    assert not scene.turn()  # this one needs it
    assert list(scene.s3ec.prefetcher.open) == ["scan"]
    scene.spin()
    assert asked.status.name == "FINISHED_LENGTH_CAPPED"
    assert scene.counts() == (1, 0)


LONG = 64  # rows of a picture that takes four steps


def half_way(scene: Scene, name: str = "long", **more: Any) -> Any:
    """A request whose first step has had the begin of a long picture."""
    asked = scene.ask(name, ("page", 4), rows=LONG, **more)
    while asked.num_computed_tokens < 16:
        scene.turn()
        for one in sorted(scene.s3ec.prefetcher.open):
            scene.s3ec.prefetcher.end(one)
    return asked


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("then", ["", "is deleted", "s3ec stops"])
def test_what_a_request_holds_on_the_device_is_not_asked_for_again(
    fuzz: Fuzz, form: str, then: str
) -> None:
    """vLLM's manager keeps it until the request is past it."""
    scene = Scene(fuzz, batched_tokens=16, cache_rows=LONG)
    scene.store("page", LONG)
    asked = half_way(scene, form=form)
    assert scene.counts() == (1, 0)
    if then == "is deleted":
        scene.delete()
    elif then:
        scene.s3ec.weights_may_have_changed("a call", was_reset=False)
    scene.s3ec.clock.now_s += 60  # no lease lasts as long
    scene.spin(fetches=False)
    assert asked.status.name == "FINISHED_LENGTH_CAPPED"
    assert scene.deferred == 0
    assert scene.counts() == (1, 0)


def test_what_another_request_had_brought_to_the_device_is_held_as_well(fuzz: Fuzz) -> None:
    """vLLM asks nobody about it, so that shows in the step alone."""
    scene = Scene(fuzz, batched_tokens=16, cache_rows=LONG)
    scene.store("page", LONG)
    scene.ask("first", ("page", 4), rows=LONG, form="grid")
    scene.spin()
    scene.engine.reset_prefix_cache(preempt=False)
    asked = half_way(scene, form="grid")
    scene.delete()
    scene.spin(fetches=False)
    assert asked.status.name == "FINISHED_LENGTH_CAPPED"
    assert scene.counts() == (1, 0)


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "deleted"])
def test_a_preempted_request_holds_nothing(fuzz: Fuzz, is_stored: bool) -> None:
    """It comes back to where it was, behind a prefix hit, and its picture was pushed out."""
    scene = Scene(fuzz, batched_tokens=16, cache_rows=LONG, policy="priority")
    scene.store("page", LONG)
    asked = half_way(scene, form="grid", priority=1)
    scene.turn()
    scene.s3ec.clock.now_s += 60  # what was loaded is not pinned any more
    scene.engine.reset_prefix_cache(preempt=True)
    half_way(scene, "a twin")
    scene.turn()
    scene.engine.abort("a twin")
    scene.ask("filler", ("filler", 0), rows=LONG)
    while "filler" in scene.engine.alive:
        scene.turn()
    if not is_stored:
        scene.delete()
    scene.spin()
    # What is deleted may still be at hand. Nothing else than that is served.
    served = asked.status.name == "FINISHED_LENGTH_CAPPED"
    assert served or (asked.status.name == "FINISHED_ERROR" and not is_stored)
    assert scene.counts()[1] == 1  # the filler


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "deleted"])
def test_a_reset_half_way_through_a_picture_has_it_loaded_again(
    fuzz: Fuzz, form: str, is_stored: bool
) -> None:
    """vLLM's manager forgets what it held for the request, and asks for it once more."""
    scene = Scene(fuzz, batched_tokens=16, cache_rows=LONG)
    scene.store("page", LONG)
    asked = half_way(scene, form=form)
    scene.s3ec.clock.now_s += 60
    scene.engine.reset_encoder_cache()
    if not is_stored:
        scene.delete()
    scene.spin()
    fails = form != "pixels" and not is_stored
    assert asked.status.name == ("FINISHED_ERROR" if fails else "FINISHED_LENGTH_CAPPED")
    assert scene.counts() == ((2, 0) if is_stored else (1, not fails))


def test_after_a_reset_what_the_device_held_is_loaded(fuzz: Fuzz) -> None:
    scene = Scene(fuzz)
    scene.store("page")
    for turn in range(3):
        scene.ask(f"{turn}", ("page", 0))
        scene.spin()
        scene.engine.reset_prefix_cache(preempt=False)
        scene.engine.reset_encoder_cache()
    assert scene.counts() == (3, 0)
