"""Gives tools to chat templates that know them by another name than `tools`.

SmolLM 3 takes `xml_tools`: those that are called in JSON between tags. Firefunction takes `functions`, a text, and
`datetime`. A template that names `tools` gets nothing else, and what the caller sets stands.
"""

import json
from collections.abc import Mapping, Set
from datetime import datetime

TEXT_NAMES = ("functions",)
LIST_NAMES = ("xml_tools",)


def with_tools(variables: Mapping[str, object], wanted: Set[str]) -> dict[str, object]:
    """Return the variables, with the tools under the name that the template wants.

    Args:
        variables: Tools are a list under `tools`, if there are any.
        wanted: Names that the template uses and does not define.
    """
    tools = variables.get("tools")
    if not isinstance(tools, list) or not tools or "tools" in wanted:
        return dict(variables)
    added: dict[str, object] = {name: tools for name in LIST_NAMES if name in wanted}
    functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    added |= {name: json.dumps(functions, ensure_ascii=False, indent=4) for name in TEXT_NAMES if name in wanted}
    if added and "datetime" in wanted:
        added["datetime"] = datetime.now().strftime("%Y-%m-%d")
    return {**added, **variables}
