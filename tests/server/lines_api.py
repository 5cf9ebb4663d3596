"""A third API, which no client speaks: plain lines in, plain lines out.

Its body is `MODEL: QUESTION`; each event is one line of its answer. It shows that an API is a file that makes a task
and one renderer, and that neither asks for a line elsewhere.
"""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from weft.engine.wire.params import SamplingParams
from weft.server.errors import ApiError
from weft.server.formats.parser import Tool
from weft.server.generate.events import Event, Reasoning, Report, Text, WholeChoice
from weft.server.generate.pipeline import respond
from weft.server.http.context import Context
from weft.server.task.request_options import Service
from weft.server.task.task import Chat, OutputWishes, Task
from weft.server.task.tool_use import ToolUse
from weft.server.text.chat_template import TemplateOptions

router = APIRouter()


class LinesRenderer:
    """Writes `KIND TEXT` for each event."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def stream(self, index: int, events: Sequence[Event]) -> bytes:
        return b"".join(line(type(event).__name__, event[0]) for event in events)

    def stream_end(self) -> bytes:
        return self._tokens() + line("Bye", "!")

    def stream_error(self, error: ApiError) -> bytes:
        return line("Sorry", error.status)

    def whole(self, choices: Sequence[WholeChoice]) -> bytes:
        (choice,) = choices
        events: list[Event] = [Reasoning(choice.reasoning), Text(choice.text), *choice.calls, choice.end]
        return self.stream(0, events) + self._tokens()

    def _tokens(self) -> bytes:
        return line("Tokens", self._report.counts().output_tokens)


def line(kind: str, text: object) -> bytes:
    return f"{kind} {text!r}\n".encode()


@router.post("/lines/{way}")
async def answer_in_lines(way: str, request: Request, context: Context) -> Response:
    name, question = (await request.body()).decode().split(": ")
    weather = Tool("weather", {"type": "object", "properties": {}})
    task = Task(
        size=len(question),
        model=await context.check_model(request, name),
        name=name,
        input=Chat([{"role": "user", "content": question}], TemplateOptions()),
        sampling=SamplingParams(seed=1),
        wishes=OutputWishes(ToolUse(shown=[], tools=[weather], is_required=False, allows_many=True)),
        service=Service("default", 0),
        is_stream=way == "streamed",
    )
    return await respond(task, request, context, LinesRenderer)
