"""The end of an answer whose model calls the same again and again. Pure."""

from collections.abc import Iterable

from router.text.parsers.deltas import CallArguments, CallStart, Delta


class RepeatGuard:
    """Ends an answer at a call that repeats an earlier one of it word for word.

    Small models that were not trained to end their turn after a call write the same call until their tokens
    are spent. A call is held back while it may still become such a repetition, and sent once it differs.
    """

    def __init__(self) -> None:
        self._done: list[tuple[str, str]] = []
        """Names and arguments of the calls that were sent."""
        self._name = self._arguments = ""
        self._held: list[Delta] = []
        self.is_repeated = False
        """True once a call came again as a whole. Further text is not wanted."""

    def kept(self, deltas: Iterable[Delta]) -> list[Delta]:
        """Return the deltas that may be sent."""
        found: list[Delta] = []
        for delta in deltas:
            if self.is_repeated:
                break
            found += self._next(delta)
        return found

    def finish(self) -> list[Delta]:
        """Return what was held back when the text ended."""
        return self._taken()

    def _next(self, delta: Delta) -> list[Delta]:
        match delta:
            case CallStart(_, name):
                released = self._taken()
                if self._name:
                    self._done.append((self._name, self._arguments))
                self._name, self._arguments = name, ""
                return [*released, *self._held_or_sent(delta)]
            case CallArguments(_, text):
                self._arguments += text
                if (self._name, self._arguments) in self._done:
                    self.is_repeated = True
                    self._held.clear()
                    return []
                return self._held_or_sent(delta)
            case _:
                return [*self._taken(), delta]

    def _held_or_sent(self, delta: Delta) -> list[Delta]:
        self._held.append(delta)
        is_suspect = any(
            name == self._name and arguments.startswith(self._arguments) for name, arguments in self._done
        )
        return [] if is_suspect else self._taken()

    def _taken(self) -> list[Delta]:
        taken, self._held = self._held, []
        return taken
