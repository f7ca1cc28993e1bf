# SPDX-License-Identifier: Apache-2.0
"""A random life of one engine, drawn from a seed: what it is, who asks what, what goes wrong."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine.input_processor import InputProcessor

from s3ec.prefetch import FetchOutcome
from tests.fuzz.connectors import S3EC, Bench
from tests.fuzz.engine import BLOCK, Asked, Engine, Options
from tests.fuzz.outside import FIRST_WEIGHTS, BrokenPromiseError, PlayedSaves, Stored
from tests.unit.connector.scheduling import identifier_of
from tests.unit.tier.cases import key_of

_FAULTS = (
    FetchOutcome.ABSENT,
    FetchOutcome.UNAVAILABLE,
    FetchOutcome.CORRUPT,
    FetchOutcome.MISMATCH,
)
# More than any run takes: a request that never ends would go on.
_MOST_ROUNDS = 20_000
_STEP_S = 0.01
# How often the prefix cache is reset.
_RESETS = 0.005
# In which a feature comes without pixels.
_BARE_FORMS = ("grid", "kept on the CPU", "nothing")
_ADAPTERS = ("poems", "Org/Poems v2")


def _element(value: Any, *, keep_on_cpu: bool = False) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=value, field=MultiModalBatchedField(keep_on_cpu=keep_on_cpu))


def _items() -> dict[tuple[str, str], MultiModalKwargsItem | None]:
    """What a feature carries, by modality and form, as vLLM hands it to its scheduler."""
    pixels, grid = torch.zeros(4, 8), torch.tensor([1, 16, 16])
    count = _element(torch.tensor(1), keep_on_cpu=True)
    image = {"image_grid_thw": _element(grid, keep_on_cpu=True)}
    video = {"video_grid_thw": _element(grid, keep_on_cpu=True)}
    forms = {
        ("image", "pixels"): {"pixel_values": _element(pixels), **image},
        ("image", "grid"): image,
        ("image", "kept on the CPU"): {**image, "image_num_patches": count},
        ("video", "pixels"): {"pixel_values_videos": _element(pixels), **video},
        ("video", "grid"): video,
        ("video", "kept on the CPU"): {**video, "second_per_grid_ts": count},
        ("audio", "pixels"): {"input_audio_features": _element(pixels)},
    }
    made: dict[tuple[str, str], MultiModalKwargsItem | None] = {
        name: MultiModalKwargsItem(elements) for name, elements in forms.items()
    }
    return made | {("image", "nothing"): None, ("video", "nothing"): None}


ITEMS = _items()


@functools.cache
def _mask(length: int, start: int, step: int) -> torch.Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    mask[start::step] = True
    return mask


@dataclass(frozen=True)
class Picture:
    """Something that clients send: an image, a video, or a sound.

    Attributes:
        name: Its hash, or the uuid that a client gave it.
        rows: Embeddings that the encoder makes of it.
    """

    name: str
    modality: str
    rows: int

    def identifier(self, lora: LoRARequest | None) -> str:
        """As vLLM makes it: with the adapter's name where LoRA touches the encoder."""
        processor = SimpleNamespace(lora_config=SimpleNamespace(enable_tower_connector_lora=True))
        return str(InputProcessor._get_mm_identifier(processor, self.name, lora))


@dataclass(frozen=True)
class Habits:
    """What the clients and the world around do, beside what the engine is.

    Attributes:
        pictures: How many there are.
        requests: How many are sent.
        two_sizes: How often a picture's name comes with more rows than it has.
        two_kinds: How often an image comes as a video, or a video as an image.
        bare: How often a feature comes without pixels.
        modalities: Of the pictures.
        adapters: How many LoRA adapters clients use.
        stored: How much of the pictures the bucket holds at first.
        announced: How much of what is stored this engine's index knows.
        faults: How often a fetch fails whatever is there.
        outages: How often the store or the disk fails, or comes back.
        jumps: How often the clock jumps.
        weights: How often the weights change.
        named: How often a request names a picture, which an encoder may have uploaded or not.
        emptied: How often the encoder cache is reset.
        framed: How often a picture has opening and closing tokens, which have no rows.
    """

    pictures: int
    requests: int
    two_sizes: float
    two_kinds: float
    bare: float
    modalities: tuple[str, ...]
    adapters: int
    stored: float
    announced: float
    faults: float
    outages: float
    jumps: float
    weights: float
    named: float
    framed: float
    emptied: float


