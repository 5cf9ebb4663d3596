"""How an output about speech is divided by times. Imports neither torch nor the server."""

import msgspec

NO_END = 1 << 40
"""More ids than any vocabulary has."""


class TimestampRule(msgspec.Struct, array_like=True, frozen=True):
    """How an output about speech is divided by times (Radford et al., 2022, section 2.3, and the code beside it).

    Times stand in pairs: the end of a segment, then the beginning of the next. No time is before an earlier one, and
    none ends the segment that it begins. The output begins with a time. Where all times together are more probable
    than any other id, the next id is one.

    Attributes:
        first_id: That of time 0; every id from here on is a time.
        last_first_id: The latest that the output may begin with; None for any.
        end_id: Ends the output, behind a time or a pair of them, or behind text.
    """

    first_id: int
    last_first_id: int | None
    end_id: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Every id that it names."""
        return self.first_id, self.end_id, *(() if self.last_first_id is None else (self.last_first_id,))

    def bounds(self, token_ids: list[int]) -> tuple[int, int, int, int]:
        """Which ids may follow an output: text from the first number to the second, times from the third to the last.

        The second and the last are exclusive.
        """
        if not token_ids:
            last = NO_END if self.last_first_id is None else self.last_first_id + 1
            return self.first_id, self.first_id, self.first_id, last
        was_time, was_pair = token_ids[-1] >= self.first_id, len(token_ids) < 2 or token_ids[-2] >= self.first_id
        if was_time and was_pair:
            return 0, self.first_id, NO_END, NO_END
        last_time = next((i for i in reversed(token_ids) if i >= self.first_id), self.first_id - 1)
        return self.end_id if was_time else 0, self.first_id, last_time + (not was_time), NO_END
