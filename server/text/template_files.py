"""Finds the chat templates of a checkpoint in its files."""

import json
from collections.abc import Mapping
from pathlib import Path

from weft.server.text.chat_template import DEFAULT_NAME, ChatTemplateError

_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")
_CONFIG_FILES = ("chat_template.json", "processor_config.json")  # of multimodal checkpoints


def read_chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Read name -> source, from files if there are any, else from tokenizer_config.json, else the processor's files.

    Args:
        config: The tokenizer_config.json, whose `chat_template` is a source or a list of {name, template}.

    Returns:
        The sources; none if the checkpoint has no template.

    Raises:
        ChatTemplateError: A file of the processor is not JSON, or a template has no name or no source.
    """
    files = [(DEFAULT_NAME, folder / _TEMPLATE_FILE)] if (folder / _TEMPLATE_FILE).is_file() else []
    files += [(file.stem, file) for name in _TEMPLATE_FOLDERS for file in sorted((folder / name).glob("*.jinja"))]
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files}
    declared = config.get("chat_template")
    for file in (folder / name for name in _CONFIG_FILES):
        if declared is None and file.is_file():
            declared = _declared_in(file)
    if isinstance(declared, str):
        return {DEFAULT_NAME: declared}
    if isinstance(declared, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in declared}
        except (KeyError, TypeError):
            raise ChatTemplateError("chat_template: every template of a list must have a name and a template") from None
    return dict(declared) if isinstance(declared, dict) else {}


def _declared_in(file: Path) -> object:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatTemplateError(f"{file.name} is not valid JSON: {error}") from error
    return content.get("chat_template") if isinstance(content, dict) else None
