"""A server that streams made-up completions: python fake_server.py PORT [--delay SECONDS] [--die] [--child].

A request with "until_at_once" gets its first token once so many have run at once.
It answers /ready after the delay, or dies after it; with --child it has a child of its own that ignores signals.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time

PORT = int(sys.argv[1])
DELAY_S = float(sys.argv[sys.argv.index("--delay") + 1]) if "--delay" in sys.argv else 0.0
IGNORE = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
)
START = time.monotonic()
MOST_AT_ONCE = [0, 0]  # now, ever


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def stream(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    number = int(str(body["max_tokens"]))
    MOST_AT_ONCE[0] += 1
    MOST_AT_ONCE[1] = max(MOST_AT_ONCE)
    while MOST_AT_ONCE[1] < int(str(body.get("until_at_once", 0))):
        await asyncio.sleep(0.005)
    for _ in range(number):
        event = {"choices": [{"text": 'a "usage":{} \n\ndata: [DONE]'}], "usage": None}
        writer.write(chunk(b"data: %s\n\n" % json.dumps(event).encode()))
        await writer.drain()
        await asyncio.sleep(0.005)
    usage = {"choices": [], "usage": {"completion_tokens": number}}
    writer.write(chunk(b"data: %s\n\n" % json.dumps(usage).encode()) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    MOST_AT_ONCE[0] -= 1


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, path, _ = head.split(" ", 2)
    if method == "POST":
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await stream(json.loads(await reader.readexactly(length)), writer)
    else:
        bodies = {
            "/v1/models": {"data": [{"id": "fake"}]},
            "/version": {"version": "1.2.3"},
            "/most_at_once": {"most": MOST_AT_ONCE[1]},
        }
        is_ready = time.monotonic() - START >= DELAY_S
        content = json.dumps(bodies.get(path, {})).encode()
        status = b"200 OK" if is_ready else b"503 Loading"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content))
    await writer.drain()
    writer.close()


async def main() -> None:
    if "--die" in sys.argv:
        time.sleep(DELAY_S)
        sys.exit("the weights are gone")
    if "--child" in sys.argv:
        child = subprocess.Popen([sys.executable, "-c", IGNORE])
        print("child", child.pid, flush=True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sys.exit, 0)
    server = await asyncio.start_server(answer, "127.0.0.1", PORT)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
