import importlib
import pathlib
import sys
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from weft.engine.cache import event_publisher
from weft.engine.cache.event_publisher import EventPublisher, EventReplay
from weft.engine.cache.events import BlockRemoved
from weft.engine.wire.errors import ModelError


@pytest.fixture
def address(tmp_path: pathlib.Path) -> str:
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def publisher(address: str) -> Iterator[EventPublisher]:
    publisher = EventPublisher(address, "kv@a@b")
    yield publisher
    publisher.close()


@pytest.fixture
def subscriber() -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.set(zmq.LINGER, 0)
        subscriber.subscribe("kv@")
        yield subscriber


def flush(publisher: EventPublisher) -> None:
    """Publish what is kept, once the subscriber is known."""
    while publisher._messages:
        publisher._socket.poll(100)
        publisher.publish([])


def receive(subscriber: "zmq.Socket[bytes]") -> tuple[int, object]:
    topic, number, data = subscriber.recv_multipart()
    assert topic == b"kv@a@b"
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(data)[1]


def test_what_was_published_before_somebody_listens_is_heard(
    publisher: EventPublisher, subscriber: "zmq.Socket[bytes]", address: str
) -> None:
    publisher.publish([BlockRemoved([1, 1 << 63])])
    publisher.publish([])
    subscriber.connect(address)
    flush(publisher)
    publisher.publish([BlockRemoved([2])])
    assert [receive(subscriber) for _ in range(3)] == [
        (0, [["AllBlocksCleared"]]),
        (1, [["BlockRemoved", [1, 1 << 63], "GPU"]]),
        (2, [["BlockRemoved", [2], "GPU"]]),
    ]


def test_of_what_nobody_hears_the_newest_is_kept_and_numbers_show_the_gap(
    publisher: EventPublisher, subscriber: "zmq.Socket[bytes]", address: str
) -> None:
    for number in range(5000):
        publisher.publish([BlockRemoved([number])])
    assert len(publisher._messages) == event_publisher._MAX_NUM_MESSAGES
    subscriber.connect(address)
    flush(publisher)
    assert receive(subscriber) == (905, [["BlockRemoved", [904], "GPU"]])


def test_messages_are_kept_again_once_the_last_subscriber_has_left(
    publisher: EventPublisher, subscriber: "zmq.Socket[bytes]", address: str
) -> None:
    subscriber.connect(address)
    flush(publisher)
    subscriber.close()
    publisher._socket.poll()
    publisher.publish([BlockRemoved([1])])
    assert len(publisher._messages) == 1


@pytest.fixture
def replay_context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.term()  # at which the thread of a replay ends


def test_what_may_be_sent_again_is_bounded_in_bytes(
    replay_context: "zmq.Context[zmq.Socket[bytes]]", address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "_MAX_BYTES", 100)
    replay = EventReplay(replay_context, address, 10)
    for number in range(5):
        replay.add(number.to_bytes(8, "big"), bytes(40))
    assert [number[-1] for number, _ in replay._messages] == [3, 4] and replay._num_bytes == 80


def test_a_slow_client_of_the_replay_is_given_up(
    replay_context: "zmq.Context[zmq.Socket[bytes]]", address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nothing of an answer that is longer than the queues; the next one is answered all the same."""
    monkeypatch.setattr(event_publisher, "_PATIENCE_MS", 10)
    replay = EventReplay(replay_context, address, 5000)
    for number in range(5000):
        replay.add(number.to_bytes(8, "big"), bytes(10_000))
    with zmq.Context() as context, context.socket(zmq.DEALER) as slow, context.socket(zmq.DEALER) as client:
        for asking in (slow, client):
            asking.set(zmq.LINGER, 0)
            asking.set(zmq.RCVHWM, 10)
            asking.connect(address)
        slow.send_multipart((b"", bytes(8)))
        slow.poll()
        client.send_multipart((b"", (4999).to_bytes(8, "big")))
        assert [client.recv_multipart()[1][-1] for _ in range(2)] == [4999 % 256, 255]


def test_a_replay_that_takes_too_long_ends(
    replay_context: "zmq.Context[zmq.Socket[bytes]]", address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = EventReplay(replay_context, address, 10)
    replay.add(bytes(8), b"first")
    monkeypatch.setattr(event_publisher, "_ANSWER_S", -1.0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set(zmq.LINGER, 0)
        client.connect(address)
        client.send_multipart((b"", bytes(8)))
        assert not client.poll(100)
        monkeypatch.setattr(event_publisher, "_ANSWER_S", 30.0)
        client.send_multipart((b"", bytes(8)))
        assert client.recv_multipart()[-1] == b"first"


def test_an_address_in_use_and_a_missing_package_are_named(
    publisher: EventPublisher, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"^kv_events: cannot listen on tcp://192\.0\.2\.1:5557: .* address"):
        EventPublisher("tcp://192.0.2.1:5557", "")
    with pytest.raises(ModelError, match=r"^kv_events_replay: cannot listen on tcp://192\.0\.2\.1:5558: .* address"):
        EventPublisher(address, "", "tcp://192.0.2.1:5558")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ModelError, match=r"^kv_events needs a package more: pip install 'weft\[events\]'$"):
        importlib.reload(event_publisher)
