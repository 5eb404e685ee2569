"""`pc.elastic(build, train)`: a training that loses ranks and takes new ones, and goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pycoll import environment
from pycoll.communicator import Communicator
from pycoll.elastic.resize import Door, grow
from pycoll.errors import AbortedError, Error, PeerDiedError, SystemError, TimeoutError, UsageError
from pycoll.parallel.core.devices import agreed_device
from pycoll.parallel.core.mesh import Mesh, replace_world, world
from pycoll.parallel.core.mesh_sizes import parse_sizes
from pycoll.parallel.recovery.doors import addresses_in, agreed_address, joined, opened
from pycoll.parallel.recovery.job import Build, Job, NewRanks
from pycoll.parallel.recovery.laps import Laps
from pycoll.parallel.recovery.sizes import sizes_for
from pycoll.parallel.recovery.snapshots import Snapshots
from pycoll.parallel.recovery.survivors import GOES_ON, LOST, Regrouped, survivors


def elastic(
    build: Build,
    train: Callable[[Job], Any],
    *,
    mesh: Mapping[str, int] | None = None,
    copies: int = 1,
    least: int = 1,
    most: int | None = None,
    virtual_replicas: int = 0,
    address: str | None = None,
    join: bool = False,
    comm: Communicator | None = None,
    device: Any = None,
    timeout_s: float = 60.0,
) -> Any:
    """Trains on the ranks that are there, whatever ranks end or come. Collective.

    When ranks end, the others agree on who is left, make a mesh of their number, call `build`
    again, give its objects the state of the last commit, and call `train` again. The step that was
    running is repeated, and the one before it if a rank had not yet all its copies; a pipeline's
    step is finished by other replicas, if there are some. New ranks come in between two steps.

    Args:
        build: Called with a mesh; returns a dict with "model", from `pc.parallelize`, "optimizer",
            from `pc.optimizer`, and other objects with `state_dict` and `load_state_dict`: a
            `pc.loader`, a scheduler, a `pc.EMA`, a `pc.GradScaler`.
        train: Called with a `Job`: a loop that goes on from the state of its objects and calls
            `job.commit()` after each step. It may be called several times.
        mesh: Sizes of the axes tp, pp, ep and cp; dp takes the other ranks. Where they do not
            divide the ranks that are left, sizes shrink to divisors. PYCOLL_MESH replaces it.
        copies: Number of ranks, or of hosts, that may end at once.
        least: Fewer ranks do not go on.
        most: New ranks wait while there are so many.
        virtual_replicas: Number of parts of each batch, whose gradients are added up in one order:
            in float64, the weights then have the bits of an undisturbed run. 0: as many parts as
            replicas, and bits that depend on their number. See `pc.mesh`.
        address: "host:port" at which new ranks join, of rank 0's host. On several hosts, one for
            each host that may have rank 0, separated by commas: rank 0 listens at the first that
            is its own. PYCOLL_ELASTIC replaces None. Without one, no ranks can come.
        join: This process is a new rank, which joins at `address`. PYCOLL_JOIN=1 says the same.
        comm: The ranks; None: those of `pycoll.init()`. After the training, `pc.mesh` then has the
            ranks that are left.
        device: As for `pc.mesh`.
        timeout_s: Seconds for which a new rank knocks, and in which it must be taken in.

    Returns:
        What `train` returned.

    Raises:
        UsageError: An argument is invalid, or an object has no state.
        PeerDiedError: This rank is in a minority that must not go on (`Communicator.shrink`), or
            fewer than `least` ranks are left.
        Error: More ranks ended at once than there are copies.

    Cost: of a commit, see `Job.commit`. After a death: `shrink`, `build`, and each piece of the
        state sent to all ranks.

    Source: Wang et al. 2023, "Gemini", SOSP (state in the memory of other ranks).
    """
    if min(copies, least, virtual_replicas + 1) < 1 or (most is not None and most < least):
        raise UsageError(
            f"elastic: copies={copies}, least={least}, most={most}, virtual_replicas="
            f"{virtual_replicas}: expected 1 or more, most at least as large as least, and "
            "virtual_replicas 0 or more"
        )
    addresses = addresses_in(address or environment.read("PYCOLL_ELASTIC"))
    base = comm
    if join or environment.read("PYCOLL_JOIN") == "1":
        base = joined(addresses, timeout_s)
    base = base or world()
    if base.size < least:
        raise UsageError(f"elastic: there are {base.size} ranks, and least={least}")
    if text := environment.read("PYCOLL_MESH"):
        mesh = parse_sizes(text)
    snapshots = Snapshots()
    laps, news = Laps(), ""
    while True:
        door = _opened(addresses, news) if addresses and base.rank == 0 else None
        on, job = None, None
        try:
            sizes = sizes_for(base.size, mesh or {})
            on = Mesh(base, sizes, agreed_device(device, base), virtual_replicas)
            laps.end("mesh")
            job = Job(base, on, build, snapshots, laps, copies=copies, door=door, most=most)
            job.begin(laps)
            if news and base.rank == 0:
                _say(f"{news}; on after {laps.total_s():.3f} s: {_of(job)}")
            result = train(job)
            job.finish()
            if comm is None:
                replace_world(base)
            return result
        except NewRanks as new:
            laps, news = Laps(), f"{new.number} new ranks"
            _leave(on, job)
            base = _grown(base, new.number, addresses, timeout_s, door, least)
            laps.end("grow")
        except Regrouped as change:
            laps, news = change.laps, change.news
            _leave(on, job)
            if change.final is not None:
                raise change.final from None
            base = _enough(change.left, base.size, least, news)
        except LOST as error:
            laps, news = Laps(), str(error).split(";")[0]
            _leave(on, job)
            needs_death = job is None or not job.has_taken_over
            base = _survivors(job.base if job else base, error, least, needs_death=needs_death)
            laps.end("shrink")
        finally:
            if door is not None:
                with suppress(Error):
                    door.close()


def _opened(addresses: Sequence[str], news: str) -> Door | None:
    """The door for new ranks; None: it cannot be opened any more."""
    try:
        return opened(addresses, is_first=not news)
    except SystemError as error:
        if not news:
            raise
        _say(f"no new ranks can come, because {error}")
        return None


def _leave(on: Mesh | None, job: Job | None) -> None:
    """Ends all communicators but the base, so that no rank waits in one of them."""
    if job is not None:
        job.close()
    if on is not None:
        on.abort(GOES_ON)


def _survivors(base: Communicator, error: Error, least: int, *, needs_death: bool) -> Communicator:
    """The ranks that are left, of which this one was not in the passes of a step."""
    left, _ = survivors(base, error, None, needs_death=needs_death)
    return _enough(left, base.size, least, str(error))


def _enough(left: Communicator, before: int, least: int, news: str) -> Communicator:
    if left.size < least:
        raise PeerDiedError(
            f"elastic: {left.size} of {before} ranks are left, and least={least}: {news}"
        )
    return left


def _grown(
    base: Communicator,
    number: int,
    addresses: Sequence[str],
    timeout_s: float,
    door: Door | None,
    least: int,
) -> Communicator:
    try:
        address = agreed_address(base, addresses, door)
        return grow(base, number, address, timeout_s, door)
    except TimeoutError:
        return base  # they have gone again
    except (PeerDiedError, AbortedError) as error:
        return _survivors(base, error, least, needs_death=False)


def _of(job: Job) -> str:
    several = {axis: size for axis, size in job.mesh.sizes.items() if size > 1} or {"dp": 1}
    sizes = ",".join(f"{axis}={size}" for axis, size in several.items())
    return f"{job.mesh.world.size} ranks, {sizes}, commit {job.commits}"


def _say(text: str) -> None:
    print(f"pycoll elastic (process {os.getpid()}): {text}", file=sys.stderr, flush=True)


__all__ = ["elastic"]
