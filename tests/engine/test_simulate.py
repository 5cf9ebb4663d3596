"""Simulated replicas: the real scheduler and cache over a clock of its own, so that all times are known exactly."""

import json
import pathlib
import signal
import subprocess
import sys

import msgspec
import pytest

from tests.checkpoints import CHECKPOINTS, write_checkpoint
from weft.engine.schedule.step_cost import StepLoad
from weft.engine.simulate import SimulatedReplica, Simulation, costs_for, fit, prompt_ids
from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import Arrive, Begin, EngineOptions, Finish, Finished, Look, StepCosts
from weft.server.supervise.spawn import python_command


def costs(**changes: object) -> StepCosts:
    known: dict[str, object] = {
        "options": EngineOptions(model="m"),
        "device": "cpu",
        "seconds": [0.01, 0.001, 0.0, 0.0],
        "median_error": 0.0,
        "vocab_size": 50,
        "max_model_len": 200,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_blocks": 101,
        "num_states": 4,
        "windows": [None],
        "num_state_groups": 0,
        "itl_target_s": 1.0,
        "overlap": False,
    }
    return StepCosts(**(known | changes))  # type: ignore[arg-type]


def arrive(time: float, num_tokens: int = 20, output_tokens: int = 3, replica: int = 0, *hash_ids: int) -> Arrive:
    return Arrive(replica, time, num_tokens, output_tokens, list(hash_ids), 8)


def test_a_request_takes_what_its_steps_cost() -> None:
    simulation = Simulation(costs(), 1)
    simulation.arrive(arrive(5.0))
    done = simulation.finish()
    assert done.first_token_s == pytest.approx([0.03])
    assert done.gaps_s == pytest.approx([0.011, 0.011])
    assert (done.prompt_tokens, done.output_tokens, done.cached_tokens) == (20, 3, 0)
    assert (done.busy_s, done.end_s) == pytest.approx((0.052, 5.052))


def test_a_request_is_seen_between_two_steps() -> None:
    simulation = Simulation(costs(), 1)
    simulation.arrive(arrive(0.0, 50, 1))
    simulation.arrive(arrive(0.02, 10, 1))
    assert simulation.finish().first_token_s == pytest.approx([0.06, 0.04 + 0.02])


def test_steps_that_are_launched_ahead_follow_each_other() -> None:
    done = []
    for overlap in (False, True):
        simulation = Simulation(costs(overlap=overlap), 1)
        simulation.arrive(arrive(0.0, 20, 3))
        done.append(simulation.finish())
    assert done[0].busy_s == pytest.approx(done[1].busy_s) and done[1].end_s == pytest.approx(done[1].busy_s)


@pytest.mark.parametrize(("changes", "cached"), [({}, 16), ({"prefix_caching": False}, 0)])
def test_equal_hash_ids_are_found_in_the_cache_of_their_replica_alone(changes: dict[str, bool], cached: int) -> None:
    simulation = Simulation(costs(options=EngineOptions(model="m", **changes)), 2)  # type: ignore[arg-type]
    for time, replica, ids in ((0.0, 0, (7, 8, 9)), (1.0, 0, (7, 8, 10)), (2.0, 1, (7, 8, 11))):
        simulation.arrive(arrive(time, 24, 1, replica, *ids))
    assert simulation.finish().cached_tokens == cached


def test_ids_begin_alike_as_far_as_hash_ids_do() -> None:
    one, other = (prompt_ids(arrive(0, 20, 1, 0, 5, last), 0, 50) for last in (60, 61))
    assert one[:8] == other[:8] and one[8:16] != other[8:16] and len(one) == 20
    assert prompt_ids(arrive(0, 20), 1, 50)[:4] != prompt_ids(arrive(0, 20), 2, 50)[:4]
    assert max(one) < 50
    assert prompt_ids(arrive(0, 10, 1, 0, 5, 6), 0, 50) == prompt_ids(arrive(0, 10, 1, 0, 5, 6), 9, 50)


