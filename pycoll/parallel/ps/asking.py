"""How a worker asks all servers at once, and what it does when one has died."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pycoll.errors import PeerDiedError
from pycoll.parallel.ps.messages import Link, Message, raise_failure

Answers = dict[int, Message]


class Servers:
    """The links of a worker to all servers.

    Attributes:
        dead: The servers that have died, as bits.
    """

    def __init__(self, links: Mapping[int, Link]) -> None:
        self.links = dict(links)
        self.dead = 0

    @property
    def living(self) -> list[int]:
        """Numbers of the servers that have not died."""
        return [server for server in self.links if not self.dead >> server & 1]

    def ask(self, questions: Mapping[int, Message]) -> Answers | None:
        """Asks servers at the same time; None: one of them has died, and some may have answered.

        Raises:
            Error: A server answered that it failed.
        """
        sent = []
        for server, question in questions.items():
            question.dead = self.dead
            try:
                self.links[server].send(question)
                sent.append(server)
            except PeerDiedError:
                self.dead |= 1 << server
        answers = {}
        for server in sent:  # all of them, so that a link has no answer of an earlier question
            try:
                answers[server] = self.links[server].receive()
            except PeerDiedError:
                self.dead |= 1 << server
        for answer in answers.values():
            raise_failure(answer)
        return answers if len(answers) == len(questions) else None

    def ask_until_all_live(self, make: Callable[[], Mapping[int, Message]]) -> Answers:
        """Asks what `make` returns, and again whenever a server has died meanwhile.

        Raises:
            PeerDiedError: Keys have no living holder.
        """
        while True:
            answers = self.ask(make())
            if answers is not None:
                return answers

    def all(self, question: Callable[[], Message]) -> Answers:
        """Asks all living servers one question.

        Raises:
            PeerDiedError: No server lives.
        """

        def questions() -> dict[int, Message]:
            if not self.living:
                raise PeerDiedError("parameter server: all servers have ended", min(self.links))
            return {server: question() for server in self.living}

        return self.ask_until_all_live(questions)

    def close(self) -> None:
        """Ends all links."""
        for link in self.links.values():
            link.close()


__all__ = ["Answers", "Servers"]
