"""Generates the whole answer to a task that is one part of a response, such as one question of several."""

from starlette.requests import Request

from weft.server.generate.events import Report, WholeChoice
from weft.server.generate.output_plan import naming_the_grammar
from weft.server.generate.pipeline import new_answer
from weft.server.http.context import ServerContext
from weft.server.task.task import Task


async def complete(task: Task, request: Request, context: ServerContext) -> tuple[list[WholeChoice], Report]:
    """Generate the whole answer to a task that is one part of a response.

    Raises:
        ApiError: As `respond`.
    """
    _, answer = await new_answer(task, request, context)
    with naming_the_grammar(task.wishes):
        await answer.open(task.model.engine_client)
    try:
        return await answer.whole(task.num_choices), answer
    finally:
        answer.close()
