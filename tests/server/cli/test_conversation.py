import json
import pathlib

import pytest

from tests.server.cli.scripted_server import Script
from weft.server.cli.chat_client import ChatClient
from weft.server.cli.conversation import HELP, AskAgain, CommandError, Conversation, run_command


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
    for name in ("/system", "/model", "/set", "/retry", "/clear", "/save", "/quit"):
        assert f"\n{name} " in f"\n{HELP}"
    with pytest.raises(CommandError, match=r"^no such command: /etc/hosts \(/help lists them"):
        run_command(conversation, "/etc/hosts is what?")
    for name in ("/quit", "/bye"):
        with pytest.raises(EOFError):
            run_command(conversation, name)


def test_fields_of_requests_are_set_shown_and_left_to_the_server(conversation: Conversation) -> None:
    assert run_command(conversation, "/set") == "nothing is set: the server decides"
    for line in (
        "/set temperature 0.7",
        "/set  reasoning_effort low",
        '/set stop ["a b", "ö"]',
        "/set system Be brief.",
    ):
        assert "set" in run_command(conversation, line)
    assert conversation.body() == {
        "model": "a", "messages": conversation.all_messages(),
        "temperature": 0.7, "reasoning_effort": "low", "stop": ["a b", "ö"],
    }  # fmt: skip
    assert conversation.system == "Be brief."
    assert run_command(conversation, "/set") == 'temperature 0.7\nreasoning_effort "low"\nstop ["a b", "ö"]'
    assert run_command(conversation, "/set stop -") == "the server decides on stop"
    assert run_command(conversation, "/set seed -") == "the server decides on seed"
    assert "stop" not in conversation.body()
    for line, fault in {"/set temperature": "needs a value", "/set stream false": "weft chat itself sends"}.items():
        with pytest.raises(CommandError, match=fault):
            run_command(conversation, line)
    with pytest.raises(CommandError, match="no such model: c"):
        run_command(conversation, "/set model c")


def test_the_last_message_is_asked_again(conversation: Conversation) -> None:
    with pytest.raises(CommandError, match="nothing has been asked"):
        run_command(conversation, "/retry")
    before = list(conversation.messages)
    conversation.asked, conversation.num_before = "Why?", 2
    for later in (
        [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}],
        [],
    ):  # [] if it failed
        conversation.messages = [*before, *later]
        with pytest.raises(AskAgain, match=r"^Why\?$"):
            run_command(conversation, "/retry")
        assert conversation.messages == before
    run_command(conversation, "/clear")
    with pytest.raises(AskAgain):
        run_command(conversation, "/retry")
