"""Reads the chat templates of a checkpoint, or of a file that takes their place.

Knows where checkpoints keep them. Compiles nothing (see `chat_template`).
"""

import json
from collections.abc import Mapping
from pathlib import Path

DEFAULT_NAME = "default"
"""The name in `transformers` of the template for all chats."""


MAX_FILE_BYTES = 64 << 20
"""Of a file with a template, which may hold other things, too."""


class TemplateFileError(Exception):
    """A file cannot be read; the message names it."""


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
        TemplateFileError: A file cannot be read or is not JSON, or a template has no name or no source.
    """
    files = [(DEFAULT_NAME, folder / _TEMPLATE_FILE)] if (folder / _TEMPLATE_FILE).is_file() else []
    files += [(file.stem, file) for name in _TEMPLATE_FOLDERS for file in sorted((folder / name).glob("*.jinja"))]
    if files:
        return {name: read_text(file) for name, file in files}
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
            raise TemplateFileError("chat_template: every template of a list must have a name and a template") from None
    return dict(declared) if isinstance(declared, dict) else {}


def _declared_in(file: Path) -> object:
    return read_object(file).get("chat_template")


def read_object(file: Path) -> dict[str, object]:
    """The JSON object in a file; empty if there is no such file.

    Raises:
        TemplateFileError: It cannot be read, or holds something else.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise TemplateFileError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TemplateFileError(f"{file} must hold a JSON object")
    return content


def read_text(file: Path) -> str:
    """The text of a file.

    Raises:
        TemplateFileError: There is none, or it is not in UTF-8.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise TemplateFileError(f"{file} must have at most {MAX_FILE_BYTES} bytes, has {file.stat().st_size}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise TemplateFileError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TemplateFileError(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}") from error
