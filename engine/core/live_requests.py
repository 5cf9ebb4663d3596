"""Holds all unfinished requests by key, and the choices of each, so that an abort finds them at once."""

from weft.engine.request import Request, RequestKey


class LiveRequests(dict[RequestKey, Request]):
    """Requests by key. Only the scheduler adds and removes, item by item."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self._choices: dict[tuple[int, int], dict[RequestKey, Request]] = {}

    def __setitem__(self, key: RequestKey, request: Request) -> None:
        """Add a request."""
        super().__setitem__(key, request)
        self._choices.setdefault(key[:2], {})[key] = request

    def __delitem__(self, key: RequestKey) -> None:
        """Remove a request."""
        super().__delitem__(key)
        choices = self._choices[key[:2]]
        del choices[key]
        if not choices:
            del self._choices[key[:2]]

    def has(self, connection: int, request_id: int) -> bool:
        """Whether any choice of a request is unfinished."""
        return (connection, request_id) in self._choices

    def choices_of(self, connection: int, request_id: int) -> list[Request]:
        """The unfinished choices of one request; empty if it has ended or never existed."""
        return list(self._choices.get((connection, request_id), {}).values())