def test_what_replicas_tell_is_of_that_time() -> None:
    simulation = Simulation(costs(max_num_seqs=1), 2)
    for _ in range(3):
        simulation.arrive(arrive(0.0, 40, 50))
    busy, idle = simulation.look(0.1)
    assert (busy.running, busy.waiting, idle.running) == (1, 2, 0)
    assert busy.kv_usage > idle.kv_usage == 0.0
    assert [load.running + load.waiting for load in simulation.look(100.0)] == [0, 0]


def test_what_an_engine_would_refuse_is_counted() -> None:
    simulation = Simulation(costs(options=EngineOptions(model="m", max_num_waiting=1)), 1)
    simulation.arrive(arrive(0.0, 199, 10))
    for _ in range(2):
        simulation.arrive(arrive(0.0))
    done = simulation.finish()
    assert done.refused == {"CONTEXT_LENGTH": 1, "QUEUE_FULL": 1} and len(done.first_token_s) == 1


def test_windows_and_states_are_simulated() -> None:
    replica = SimulatedReplica(costs(windows=[None, 8], num_state_groups=1, num_states=12))
    replica.add(0, list(range(40)), 5, 0.0)
    replica.run_until(float("inf"))
    assert replica.output_tokens == 5
    replica.engine.scheduler.check_integrity()


def test_the_fit_finds_what_steps_cost() -> None:
    samples = []
    for number in (1, 4, 16):
        for context in (0, 100, 1000):
            load = StepLoad()
            load.add(number, context)
            samples.append((load, 0.01 + 0.002 * load.num_tokens + 1e-5 * load.num_kv_tokens))
    assert fit(samples * 30).coefficients[:3] == pytest.approx([0.01, 0.002, 1e-5], rel=0.05)


def test_costs_of_other_options_and_other_files_are_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(costs()))
    assert costs_for(EngineOptions(model="elsewhere/m", log_format="json"), file) == costs()
    with pytest.raises(ModelError, match="was measured with block_size None, and now it is 16"):
        costs_for(EngineOptions(model="m", block_size=16), file)
    file.write_text("{}")
    with pytest.raises(ModelError, match=r"costs\.json does not hold costs of steps: .*options"):
        costs_for(EngineOptions(model="m"), file)


MEASURES_SHORTLY = """
import sys
from weft.engine import simulate
simulate.measure.__defaults__ = (1.0,)
sys.exit(simulate.main())
"""


def test_the_process_measures_once_and_answers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(CHECKPOINTS["llama3"], tmp_path / "model")
    options = EngineOptions(model=str(tmp_path / "model"), device="cpu", kv_cache_memory=1 << 20)
    lines = [options, Begin(2), arrive(0.0), arrive(0.0, 20, 3, 1), Look(1e6), Finish()]
    sent = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    file = tmp_path / "costs.json"
    told = []
    for _ in range(2):
        command = [sys.executable, "-P", "-c", MEASURES_SHORTLY, str(file)]
        done = subprocess.run(command, input=sent, capture_output=True, check=True)
        told.append((done.stdout, done.stderr))
    (answers, log), (again, quiet) = told
    assert answers == again and b"measured" in log and b"measured" not in quiet
    known, loads, finished = answers.splitlines()
    assert json.loads(known)["max_model_len"] == 256 and json.loads(file.read_text()) == json.loads(known)
    assert json.loads(loads) == [[0, 0, 0.0], [0, 0, 0.0]]
    assert msgspec.json.decode(finished, type=Finished).output_tokens == 6


def test_ctrl_c_is_the_parents_to_heed(tmp_path: pathlib.Path) -> None:
    """A terminal sends it to both; the child would end with a traceback, or measure on alone."""
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(costs()))
    command, pipe = python_command("weft.engine.simulate", str(file)), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdin and child.stdout
        child.stdin.write(msgspec.json.encode(costs().options) + b"\n")
        child.stdin.flush()
        assert child.stdout.readline()
        child.send_signal(signal.SIGINT)
        answers, _ = child.communicate(msgspec.json.encode(Finish()) + b"\n")
    assert msgspec.json.decode(answers, type=Finished).output_tokens == 0 and child.returncode == 0
