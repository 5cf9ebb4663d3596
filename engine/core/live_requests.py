"""All requests that are not finished, by key, and the choices of each, so that an abort finds its own at once."""

from weft.engine.core.request import Request, RequestKey


class LiveRequests(dict[RequestKey, Request]):
    """Requests by key. Written by the scheduler alone, item by item."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self._choices: dict[tuple[int, int], dict[RequestKey, Request]] = {}

    def __setitem__(self, key: RequestKey, request: Request) -> None:
        """Take a request in."""
        super().__setitem__(key, request)
        self._choices.setdefault(key[:2], {})[key] = request

    def __delitem__(self, key: RequestKey) -> None:
        """Let a request go."""
        super().__delitem__(key)
        choices = self._choices[key[:2]]
        del choices[key]
        if not choices:
            del self._choices[key[:2]]

    def choices_of(self, connection: int, request_id: int) -> list[Request]:
        """The choices of one request that are not finished; empty for one that has ended or never was."""
        return list(self._choices.get((connection, request_id), {}).values())
