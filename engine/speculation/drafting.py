"""What speculation keeps for one request, and what a source of guesses is. Lives and ends with the request."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from weft.engine.speculation.lookup import Lookup
from weft.engine.speculation.pace import Pace

if TYPE_CHECKING:
    from weft.engine.core.request import Request


class Drafter(Protocol):
    """Guesses the next tokens of a request, to be verified in its next step."""

    def propose(self, request: "Request") -> list[int]:
        """Token ids that may follow request.token_ids; empty for no guess."""


@dataclass(slots=True)
class Drafting:
    """State of one choice; every choice starts anew.

    Attributes:
        drafter: Who made the drafts that are verified now; None before the first.
        pace: Learns from their verification; None for a drafter that knows.
        lookups: Where each drafter that reads a text is in it.
    """

    drafter: object | None = None
    pace: Pace | None = None
    lookups: dict[Drafter, Lookup] = field(default_factory=dict)
