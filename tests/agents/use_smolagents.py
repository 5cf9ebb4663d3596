"""An agent of smolagents at work: `use_smolagents.py KIND URL MODEL TASK`, in the folder that it works in.

KIND is `tools` for calls, or `code` for an agent that writes Python.
"""

import pathlib
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def write_file(name: str, text: str) -> str:
    """Write a file.

    Args:
        name: Its name.
        text: What it is to hold.
    """
    pathlib.Path(name).write_text(text)
    return f"{name} is written"


@tool
def read_file(name: str) -> str:
    """Read a file.

    Args:
        name: Its name.
    """
    return pathlib.Path(name).read_text()


def main(kind: str, url: str, name: str, task: str) -> None:
    model = OpenAIModel(model_id=name, api_base=f"{url}/v1", api_key="none")
    make = ToolCallingAgent if kind == "tools" else CodeAgent
    agent = make(tools=[write_file, read_file], model=model, stream_outputs=True)
    print("answer:", agent.run(task, max_steps=6))


if __name__ == "__main__":
    main(*sys.argv[1:])
