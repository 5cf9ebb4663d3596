from pathlib import Path

import pytest

from weft.server.text.chat_template import ChatTemplateError, ChatTemplates
from weft.server.text.template_files import TemplateFileError, read_chat_templates


def test_templates_are_found_where_either_version_of_transformers_puts_them(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert read_chat_templates(tmp_path, {}) == {}
    assert read_chat_templates(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    assert read_chat_templates(tmp_path, {"chat_template": listed}) == {"default": "a", "tool_use": "b"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert read_chat_templates(tmp_path, {"chat_template": "a"}) == {"default": "file", "tool_use": "tools"}


def test_a_processor_brings_the_template_if_the_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"chat_template": "p", "image_seq_length": 256}')
    assert read_chat_templates(tmp_path, {}) == {"default": "p"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert read_chat_templates(tmp_path, {}) == {"default": "j"}
    assert read_chat_templates(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(TemplateFileError, match=r"/chat_template.json is not valid JSON: "):
        read_chat_templates(tmp_path, {})
    with pytest.raises(TemplateFileError, match="every template of a list must have a name and a template"):
        read_chat_templates(tmp_path, {"chat_template": [{"name": "default"}]})


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("chat_template.jinja", b"{% for m in messages %}{{ m.content }", "the chat template is invalid at line 1"),
        ("chat_template.jinja", b"{{ messages | nosuch }}", "the chat template is invalid at line 1: No filter"),
        ("chat_template.jinja", b"{% nosuch %}", "the chat template is invalid at line 1"),
        ("chat_template.jinja", b"{{ " + b"(" * 9999 + b" }}", "the chat template is invalid"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not text in UTF-8"),
        ("chat_template.json", b"{", "chat_template.json is not valid JSON"),
        ("processor_config.json", b'{"chat_template": [{"name": "a"}]}', "every template of a list must have a name"),
    ],
)
def test_a_broken_template_stops_only_those_who_chat(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    """It kept the whole server from starting, and the template of a GGUF file cannot be edited."""
    (tmp_path / name).write_bytes(content)
    templates = ChatTemplates.load(tmp_path, {})
    assert templates.own(has_tools=True) is None
    for has_tools in (False, True):
        with pytest.raises(ChatTemplateError, match=fault) as told:
            templates.select(has_tools)
        assert "name another template with --chat-template" in str(told.value)


def test_one_broken_template_of_several_leaves_the_others(tmp_path: Path) -> None:
    templates = ChatTemplates({"default": "d", "tool_use": "{% if %}"})
    assert len(templates.faults) == 1
    assert templates.select(has_tools=False).source == "d"


def test_a_file_takes_the_place_of_all_templates(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    (other := tmp_path / "other.jinja").write_text("o")
    templates = ChatTemplates.load(tmp_path, {"chat_template": [{"name": "tool_use", "template": "t"}]}, other)
    assert [templates.select(has_tools).source for has_tools in (False, True)] == ["o", "o"]
    missing = ChatTemplates.load(tmp_path, {"chat_template": "d"}, tmp_path / "none.jinja")
    with pytest.raises(ChatTemplateError, match=r"none\.jinja cannot be read: No such file"):
        missing.select(has_tools=False)
