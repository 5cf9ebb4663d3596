"""Score the demo model's skills through the HTTP API of a running server, at temperature 0.

    python -m demo_model.score --url http://127.0.0.1:8000 --number 100

Owns the asking and the table. The questions and the marks come from `generate.py`: phrasings and values that training
never uses. It refuses nothing quietly: a request that fails ends the run with the server's own words.
"""

import asyncio
import json
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from demo_model.generate import EXAMINED_SKILLS, MAX_ANSWER_TOKENS, Question, exam
from demo_model.skill import Json, Reply


def body_of(model: str, question: Question) -> dict[str, Any]:
    """Return what a client sends to have `question` answered, with its tools, its schema and its thinking."""
    exchange = question.exchange
    body: dict[str, Any] = {
        "model": model,
        "messages": question.messages,
        "temperature": 0,
        "max_tokens": MAX_ANSWER_TOKENS,
        "chat_template_kwargs": {"enable_thinking": exchange.thinks},
    }
    if exchange.tools:
        body["tools"] = exchange.tools
    if exchange.schema is not None:
        schema = {"name": "answer", "schema": exchange.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


async def ask(client: httpx.AsyncClient, model: str, question: Question) -> Reply:
    """Return the server's answer to `question`.

    Raises:
        httpx.HTTPStatusError: the server did not answer 200; its body is in a note.
    """
    response = await client.post("/v1/chat/completions", json=body_of(model, question))
    try:
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        error.add_note(response.text)
        raise
    message = response.json()["choices"][0]["message"]
    calls = [
        (call["function"]["name"], _parsed(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    ]
    return Reply(message["content"] or "", message.get("reasoning_content") or "", tuple(calls))


def _parsed(arguments: str) -> Json:
    try:
        return json.loads(arguments)
    except ValueError:
        return {"cut off": arguments}


async def ask_all(client: httpx.AsyncClient, model: str, questions: list[Question]) -> list[Reply]:
    """Return the answers to `questions`, in their order; the client's connection limit bounds how many run at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(client, model, question)) for question in questions]
    return [task.result() for task in tasks]


async def examine(client: httpx.AsyncClient, skill: str, number: int, seed: int = 0) -> list[tuple[Question, Reply]]:
    """Ask `number` questions of a skill; return those that were answered wrong."""
    model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    questions = exam(skill, number, seed)
    replies = await ask_all(client, model, questions)
    return [pair for pair in zip(questions, replies, strict=True) if not pair[0].is_right(pair[1])]


async def score(client: httpx.AsyncClient, number: int, seed: int, show_wrong: bool) -> Table:
    """Examine every skill with `number` chats and return the table; `show_wrong` prints each wrong answer."""
    console = Console()
    table = Table("skill", "right", "of", title=f"temperature 0, held-out phrasings and values, seed {seed}")
    for skill in track(EXAMINED_SKILLS, description="examining", console=console, transient=True):
        wrong = await examine(client, skill, number, seed)
        table.add_row(skill, str(number - len(wrong)), str(number))
        for question, reply in wrong if show_wrong else ():
            asked, expected = question.messages[-1]["content"], question.exchange.answer
            console.print(f"{skill}: {asked!r} -> {reply}, not {expected}", markup=False)
    return table


def main(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    number: Annotated[int, typer.Option(min=1, help="Chats per skill.")] = 100,
    seed: Annotated[int, typer.Option(help="Another seed asks other questions.")] = 0,
    parallel: Annotated[int, typer.Option(min=1, help="Most chats at once.")] = 8,
    show_wrong: Annotated[bool, typer.Option(help="Print every wrong answer.")] = False,
) -> None:
    """Score the demo model that is served at `url`."""

    async def run() -> Table:
        limits = httpx.Limits(max_connections=parallel)
        timeout = httpx.Timeout(60.0, pool=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:
            return await score(client, number, seed, show_wrong)

    Console().print(asyncio.run(run()))


if __name__ == "__main__":
    typer.run(main)
