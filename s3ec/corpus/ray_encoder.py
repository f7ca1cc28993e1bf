# SPDX-License-Identifier: Apache-2.0
"""Encoders on a Ray cluster: one vLLM a worker, and the items of a dead worker go to the others.

``RayEncoder`` stands where a job has its encoder. The job, its report and the catalogue stay with
the driver. Workers read, name and encode items; what travels is where an item lies, not its bytes.

These are plain actors and not Ray Data's ``map_batches``. That was tried with Ray 2.60:

* The batches of a killed actor wait for that very actor to start again, which with vLLM takes
  minutes. Here they go to the others at once, and the new one joins when it is ready.
* Each execution of a data set starts actors of its own, and wants its items beforehand. A job makes
  its items as it goes, by what the bucket has confirmed, and starts its engines once.
* It knows a batch as done when the function has returned. Here an item is done when the bucket has
  confirmed it: a worker that dies takes embeddings with it that only its disk has, and only these
  and those that it was at are encoded once more.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from s3ec.corpus.encoder import ConfirmedCheck, Encoded, Encoder, EncoderError, Picture
from s3ec.corpus.ray_workers import Worker
from s3ec.corpus.reading import require
from s3ec.errors import ConfigError, S3ECError, SourceError

if TYPE_CHECKING:
    from s3ec.corpus.sources import SourceItem
    from s3ec.identity import Namespace

log = logging.getLogger(__name__)

# Calls of a worker that may be under way: one waits for results, the others read and name.
_CALLS = 64
_READS = 16
_LOOK_S = 0.2
_PRUNE_S = 1.0
# A writer announces within 2 s what the bucket confirmed, and the driver asks each second.
_GRACE_S = 10.0
# So long the bucket may confirm nothing when all is encoded; the job then says what is missing.
_PATIENCE_S = 60.0
# So long a worker may take to be placed: a cluster has to start a machine for it.
_PLACED_S = 1800.0
_CLOSE_S = 90.0
# An item of a worker that has ended is tried alone. If that happens so often, it is the item.
_DEATHS = 3
_STARTS = 3
_REMEMBERED_READERS = 8192
# The first whose own cluster on a machine asks for a token; older ones ask for nothing.
_FIRST_RAY = (2, 59)


class _GoneError(Exception):
    """A worker is no more."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Which cluster, and what a worker takes of it.

    Attributes:
        address: Of the cluster, such as ``auto`` or ``ray://HOST:10001``; None for what
            ``RAY_ADDRESS`` says, else for a Ray of its own on this machine that ends with the job.
        workers: How many there are at least and at most. More than the least are started while all
            are busy.
        gpus: Of each worker.
        cpus: Of each worker.
        given: Items that a worker has at a time; twice what its engine has keeps that busy.

    Raises:
        ConfigError: A number is out of its range.
    """

    address: str | None = None
    workers: tuple[int, int] = (1, 1)
    gpus: float = 1.0
    cpus: float = 1.0
    given: int = 128

    def __post_init__(self) -> None:
        least, most = self.workers
        if not 1 <= least <= most:
            raise ConfigError(
                f"`ray_workers` {least}-{most}: at least 1, and no more at least than at most",
                field="ray_workers",
            )
        for name in ("gpus", "cpus"):
            if not 0 <= getattr(self, name) <= 1024:
                raise ConfigError(f"`ray_{name}` is from 0 to 1024", field=f"ray_{name}")
        if self.given < 1:
            raise ConfigError("`given` is 1 or more", field="given")


def _import_ray(*, stays_here: bool) -> Any:
    """Ray; told to tell nobody, where it is for this machine only.

    Raises:
        ConfigError: It is not installed, or too old.
    """
    if stays_here:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray would have the engines give way to every other process of the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
    ray = require("ray", "'ray[data]'", "`--engine ray`")
    release = tuple(int(digits) for digits in re.findall(r"\d+", ray.__version__)[:2])
    if release < _FIRST_RAY:
        wanted = ".".join(map(str, _FIRST_RAY))
        raise ConfigError(
            f"Ray {ray.__version__} lets everybody run code who reaches its ports; install Ray "
            f"{wanted} or newer, which asks for a token: pip install -U 'ray[data]'",
            field="engine",
        )
    return ray


def start_ray(cpus: int) -> None:
    """Start a Ray of our own on this machine, on loopback; ``ray.shutdown`` ends it.

    Its files are where ``RAY_TMPDIR`` says. Sockets lie below that, so the path must be short.

    Args:
        cpus: That its workers share.

    Raises:
        ConfigError: It is not installed, or too old.
        RuntimeError: It would listen where others reach it.
    """
    ray = _import_ray(stays_here=True)
    # A node's address that is given as 127.0.0.1 is replaced by the one that others reach. The
    # variable has it use loopback, on any system (Ray 2.60, ray_constants.py). It counts for the
    # processes that Ray starts; here it was read when Ray was imported, which vLLM does.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise RuntimeError(
            f"it would listen on {address} and not on loopback; start one yourself, and name it "
            "with `--ray-address`"
        )
    ray.init(
        "local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )


@dataclass(slots=True)
class _Member:
    """One worker, as the driver sees it.

    =========  =========  ======================================================================
    state      goes to    when
    =========  =========  ======================================================================
    starting   ready      it has said where it saves; until then it gets nothing
    ready      gone       it does not answer any more, or its engine has ended
    starting   gone       likewise
    =========  =========  ======================================================================

    Attributes:
        actor: Ray's handle.
        starting: What ``Worker.start`` will answer; None from then on.
        where: For people.
        taking: What ``Worker.take`` will answer.
        given: Items that it has, by number.
        unconfirmed: Items that it has encoded, and the bucket has not confirmed.
        reads: Calls for the threads that read.
    """

    actor: Any
    starting: Any
    since_s: float
    where: str = ""
    taking: Any = None
    given: dict[int, Picture] = field(default_factory=dict)
    unconfirmed: dict[int, tuple[Picture, str]] = field(default_factory=dict)
    reads: int = 0


@dataclass(frozen=True, slots=True)
class _Orphan:
    """An item of a dead worker.

    Attributes:
        picture: The item.
        identifier: Its embedding's.
        until_s: If a look at the index that began later does not know it, it is lost.
        is_told: Whether the worker had said that it is encoded.
    """

    picture: Picture
    identifier: str
    until_s: float
    is_told: bool


class RayEncoder:
    """An Encoder whose work is done by actors. See the module, and ``encoder.Encoder``.

    ``read`` and ``identify`` are for several threads, which wait for a worker's answer. ``encode``
    has the rest.
    """

    def __init__(self, make_encoder: Callable[[], Encoder], options: RayOptions) -> None:
        """Nothing is started yet.

        Args:
            make_encoder: Called by each worker; can be pickled.

        Raises:
            ConfigError: Ray is not installed.
        """
        self._address = options.address or os.environ.get("RAY_ADDRESS")
        self._ray = _import_ray(stays_here=self._address is None)
        self._make_encoder = make_encoder
        self._options = options
        self.readers = min(options.workers[1] * _READS, 256)
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._members: list[_Member] = []
        # Who has read an item, and has its bytes.
        self._readers: LRUCache[int, _Member] = LRUCache(_REMEMBERED_READERS)
        self._namespace: Namespace | None = None
        self._again: deque[Picture] = deque()  # that dead workers were at
        self._deaths: dict[int, int] = {}
        self._results: list[Encoded] = []  # that no worker will say
        self._names: LRUCache[int, str] = LRUCache(_REMEMBERED_READERS)  # what workers called items
        self._lost: deque[Picture] = deque()  # encoded by dead workers, and not confirmed
        # Of dead workers, what they may have announced: until when to wait for the bucket's word.
        self._orphans: dict[int, _Orphan] = {}
        self._known: set[int] = set()  # told to the job, and encoded once more
        self._failures = 0  # of workers, since one has encoded something
        self._start_failures = 0
        self._is_confirmed: ConfirmedCheck = lambda identifier, since_s: True
        self._pruned_s = 0.0
        self._own_cluster = False
        self._is_running = False

    @property
    def is_running(self) -> bool:
        """See Encoder."""
        return self._is_running

    def confirmed_by(self, check: ConfirmedCheck) -> None:
        """See Encoder."""
        self._is_confirmed = check

    def stop(self) -> None:
        """See Encoder."""
        self._stopped.set()

    # -- workers -------------------------------------------------------------------------------

    def namespace(self) -> Namespace:
        """See Encoder. Starts the least number of workers, and waits for one."""
        if self._namespace is None:
            self._connect()
            self._start_missing()
            self._ready_member()
        if self._namespace is None:
            raise EncoderError("the job was stopped before a worker was ready")
        return self._namespace

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        options = self._options
        try:
            if self._address is not None:
                self._ray.init(self._address, log_to_driver=False, configure_logging=False)
                return
            cpus = len(os.sched_getaffinity(0))
            if options.gpus == 0:  # however few there are: so many workers were asked for
                cpus = max(cpus, math.ceil(options.workers[1] * options.cpus))
            start_ray(cpus)
            self._own_cluster = True
        except (ConnectionError, OSError, RuntimeError, ValueError) as exc:
            raise EncoderError(f"Ray cannot be reached or started: {exc}") from exc

    def _start_one(self) -> None:
        options = self._options
        remote = self._ray.remote(
            num_gpus=options.gpus,
            num_cpus=options.cpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_CALLS,
        )(Worker)
        actor = remote.remote(self._make_encoder)
        self._members.append(_Member(actor, actor.start.remote(), time.monotonic()))

    def _start_missing(self) -> None:
        """Have as many as there are to be at least."""
        with self._lock:
            while len(self._members) < self._options.workers[0] and not self._stopped.is_set():
                self._start_one()

    def _grow(self) -> None:
        """All are busy: have one more, where that is allowed and none is being started."""
        with self._lock:
            is_starting = any(member.starting is not None for member in self._members)
            if not is_starting and len(self._members) < self._options.workers[1]:
                self._start_one()

    def _ready(self) -> list[_Member]:
        """Those that can be given something.

        Raises:
            ConfigError: The model or an argument cannot work, by a worker's word.
            EncoderError: No worker starts.
        """
        with self._lock:
            for member in list(self._members):
                if member.starting is None:
                    continue
                done, _ = self._ray.wait([member.starting], timeout=0)
                if done:
                    self._greet(member)
                elif time.monotonic() - member.since_s > _PLACED_S and not self._has_ready():
                    raise EncoderError(
                        f"no worker was placed in {_PLACED_S:.0f} s: the cluster has no room for "
                        f"{self._options.gpus:g} GPUs and {self._options.cpus:g} CPUs; see `ray "
                        "status`"
                    )
            return [member for member in self._members if member.starting is None]

    def _has_ready(self) -> bool:
        return any(member.starting is None for member in self._members)

    def _greet(self, member: _Member) -> None:
        try:
            member.where, namespace = self._answer(member.starting)
        except (EncoderError, _GoneError) as exc:
            self._bury(member, str(exc))
            self._start_failures += 1
            if self._start_failures >= _STARTS:
                raise EncoderError(
                    f"{_STARTS} workers in a row did not start; the last: {exc}"
                ) from exc
            return
        member.starting = None
        self._start_failures = 0
        if self._namespace is None:
            self._namespace = namespace
        if namespace.name != self._namespace.name:
            raise EncoderError(
                f"the worker in {member.where} saves to another namespace ({namespace.name} and "
                f"not {self._namespace.name}); have one vLLM and one model on all nodes"
            )
        log.info("a worker is ready: %s", member.where)

    def _ready_member(self) -> _Member | None:
        """The one with the fewest calls of readers, waited for; None after ``stop``."""
        while not self._stopped.is_set():
            ready = self._ready()
            if ready:
                return min(ready, key=lambda member: member.reads)
            with self._lock:
                waiting = [member.starting for member in self._members]
            self._ray.wait(waiting, timeout=_LOOK_S)
        return None

    def _answer(self, reference: Any) -> Any:
        """What a worker's call came to.

        Raises:
            _GoneError: The worker is no more.
            S3ECError: What it raised.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as exc:
            if isinstance(exc.cause, S3ECError):
                raise exc.cause from None
            raise EncoderError(f"a worker failed: {exc.cause!r}") from exc
        except errors.RayError as exc:
            if isinstance(getattr(exc, "cause", None), ConfigError):
                raise exc.cause from None
            lines = str(exc).strip().splitlines()
            raise _GoneError(lines[0] if lines else type(exc).__name__) from exc

    def _bury(self, member: _Member, reason: str) -> None:
        """A worker is gone: its items are for others, and another one takes its place.

        Raises:
            EncoderError: So many in a row did nothing, that no more are tried.
        """
        with self._lock:
            if member not in self._members:
                return  # another thread was first
            self._members.remove(member)
            with suppress(Exception):
                self._ray.kill(member.actor)
            log.warning("a worker is gone (%s): %s", member.where or "while it started", reason)
            until_s = time.monotonic() + _GRACE_S
            for number, picture in member.given.items():
                name = picture.uuid or self._names.get(number)
                if name is None:
                    self._try_again(picture)
                else:  # it may have announced it before it could say so
                    self._orphans[number] = _Orphan(picture, name, until_s, is_told=False)
            for number, (picture, identifier) in member.unconfirmed.items():
                self._orphans[number] = _Orphan(picture, identifier, until_s, is_told=True)
            self._failures += 1
            if self._failures > _DEATHS * (1 + self._options.workers[1]):
                raise EncoderError(
                    f"{self._failures} workers in a row have ended; the last: {reason}"
                )
            self._start_missing()

    def _try_again(self, picture: Picture) -> None:
        number = picture.number
        self._deaths[number] = self._deaths.get(number, 0) + 1
        if self._deaths[number] < _DEATHS:
            self._again.append(picture)
        elif number not in self._known:
            problem = f"{_DEATHS} workers have ended while they had this item"
            self._results.append(Encoded(number, None, problem))

    # -- items ---------------------------------------------------------------------------------

    def read(self, number: int, item: SourceItem) -> Picture:
        """See Encoder; a worker reads it, and keeps the bytes."""
        member, picture = self._ask(lambda member: member.actor.read.remote(number, item))
        with self._lock:
            self._readers[number] = member
        found: Picture = picture
        return found

    def identify(self, picture: Picture) -> str | None:
        """See Encoder; the worker that has read it decodes it."""
        reader = self._readers.get(picture.number)
        _, name = self._ask(lambda member: member.actor.identify.remote(picture), reader)
        found: str | None = name
        if found is not None:
            with self._lock:
                self._names[picture.number] = found
        return found

    def _ask(self, call: Callable[[_Member], Any], first: _Member | None = None) -> tuple[Any, Any]:
        """Have a worker do something, and another one if it ends meanwhile."""
        for _ in range(_DEATHS):
            member = first if first in self._members else self._ready_member()
            first = None
            if member is None:
                break
            with self._lock:
                member.reads += 1
            try:
                return member, self._answer(call(member))
            except _GoneError as exc:
                self._bury(member, str(exc))
            finally:
                with self._lock:
                    member.reads -= 1
        if self._stopped.is_set():
            raise SourceError("the job was stopped before it was read")
        raise SourceError(f"{_DEATHS} workers ended while they read it")

    def encode(self, pictures: Iterable[Picture | None]) -> Iterator[Encoded]:
        """See Encoder."""
        left = iter(pictures)
        is_last = False
        moved_s = time.monotonic()
        while not self._stopped.is_set():
            ready = self._ready()
            found = [*self._collect(ready), *self._take_results()]
            yield from found
            if self._prune() or found:
                moved_s = time.monotonic()
            if self._give_alone(ready):
                continue
            member = self._with_room(ready)
            if member is not None and (self._lost or not is_last):
                try:
                    picture = self._lost.popleft() if self._lost else next(left)
                except StopIteration:
                    is_last = True
                    continue
                if picture is not None:
                    self._give(self._reader_of(picture, ready) or member, picture)
                    continue
            if ready and member is None and not is_last:
                self._grow()
            if is_last and not self._is_encoding():
                # What is not confirmed in the end, the job reports.
                late = time.monotonic() - moved_s > _PATIENCE_S
                if late or not self._is_unconfirmed():
                    return
            self._wait(ready)

    def _collect(self, ready: list[_Member]) -> Iterator[Encoded]:
        """What workers have encoded, but for what the job knows already."""
        for member in ready:
            # Also while it has nothing more to do: else nobody would hear of its end.
            if member.taking is None and (member.given or member.unconfirmed):
                member.taking = member.actor.take.remote()
        taking = {member.taking: member for member in ready if member.taking is not None}
        if not taking:
            return
        done, _ = self._ray.wait(list(taking), num_returns=len(taking), timeout=0)
        for reference in done:
            member = taking[reference]
            member.taking = None
            try:
                results = self._answer(reference)
            except (EncoderError, _GoneError) as exc:
                self._bury(member, str(exc))
                continue
            for encoded in results:
                yield from self._note(member, encoded)

    def _note(self, member: _Member, encoded: Encoded) -> Iterator[Encoded]:
        with self._lock:
            if member not in self._members:
                return  # a reader has found it gone meanwhile, and its items are seen to
            picture = member.given.pop(encoded.number, None)
            if picture is None:
                return
            self._failures = 0
            self._deaths.pop(encoded.number, None)
            self._names.pop(encoded.number, None)
            if encoded.identifier is not None:
                member.unconfirmed[encoded.number] = picture, encoded.identifier
        if encoded.number not in self._known:
            yield encoded

    def _take_results(self) -> list[Encoded]:
        with self._lock:
            results, self._results = self._results, []
        return results

    def _prune(self) -> int:
        """Hear what the bucket has confirmed. What it has not of dead workers is to be done again.

        Returns:
            How many were confirmed.
        """
        now_s = time.monotonic()
        if now_s - self._pruned_s < _PRUNE_S:
            return 0
        self._pruned_s = now_s
        count = 0
        with self._lock:
            for member in self._members:
                confirmed = [
                    number
                    for number, (_, identifier) in member.unconfirmed.items()
                    if self._is_confirmed(identifier, math.inf)
                ]
                for number in confirmed:
                    del member.unconfirmed[number]
                count += len(confirmed)
            for number, orphan in list(self._orphans.items()):
                told = self._is_confirmed(orphan.identifier, orphan.until_s)
                if told is None:
                    continue
                if told:
                    count += 1
                    if not orphan.is_told and number not in self._known:
                        self._results.append(Encoded(number, orphan.identifier))
                elif orphan.is_told:
                    self._known.add(number)
                    self._lost.append(orphan.picture)
                else:
                    self._try_again(orphan.picture)
                del self._orphans[number]
        return count

    def _give_alone(self, ready: list[_Member]) -> bool:
        """Give an item of a worker that has ended to one that has nothing else.

        If that one ends as well, it was this item.
        """
        careful = self._careful(ready)
        if careful is None or careful.given:
            return False
        with self._lock:
            picture = self._again.popleft()
        self._give(careful, picture)
        return True

    def _careful(self, ready: list[_Member]) -> _Member | None:
        """The worker that tries items of dead ones, and gets no others meanwhile."""
        alone = [member for member in ready if self._deaths.keys() & member.given.keys()]
        if alone:
            return alone[0]
        if not self._again or not ready:
            return None
        return min(ready, key=lambda member: len(member.given))

    def _with_room(self, ready: list[_Member]) -> _Member | None:
        careful = self._careful(ready)
        able = [
            member
            for member in ready
            if member is not careful and len(member.given) < self._options.given
        ]
        return min(able, key=lambda member: len(member.given), default=None)

    def _reader_of(self, picture: Picture, ready: list[_Member]) -> _Member | None:
        """The worker that has the item's bytes, if it has room."""
        with self._lock:
            reader = self._readers.pop(picture.number, None)
        if reader in ready and reader is not self._careful(ready):
            return reader if len(reader.given) < self._options.given else None
        return None

    def _give(self, member: _Member, picture: Picture) -> None:
        self._is_running = True
        with self._lock:
            if member not in self._members:  # it ended since it was chosen
                self._again.append(picture)
                return
            member.given[picture.number] = picture
        # Nobody waits for it: if it fails, so will the call for results.
        member.actor.give.remote([picture])

    def _is_encoding(self) -> bool:
        with self._lock:
            given = any(member.given for member in self._members)
            return given or bool(self._again or self._lost or self._results)

    def _is_unconfirmed(self) -> bool:
        with self._lock:
            return bool(self._orphans) or any(member.unconfirmed for member in self._members)

    def _wait(self, ready: list[_Member]) -> None:
        """Until a worker has something to say, or a moment."""
        with self._lock:
            starting = [member.starting for member in self._members if member.starting is not None]
        waiting = [member.taking for member in ready if member.taking is not None] + starting
        if waiting:
            self._ray.wait(waiting, timeout=_LOOK_S)
        else:
            self._stopped.wait(_LOOK_S)

    def close(self) -> None:
        """See Encoder. All workers finish their saves at once."""
        self._stopped.set()
        with self._lock:
            members, self._members = self._members, []
        if not self._ray.is_initialized():
            return
        closing = [member.actor.close.remote() for member in members if member.starting is None]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for member in members:
            with suppress(Exception):  # one that has ended already
                self._ray.kill(member.actor)
        if self._own_cluster:
            self._ray.shutdown()
            self._own_cluster = False
