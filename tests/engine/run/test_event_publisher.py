import pathlib
import sys
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from weft.engine.cache.events import BlockRemoved
from weft.engine.run import event_publisher
from weft.engine.run.event_publisher import EventPublisher
from weft.engine.shared.errors import ModelError


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


def test_an_address_in_use_and_a_missing_package_are_named(
    publisher: EventPublisher, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"^kv_events: cannot listen on tcp://192\.0\.2\.1:5557: .* address"):
        EventPublisher("tcp://192.0.2.1:5557", "")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ModelError, match=r"^kv_events needs a package more: pip install 'weft\[events\]'$"):
        EventPublisher(address, "")