def draw(seed: int) -> tuple[Options, Habits]:
    """What the engine of this seed is, and what happens to it."""
    rnd = random.Random(seed)
    is_async = rnd.random() < 0.5
    role = rnd.choice(["consumer", "consumer", "both", "both", "both", "producer"])
    replays = rnd.random() < 0.12 and role != "producer"
    options = Options(
        role=role,
        policy=rnd.choice(["fcfs", "fcfs", "priority"]),
        is_async=is_async,
        v2=rnd.random() < 0.4,
        reports=rnd.random() < 0.85,
        depth=rnd.choice([2, 2, 3]) if is_async else rnd.choice([1, 1, 2]),
        ranks=rnd.choice([1, 1, 2]),
        batched_tokens=rnd.choice([64, 128, 256]),
        blocks=rnd.choice([24, 40, 80, 200]),
        cache_rows=72 * rnd.choice([1, 2, 3, 6, 16]),
        lookahead=rnd.choice([0, 0, 0, 1]),
        defer_timeout_s=rnd.choice([0.0, 0.2, 2.0, 2.0]),
        encode_row_s=rnd.choice([None, None, 1e-5, 1e-3, 1e-1]),
        manager=rnd.choice(["fifo", "lru", "tiered"]),
        replay_tokens=rnd.choice([16, 32, 40, 128]) if replays else 0,
    )
    return options, Habits(
        pictures=rnd.choice([2, 5, 12, 30]),
        requests=rnd.choice([5, 15, 15, 40, 40, 100]),
        two_sizes=rnd.choice([0.0, 0.0, 0.1, 0.3]),
        two_kinds=rnd.choice([0.0, 0.0, 0.0, 0.3]),
        bare=rnd.choice([0.0, 0.0, 0.0, 0.1, 0.3, 0.8]),
        modalities=rnd.choice([("image",), ("image", "video", "audio", "both")]),
        adapters=rnd.choice([0, 0, 2]),
        stored=rnd.choice([0.0, 0.5, 0.9, 1.0]),
        announced=rnd.choice([0.9, 0.9, 0.9, 0.2]),
        faults=rnd.choice([0.0, 0.1, 0.5]),
        outages=rnd.choice([0.0, 0.0, 0.01]),
        jumps=rnd.choice([0.0, 0.02, 0.02]),
        weights=rnd.choice([0.0, 0.0, 0.0, 0.01]),
        named=rnd.choice([0.0, 0.3, 0.9]),
        framed=rnd.choice([0.0, 0.0, 0.0, 0.5]),
        emptied=rnd.choice([0.0, 0.0, 0.0, 0.02]),
    )


