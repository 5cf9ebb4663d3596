"""A compiler that takes as long as a test wants."""

from concurrent.futures import Future

from weft.engine.guidance.matcher import GrammarMatcher


class AnyText:
    """A matcher that allows everything."""

    is_stopped = False

    def copy(self) -> "AnyText":
        return AnyText()

    def accept(self, token_id: int) -> None:
        return None

    def forced_token_ids(self, most: int) -> list[int]:
        return []


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[GrammarMatcher]] = {}

    def compile(self, text: str) -> Future[GrammarMatcher]:
        return self.futures.setdefault(text, Future())

    def finish(self, text: str) -> None:
        self.futures[text].set_result(AnyText())  # type: ignore[arg-type]
