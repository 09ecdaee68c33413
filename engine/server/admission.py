"""The queue limit: sequences in the server at one time, running and waiting."""

from __future__ import annotations

from headrace.engine.server.errors import RATE_LIMIT, ApiError


class Ticket:
    """Places of one request; each is given back when its sequence ends, the rest by close()."""

    def __init__(self, admission: Admission, places: int) -> None:
        self._admission = admission
        self._places = places

    def release(self) -> None:
        if self._places:
            self._places -= 1
            self._admission.used -= 1

    def close(self) -> None:
        self._admission.used -= self._places
        self._places = 0


class Admission:
    """Counts sequences from the door to their end. `limit` 0 = none."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def admit(self, sequences: int) -> Ticket:
        """Raises ApiError 429 with Retry-After when the sequences do not all fit now."""
        if self.limit and self.used + sequences > self.limit:
            raise ApiError(
                429,
                f"The server holds {self.used} of at most {self.limit} sequences and this request asks for "
                f"{sequences} more; try again later.",
                type=RATE_LIMIT,
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.used += sequences
        return Ticket(self, sequences)