class Run:
    """One seed's life, from the first request to rest.

    Attributes:
        engine: vLLM's part.
        s3ec: The connector.
    """

    def __init__(
        self,
        seed: int,
        model: Path,
        bench: Bench,
        needs_embedding: Callable[[Any], bool],
    ) -> None:
        """Draw everything.

        Args:
            seed: Of all that is random.
            model: Folder of the model's configuration.
            bench: What all runs share.
            needs_embedding: s3ec's own answer whether a feature came without pixels.
        """
        options, habits = draw(seed)
        self.options, self.habits = options, habits
        self._rnd = random.Random(f"{seed} life")
        self.s3ec = S3EC(options, needs_embedding, bench)
        self.engine = Engine(model, options, self.s3ec, self.s3ec.ranks)
        self.s3ec.follow(self.engine)
        self.s3ec.is_calm = not (
            habits.faults or habits.outages or habits.jumps or habits.two_sizes or habits.two_kinds
        )
        self._loras = [
            LoRARequest(name, number, f"/adapters/{number}")
            for number, name in enumerate(_ADAPTERS[: habits.adapters], start=1)
        ]
        self._pictures = [self._picture(number) for number in range(habits.pictures)]
        self._prompts: list[Asked] = []
        self._sent = 0

    def _picture(self, number: int) -> Picture:
        rnd = self._rnd
        modality = rnd.choice(self.habits.modalities)
        # A client's own uuid, or vLLM's hash.
        name = f"uuid-{number}" if rnd.random() < 0.3 else identifier_of(number)
        return Picture(name, modality, rnd.choice([16, 32, 48, 64]))

    # -- requests ----------------------------------------------------------------------------

    def _features_of(
        self, picture: Picture, offset: int, lora: LoRARequest | None
    ) -> list[MultiModalFeatureSpec]:
        """The picture's places in a prompt; a video with its sound has two, one in the other."""
        rnd = self._rnd
        rows = picture.rows
        if rnd.random() < self.habits.two_sizes:
            rows += 8
        if picture.modality == "both":
            # vLLM, use_audio_in_video: two features over the same tokens, which share them out.
            return [
                self._feature(
                    dataclasses.replace(picture, name=f"{picture.name}{tail}", modality=modality),
                    PlaceholderRange(offset, rows, _mask(rows, start, 2)),
                    lora,
                )
                for tail, modality, start in (("", "video", 0), ("s", "audio", 1))
            ]
        mask, length = None, rows
        if rnd.random() < 0.2:  # as models do that part rows by a token of their own
            length = rows + rows // 8
            mask = _mask(length, 0, 1).clone()
            mask[8::9] = False
        if self.habits.framed and rnd.random() < self.habits.framed:
            before, behind = rnd.choice([0, 1, 12]), rnd.choice([1, 12, 30])
            mask = torch.ones(length, dtype=torch.bool) if mask is None else mask
            mask = torch.nn.functional.pad(mask, (before, behind))
            length += before + behind
        return [self._feature(picture, PlaceholderRange(offset, length, mask), lora)]

    def _feature(
        self, picture: Picture, place: PlaceholderRange, lora: LoRARequest | None
    ) -> MultiModalFeatureSpec:
        kinds = {"image": "video", "video": "image"}
        if self.habits.two_kinds and self._rnd.random() < self.habits.two_kinds:
            other = kinds.get(picture.modality, picture.modality)
            picture = dataclasses.replace(picture, modality=other)
        form = "pixels"
        if picture.modality != "audio" and self._rnd.random() < self.habits.bare:
            form = self._rnd.choice(_BARE_FORMS)
        return MultiModalFeatureSpec(
            data=ITEMS[picture.modality, form],
            modality=picture.modality,
            identifier=picture.identifier(lora),
            mm_position=place,
            mm_hash=picture.name,
        )

    def _ask(self) -> Asked:
        rnd = self._rnd
        name = f"r{self._sent}"
        more = {"max_tokens": rnd.choice([1, 2, 8]), "priority": rnd.randrange(3)}
        if self._prompts and rnd.random() < 0.2:  # the same once more
            return dataclasses.replace(rnd.choice(self._prompts), name=name, **more)
        tokens: list[int] = []
        features: list[MultiModalFeatureSpec] = []
        lora = rnd.choice([None, *self._loras])
        if self._prompts and rnd.random() < 0.3:  # a conversation that goes on
            earlier = rnd.choice(self._prompts)
            tokens, features, lora = list(earlier.tokens), list(earlier.features), earlier.lora
        else:
            tokens = self._text(rnd.choice([0, 1, 20]))
        # A prompt and its answer must fit into the KV cache, as vLLM sees to for real engines.
        most = (self.options.blocks - 3) * BLOCK - 8
        for _ in range(rnd.choice([0, 1, 1, 2, 3, 4])):
            more_features = self._features_of(rnd.choice(self._pictures), len(tokens), lora)
            length = more_features[0].mm_position.length + rnd.choice([0, 1, 5, 40])
            if len(tokens) + length + 30 > most:
                break
            features += more_features
            tokens += self._text(length)
        if len(tokens) + 30 <= most:
            tokens += self._text(rnd.choice([1, 3, 30]))
        tokens = tokens or self._text(1)
        often = self.habits.named
        named = [one.identifier for one in features if often and rnd.random() < often]
        return Asked(name, tokens, features, lora=lora, named=named, **more)

    def _text(self, length: int) -> list[int]:
        return self._rnd.choices(range(5, 200), k=length)

    # -- life --------------------------------------------------------------------------------

    def live(self) -> None:
        """Run to the end.

        Raises:
            BrokenPromiseError: A real engine would have ended, answered wrongly, or leaked.
        """
        self._stock()
        rounds = 0
        while self._sent < self.habits.requests or self.engine.alive or self.engine.steps:
            rounds += 1
            if rounds > _MOST_ROUNDS:
                raise BrokenPromiseError("requests do not end", ", ".join(self.engine.alive))
            self._clients()
            self._world()
            self._turn()
        self._rest()

    def _stock(self) -> None:
        for picture in self._pictures:
            for lora in (None, *self._loras):
                if self._rnd.random() < self.habits.stored:
                    self._appear(picture, lora)

    def _appear(self, picture: Picture, lora: LoRARequest | None) -> None:
        """Another engine has stored it; this one's index may hold it."""
        rnd, outside = self._rnd, self.s3ec.outside
        place = PlaceholderRange(0, picture.rows)
        both = picture.modality == "both"
        for tail, start in (("", 0), ("s", 1)) if both else (("", 0),):
            half = dataclasses.replace(picture, name=f"{picture.name}{tail}")
            if both:
                place = PlaceholderRange(0, picture.rows, _mask(picture.rows, start, 2))
            modality = picture.modality if not both else "audio" if tail else "video"
            identifier = half.identifier(lora)
            stored = Stored(place.get_num_embeds(), FIRST_WEIGHTS, modality)
            outside.upload(identifier, stored)
            key = key_of(identifier)
            if rnd.random() < self.habits.announced:
                outside.index.add(key)
            if rnd.random() < 0.3:
                outside.publish(identifier, outside.bucket[identifier])
                if rnd.random() < 0.9:
                    outside.local.add(key)

    def _clients(self) -> None:
        rnd, engine = self._rnd, self.engine
        while self._sent < self.habits.requests and rnd.random() < 0.4:
            asked = self._ask()
            self._sent += 1
            self._prompts.append(asked)
            engine.add(asked)
        if engine.alive and rnd.random() < 0.03:
            engine.abort(rnd.choice(list(engine.alive)))
        if rnd.random() < _RESETS:
            engine.reset_prefix_cache(preempt=rnd.random() < 0.3)
        if self.habits.emptied and rnd.random() < self.habits.emptied:
            engine.reset_encoder_cache()
        if rnd.random() < self.habits.weights:
            self._change_weights()

    def _change_weights(self) -> None:
        self.engine.change_weights(call_first=self._rnd.random() < 0.5)
        self.s3ec.outside.weights = self.engine.weights

    def _world(self) -> None:
        rnd, habits, s3ec = self._rnd, self.habits, self.s3ec
        outside = s3ec.outside
        for identifier in sorted(s3ec.prefetcher.open):
            if rnd.random() < 0.4:
                fault = rnd.choice(_FAULTS) if rnd.random() < habits.faults else None
                s3ec.prefetcher.end(identifier, fault)
        if rnd.random() < 0.05:
            self._appear(rnd.choice(self._pictures), rnd.choice([None, *self._loras]))
        if outside.tier and rnd.random() < 0.02:
            outside.evict(rnd.choice(sorted(outside.tier)))
        if rnd.random() < habits.outages:
            outside.store.is_open = not outside.store.is_open
        if rnd.random() < habits.outages:
            outside.disk.hangs = not outside.disk.hangs
        if s3ec.saves is not None:
            self._uploads(s3ec.saves)
        s3ec.clock.now_s += _STEP_S
        if rnd.random() < habits.jumps:
            s3ec.clock.now_s += rnd.choice([0.5, 3, 12, 40])

    def _uploads(self, saves: PlayedSaves) -> None:
        rnd = self._rnd
        saves.full = rnd.random() < 0.1
        for identifier in sorted(saves.pending):
            if rnd.random() < 0.3:
                saves.publish(identifier)
            if rnd.random() < 0.3 and not self.s3ec.outside.store.is_open:
                saves.end(identifier, stored=rnd.random() < 0.8)

    def _turn(self) -> None:
        """What the engine core does next."""
        rnd, engine = self._rnd, self.engine
        if engine.can_schedule:
            engine.schedule()
            self.s3ec.audit()  # it sweeps as it schedules
        full = len(engine.steps) >= engine.options.depth
        idle = not engine.can_schedule
        if engine.can_execute and (full or idle or rnd.random() < 0.5):
            names = engine.alive
            engine.execute(eos=[name for name in names if rnd.random() < 0.05])
        if engine.can_deliver and (full or idle or rnd.random() < 0.5):
            engine.deliver()

    def _rest(self) -> None:
        """After all requests, all fetches and every lease nothing is kept.

        Requests with text only come in between: nothing else moves an engine.
        """
        self.s3ec.outside.store.is_open = self.s3ec.outside.disk.hangs = False
        for number in range(6):
            self.s3ec.clock.now_s += 40
            for identifier in sorted(self.s3ec.prefetcher.open):
                self.s3ec.prefetcher.end(identifier)
            self.engine.add(Asked(f"rest{number}", [5, 6, 7], [], max_tokens=1))
            while self.engine.alive or self.engine.steps:
                self._turn()
        self.engine.check_rest()
        self.s3ec.check_rest()

    def close(self) -> None:
        """End threads and remove files."""
        self.s3ec.close()
