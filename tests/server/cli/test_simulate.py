"""`weft simulate`: what it reads, where it sends requests, and what it says of them."""

import io
import os
import pathlib
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

from weft.engine.wire.options import Arrive, Begin, Finish, Finished, Load, Look, StepCosts
from weft.server.cli.simulate import Outcome, Simulator, TraceLine, read_trace, table
from weft.server.settings import Settings, StartError, engine_options
from weft.server.supervise.checkpoint import DEMO_MODEL

LINE = '{"timestamp": 27482, "input_length": 700, "output_length": 8, "hash_ids": [46, 47]}'


def known_costs(**settings: object) -> StepCosts:
    options = engine_options(Settings(**settings), DEMO_MODEL)  # type: ignore[arg-type]
    return StepCosts(
        options=options,
        device="cpu (3 threads)",
        seconds=[0.1, 0.001, 0.0, 0.0],
        median_error=0.07,
        vocab_size=1280,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        block_size=32,
        num_blocks=1000,
        num_states=8,
        windows=[None],
        num_state_groups=0,
        itl_target_s=None,
        overlap=False,
    )


def written(path: pathlib.Path, *lines: str) -> pathlib.Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_a_trace_is_read_in_the_order_of_time(tmp_path: pathlib.Path) -> None:
    early = LINE.replace("27482", "5").replace(', "hash_ids": [46, 47]', "")
    first, second = read_trace(written(tmp_path / "t", LINE, "", early), 512)
    assert (first.timestamp, first.hash_ids, second.hash_ids) == (5, [], [46, 47])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "t:2: Input data was truncated"),
        ('{"timestamp": 1}', "t:2: .* missing required field `input_length`"),
        (LINE.replace("700", "0"), "t:2: input_length must be at least 1, got 0"),
        (LINE.replace("8,", "0,"), "t:2: output_length must be at least 1, got 0"),
        (LINE.replace("27482", "-1"), "t:2: timestamp must be at least 0, got -1"),
        (LINE.replace("46", "-46"), "t:2: hash_ids must be at least 0 and below 2.64, got -46"),
        (LINE.replace("46", str(1 << 64)), "t:2: hash_ids must be at least 0 and below 2.64, got 18446744073709551616"),
        (LINE.replace("700", "512"), "t:2: hash_ids must be at most 1, one for each 512 tokens of 512, got 2"),
    ],
)
def test_a_fault_names_line_field_bound_and_value(tmp_path: pathlib.Path, line: str, fault: str) -> None:
    with pytest.raises(StartError, match=fault):
        read_trace(written(tmp_path / "t", LINE, line), 512)


def test_a_trace_that_is_missing_or_empty_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StartError, match="cannot be read: no such file"):
        read_trace(tmp_path / "none", 512)
    with pytest.raises(StartError, match="holds no request"):
        read_trace(written(tmp_path / "t"), 512)


def test_requests_that_begin_alike_go_to_one_replica_and_all_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator, sent = Simulator(known_costs().options, None), list[object]()
    answers = {list[Load]: [Load(0, 0, 0.0)] * 3, Finished: Finished([0.1], [], 10, 1, 0, 0.1, 60.0, {})}
    monkeypatch.setattr(simulator, "_write", lambda message, flush=True: sent.append(message))
    monkeypatch.setattr(simulator, "_read", lambda kind: answers[kind])
    trace = [TraceLine(5000 + i * 400, 1024, 4, [i % 8, 100 + i]) for i in range(80)]
    assert simulator.replay(trace, 3, 512).seconds == 60.0
    assert isinstance(sent[0], Begin) and isinstance(sent[-1], Finish)
    arrivals = [message for message in sent if isinstance(message, Arrive)]
    homes = {i: {a.replica for a in arrivals[i::8]} for i in range(8)}
    assert all(len(home) == 1 for home in homes.values()) and set.union(*homes.values()) == {0, 1, 2}
    assert [a.time for a in arrivals[:3]] == pytest.approx([0.0, 0.4, 0.8])
    looks = [message.time for message in sent if isinstance(message, Look)]
    assert looks[:2] == pytest.approx([0.0, 1.2])


def test_the_table_says_what_clients_see() -> None:
    finished = Finished([0.1, 0.2, 0.3], [0.01] * 9, 1000, 50, 250, 4.0, 5.0, {"QUEUE_FULL": 2})
    cells = [next(iter(column.cells)) for column in table([Outcome(2, finished, 5.0)]).columns]
    assert cells == ["2", "200 280 298", "10 10 10", "10", "25.0%", "40%", "2 queue_full"]
    narrow = Console(file=(shown := io.StringIO()), width=60)
    narrow.print(table([Outcome(2, finished, 5.0)]))
    assert "…" not in shown.getvalue(), "a narrow terminal left out why requests were refused"


def test_the_command_predicts_from_known_costs(tmp_path: pathlib.Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_bytes(msgspec.json.encode(known_costs(max_num_seqs=8)))
    trace = written(tmp_path / "trace.jsonl", *[LINE] * 4)

    # As a server has them. Made-up prompts were written to the folder, in the place of what others had there.
    shared = {"WEFT_KV_EVENTS": "tcp://*:1", "WEFT_KV_EVENTS_REPLAY": "tcp://*:2"}
    shared |= {"WEFT_KV_OFFLOAD_DIR": str(tmp_path / "kv"), "WEFT_KV_ROLE": "both", "WEFT_KV_OFFLOAD": "1GiB"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "weft.server", "simulate", str(trace), "--costs", str(costs), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | shared | {"COLUMNS": "100"})

    done = run("--max-num-seqs", "8", "--replicas", "1", "--replicas", "2")
    assert done.returncode == 0, done.stderr
    assert "4 requests; steps as on cpu (3 threads); half predicted within 7%" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("│")]) == 2
    other = run()
    assert (other.returncode, other.stderr.splitlines()[-1]) == (
        2,
        f"weft: error: costs: {costs} was measured with max_num_seqs 8, and now it is None: name another file",
    )
    assert f"--costs: {tmp_path} must be a file in a folder that exists" in run("--costs", str(tmp_path)).stderr
    assert "--replicas must be at least 1, got 0" in run("--replicas", "0").stderr
    assert "--hash-tokens must be at least 1, got 0" in run("--hash-tokens", "0").stderr
