import json
import pathlib

import pytest

from tests.server.cli.scripted_server import Script
from weft.server.cli.chat import HELP, CommandError, Conversation, run_command
from weft.server.cli.chat_client import ChatClient


@pytest.fixture
def conversation(script: Script) -> Conversation:
    talk = Conversation(ChatClient(script.url, None), "a")
    talk.messages += [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Höre *ich*."}]
    return talk


def test_system_is_set_shown_and_removed(conversation: Conversation) -> None:
    assert run_command(conversation, "/system") == "no system prompt"
    assert run_command(conversation, "/system  Be brief.\nAnd kind. ") == "system prompt set"
    assert run_command(conversation, "/system") == "Be brief.\nAnd kind."
    assert conversation.body()["messages"] == [
        {"role": "system", "content": "Be brief.\nAnd kind."},
        *conversation.messages,
    ]
    assert run_command(conversation, "/system -") == "system prompt removed"
    assert conversation.all_messages() == conversation.messages


def test_models_are_listed_and_chosen(conversation: Conversation) -> None:
    assert run_command(conversation, "/model") == "* a\n  b"
    assert run_command(conversation, "/model b") == "b answers from here on"
    assert conversation.body()["model"] == "b"
    with pytest.raises(CommandError, match=r"^no such model: c \(the server has a, b\)$"):
        run_command(conversation, "/model c")
    assert conversation.model == "b"


def test_a_server_that_lists_nothing_is_believed_to_have_the_model(script: Script) -> None:
    talk = Conversation(ChatClient(f"{script.url}/elsewhere", None), "a")
    assert run_command(talk, "/model c") == "c answers from here on"
    with pytest.raises(CommandError, match="404: not here"):
        run_command(talk, "/model")


def test_clear_forgets_all_but_the_system_prompt(conversation: Conversation) -> None:
    conversation.system = "Be brief."
    assert run_command(conversation, "/clear") == "conversation forgotten, the system prompt stays"
    assert conversation.all_messages() == [{"role": "system", "content": "Be brief."}]


def test_save_writes_json_or_markdown(conversation: Conversation, tmp_path: pathlib.Path) -> None:
    conversation.system = "Be brief."
    assert run_command(conversation, f"/save {tmp_path}/a b.json") == f"3 messages saved to {tmp_path}/a b.json"
    assert json.loads((tmp_path / "a b.json").read_text()) == conversation.all_messages()
    run_command(conversation, f"/save {tmp_path}/chat.md")
    assert (tmp_path / "chat.md").read_text() == (
        "## system\n\nBe brief.\n\n## user\n\nHi\n\n## assistant\n\nHöre *ich*.\n"
    )


def test_save_overwrites_only_what_it_wrote(conversation: Conversation, tmp_path: pathlib.Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.write_text("dear")
    with pytest.raises(CommandError, match=f"^cannot write {theirs}: file exists$"):
        run_command(conversation, f"/save {theirs}")
    assert theirs.read_text() == "dear"
    run_command(conversation, f"/save {ours}")
    conversation.messages.pop()
    run_command(conversation, f"/save {ours}")
    assert len(json.loads(ours.read_text())) == 1
    with pytest.raises(CommandError, match="no such file or directory"):
        run_command(conversation, f"/save {tmp_path}/no/where")
    with pytest.raises(CommandError, match="needs a file"):
        run_command(conversation, "/save")


def test_help_names_every_command_and_an_unknown_one_is_an_error(conversation: Conversation) -> None:
    assert run_command(conversation, "/help") == HELP
    for name in ("/system", "/model", "/clear", "/save", "/quit"):
        assert f"\n{name} " in f"\n{HELP}"
    with pytest.raises(CommandError, match=r"^no such command: /etc/hosts \(/help lists them"):
        run_command(conversation, "/etc/hosts is what?")
    with pytest.raises(EOFError):
        run_command(conversation, "/quit")
