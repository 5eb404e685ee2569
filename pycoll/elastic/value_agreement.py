"""Agreement of the surviving ranks on a number: see `Communicator.agree`.

The coordinator proposes its decision to the ports of all live ranks before it tells any rank. So
once a rank has returned from `agree`, all live ranks have the decision, and a coordinator that
follows a dead one decides the same. A rank that has returned answers ranks that ask later.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pycoll import environment
from pycoll.arguments import seconds, shown, whole_number
from pycoll.elastic.agreement import Agreement, Outcome
from pycoll.elastic.messages import BROKEN, checked_text, int64
from pycoll.elastic.owner_port import OwnerPort, owner_port_of
from pycoll.elastic.retries import ATTEMPT_S, waits_between_attempts_s
from pycoll.errors import TimeoutError, UsageError

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

_RULES: dict[str, Callable[[int, int], int]] = {"and": operator.and_, "min": min, "max": max}
_INT64 = (-(1 << 63), (1 << 63) - 1)
_KEPT = 16  # decisions that a rank remembers for late ranks


def agree(comm: Communicator, value: int, op: str, timeout_s: float | None) -> int:
    """Agrees on a number with the surviving ranks of `comm`: see `Communicator.agree`."""
    number: int = value if isinstance(value, bool) else whole_number(value, "value", *_INT64)
    if not isinstance(op, str) or op not in _RULES:
        names = ", ".join(map(repr, _RULES))
        raise UsageError(f"op is {shown(op)}, expected {names}")
    timeout_s = comm.timeout_s if timeout_s is None else seconds(timeout_s)
    if comm.size == 1 and not comm.closed:
        return number
    port = owner_port_of(comm, "agree")
    port.num_agreements += 1
    silence_s = float(environment.read("PYCOLL_SILENCE_S") or 5)
    agreement = ValueAgreement(port, port.num_agreements, number, op, timeout_s, silence_s)
    return agreement.result(port.server.run(agreement.run()))


class ValueAgreement(Agreement):
    """One rank's part in an agreement on a number.

    Args:
        port: This rank's port.
        number: Number of the call; calls with equal numbers meet.
        value: This rank's value.
        op: Key of `_RULES`.
        timeout_s: Seconds in which live ranks must connect.
        silence_s: Seconds after which a rank that does not answer is lost; 0: `timeout_s`.
    """

    name = "agree"

    def __init__(
        self,
        port: OwnerPort,
        number: int,
        value: int,
        op: str,
        timeout_s: float,
        silence_s: float,
    ) -> None:
        super().__init__(port, f"agree {number}", (op, value), timeout_s, silence_s)
        self._forgotten = f"agree {number - _KEPT}"

    async def run(self) -> Outcome:
        for known in (self._server.accepted, self._server.decided):
            known.pop(self._forgotten, None)
        outcome = self._server.decided[self._topic] = await super().run()
        await self.tell(outcome)  # to ranks that follow this one: the coordinator may have died
        return outcome

    def result(self, outcome: Outcome) -> int:
        """The agreed value.

        Raises:
            TimeoutError: Live ranks did not call in time, or never.
            UsageError: The ranks' ops differ.
        """
        if "late" in outcome:
            raise TimeoutError(outcome["late"])
        if "mismatch" in outcome:
            raise UsageError(outcome["mismatch"])
        return outcome["value"]  # type: ignore[no-any-return]

    def decide(self, members: dict[int, Any]) -> Outcome:
        (first, (op, agreed)), *others = members.items()
        for rank, (other_op, value) in others:
            if other_op != op:
                text = (
                    f"agree: rank {first} called it with op {op!r}, rank {rank} with {other_op!r}"
                )
                return {"mismatch": text}
            agreed = _RULES[op](agreed, value)
        return {"value": agreed}

    def read(self, message: Mapping[str, Any]) -> Outcome:
        if "value" in message:
            return {"value": int64(message["value"])}
        kind = "late" if "late" in message else "mismatch"
        return {kind: checked_text(message[kind])}

    def decide_without(self, missing: list[int]) -> Outcome | None:
        return {"late": self.late_text(missing)}

    async def settle(self, outcome: Outcome) -> Outcome:
        while True:
            self._server.accepted[self._topic] = outcome
            ranks = [rank for rank in self.higher if rank not in self._ended | self._lost]
            answers = await asyncio.gather(*(self._propose(rank, outcome) for rank in ranks))
            decided = [each for each in answers if each is not None and each != outcome]
            if not decided:
                break
            outcome = decided[0]  # of a coordinator that lost contact with this rank
        if "late" not in outcome:
            alive = set(ranks) - self._ended - self._lost
            await self.check_majority({self._port.rank} | alive)
        self._server.decided[self._topic] = outcome
        return outcome

    async def _propose(self, peer: int, outcome: Outcome) -> Outcome | None:
        """Proposes the outcome to a rank until it has it, has ended or is lost.

        Returns:
            The decision that the rank already knows, else None.
        """
        end = asyncio.get_running_loop().time() + self._silence_s
        waits_s = waits_between_attempts_s()
        while asyncio.get_running_loop().time() < end:
            if (link := await self.connect(peer)) is not None:
                try:
                    answer = await asyncio.wait_for(self.greet(peer, *link, outcome), ATTEMPT_S)
                    decided = answer["decided"]
                    return None if decided is None else self.read(decided)
                except (*BROKEN, asyncio.TimeoutError):
                    pass  # it has ended, or is busy
                finally:
                    link[1].close()
            elif peer in self._ended:
                return None
            await asyncio.sleep(next(waits_s))
        self._lost.add(peer)
        return None
