"""Chooses at start-up what computes each component: the fastest candidate of those that compute what torch computes.

Knows no kernel: `engine/tune/components.py` says what is compared. A candidate that cannot be used or gives a wrong
result is listed with the reason and never chosen, so it costs speed, not answers.

Choices are kept in `weft/settled.json` in the user's cache folder, so that the next start need not compare and time
kernels again. For a component that is found there, or that a setting decides, nothing runs. But candidates that differ
in speed only are timed at several starts, and the least times decide: other load on the machine makes a time longer,
never shorter, and what it decided once would hold for ever.
"""

import functools
import hashlib
import logging
import math
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from weft.engine.device import CudaCapture, is_out_of_memory
from weft.engine.kernels.cpu import library
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import KernelChoice, Verdict, driver_version, package_version, user_folder

logger = logging.getLogger(__name__)

_NUM_TIMED_STARTS = 3
"""Starts at which what differs in speed only is timed; for the demo model this takes 0.1 s each time."""

_MAX_NUM_ENTRIES = 256
"""Entries in the file; the oldest go first."""


class _Entry(msgspec.Struct, frozen=True):
    machine: str
    settled: KernelChoice


class _File(msgspec.Struct, frozen=True):
    version: int
    checksum: int
    entries: list[_Entry]


_VERSION = 1
_MAX_FILE_BYTES = 4 << 20


def _checksum(entries: list[_Entry]) -> int:
    return zlib.crc32(msgspec.json.encode(entries))


class ChoiceFile:
    """The choices that were kept for one machine.

    The file only saves time: one that is missing, broken, changed by others or foreign counts as empty, and one that
    cannot be written is left alone. A choice counts only if nothing in the file says that it is wrong. A writer
    replaces the whole file, so a reader never sees half of one. Of two that write at once, one may lose its entry,
    which is then measured again.
    """

    def __init__(self, path: Path | None, machine: str) -> None:
        """Read and write at path, None for nowhere; machine is the text of `machine_text`."""
        self._path = path
        self._machine = machine

    def find(self, component: str, shapes: str, names: Sequence[str]) -> KernelChoice | None:
        """What was chosen for a component with the same shapes and candidates; None if nothing was."""
        for choice in self.of_this_machine():
            if (choice.component, choice.shapes, choice.names) == (component, shapes, tuple(names)):
                faulty = {verdict.candidate for verdict in choice.verdicts if verdict.fault}
                is_right = choice.chosen not in faulty or len(faulty) == len(choice.verdicts)  # the fallback, else
                return choice if choice.chosen in names and is_right else None
        return None

    def of_this_machine(self) -> tuple[KernelChoice, ...]:
        """All choices that hold on this machine."""
        return tuple(entry.settled for entry in self._read() if entry.machine == self._machine)

    def keep(self, choice: KernelChoice) -> None:
        """Add a choice, in place of an older one for the same component and shapes."""
        if self._path is None:
            return
        key = self._machine, choice.component, choice.shapes
        others = [e for e in self._read() if (e.machine, e.settled.component, e.settled.shapes) != key]
        entries = [*others, _Entry(self._machine, choice)][-_MAX_NUM_ENTRIES:]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = msgspec.json.encode(_File(_VERSION, _checksum(entries), entries))
            _replace(self._path, msgspec.json.format(content))
        except OSError as error:
            logger.info("the choice of kernels is not kept: %s cannot be written: %s", self._path, error.strerror)

    def _read(self) -> list[_Entry]:
        if self._path is None:
            return []
        try:
            if self._path.stat().st_size > _MAX_FILE_BYTES:
                raise OSError(f"more than {_MAX_FILE_BYTES} bytes")
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
            if (file.version, file.checksum) != (_VERSION, _checksum(file.entries)):
                raise OSError("written by another Weft, or changed since")
            return file.entries
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.info("the choices of kernels in %s are ignored: %s", self._path, error)
            return []


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def open_choices(device: torch.device) -> ChoiceFile:
    """The file in the cache folder, for this machine's device."""
    return ChoiceFile(default_path(), machine_text(device))


def default_path() -> Path | None:
    """Where the XDG Base Directory Specification places the file; None for a user without a home."""
    try:
        return user_folder("XDG_CACHE_HOME", ".cache") / "settled.json"
    except RuntimeError:
        return None


_KERNELS = Path(library.__file__).parents[1]

_PACKAGES = ("weft", "torch", "triton", "flash_attn_3", "flashinfer-python", "flashinfer-jit-cache")
"""Packages that kernels come from, or are compiled with."""


def machine_text(device: torch.device) -> str:
    """Text that changes when a kernel may compute something else, or in another time: device, driver and versions."""
    if device.type == "cuda":
        named = f"{torch.cuda.get_device_name(device)}, driver {driver_version() or 'unknown'}"
    else:
        named = library.cpu_name()
    versions = [f"{name} {version}" for name in _PACKAGES if (version := package_version(name))]
    return ", ".join([named, *versions, f"kernels {_digest()}"])


@functools.cache
def _digest() -> str:
    """Changes with every change of Weft's kernels, which its version does not."""
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(_KERNELS.rglob("*")):
        if file.suffix in (".py", ".so"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


Outputs = Sequence[torch.Tensor]

Judge = Callable[[Outputs], float]
"""How far outputs are from the reference's; NaN if they are not numbers."""

Measure = Callable[[Callable[[], object]], float]
"""Seconds that a call takes on the device."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that is ready to run.

    Attributes:
        outputs: Computes what is compared; called once, before run.
        run: What is timed.
    """

    outputs: Callable[[], Outputs]
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compute a component; make raises what keeps it from being used, `ModelError` if this is no fault."""

    name: str
    make: Callable[[], Trial]


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the computation that something has to be chosen for.

    Attributes:
        shapes: Text of all that decides, beside the machine, what is right and fast: sizes, dtypes, settings.
        candidates: The preferred one first. If a single one is right, nothing is timed.
        fallback: The name of what is taken if no candidate is right: the reference itself.
        reference: Computes what is right. None if candidates differ in speed only.
        tolerance: Largest error, as `Judge` gives it, of a right candidate.
    """

    name: str
    shapes: str
    candidates: tuple[Candidate, ...]
    fallback: str
    reference: Callable[[], Judge] | None
    tolerance: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """What may be chosen."""
        return tuple(dict.fromkeys((*(candidate.name for candidate in self.candidates), self.fallback)))


class Tuner:
    """Chooses for one component after the other."""

    def __init__(self, file: ChoiceFile, measure: Measure, check_device: Callable[[], None] = lambda: None) -> None:
        """Take the file of kept choices, the clock, and what raises if the device has failed."""
        self._file = file
        self._measure = measure
        self._check_device = check_device

    def tune(self, component: Component, asked: str | None = None) -> str:
        """Choose, and log what was chosen and why.

        Args:
            asked: The choice of a setting, which is taken as it is; None leaves it to the comparison.

        Raises:
            ModelError: The component has no candidate of the name that is asked for, or a candidate broke the device.
        """
        if asked is not None:
            if asked not in component.names:
                message = f"kernels: {component.name} cannot be {asked} here: there is {', '.join(component.names)}"
                raise ModelError(message)
            logger.info("%s: %s, as the settings ask", component.name, asked)
            return asked
        choice = self._file.find(component.name, component.shapes, component.names)
        if choice is not None and (component.reference or choice.num_starts >= _NUM_TIMED_STARTS):
            logger.info("%s: %s (kept)", component.name, choice.summary())
            return choice.chosen
        kept, (choice, is_final) = choice, self._compare(component)
        if kept is not None:
            choice = _least_of(kept, choice)
        right = {c.name for c in component.candidates} - {v.candidate for v in choice.verdicts if v.fault}
        level = logging.INFO if choice.chosen in right or not component.candidates else logging.WARNING
        logger.log(level, "%s: %s", component.name, choice.summary())
        if is_final:
            self._file.keep(choice)
        return choice.chosen

    def _compare(self, component: Component) -> tuple[KernelChoice, bool]:
        """Run all candidates; returns the result, and whether it would be the same at another time."""
        judge: Judge | None = None
        verdicts: dict[str, Verdict] = {}
        right: dict[str, Trial] = {}
        is_final = True
        for candidate in component.candidates:
            error = None
            try:
                trial = candidate.make()
                if component.reference is not None:
                    judge = judge or component.reference()
                    error = judge(trial.outputs())
            except Exception as fault:  # whatever it is, another candidate may be right
                self._check(component, candidate)
                is_final = is_final and not is_out_of_memory(fault)
                verdicts[candidate.name] = Verdict(candidate.name, fault=_reason(fault))
                continue
            if error is None or error <= component.tolerance:
                right[candidate.name] = trial
                verdicts[candidate.name] = Verdict(candidate.name, error=error)
            else:
                wrong = f"wrong: its error is {error:.2g}, more than {component.tolerance:.2g}"
                known = error if math.isfinite(error) else None
                verdicts[candidate.name] = Verdict(candidate.name, error=known, fault=wrong)
                logger.warning("%s: %s is not used; %s", component.name, candidate.name, wrong)
        name = next(iter(right), component.fallback)
        if len(right) > 1:
            for candidate_name, trial in right.items():
                verdicts[candidate_name] = self._time(component, trial, verdicts[candidate_name])
            timed = [verdict for verdict in verdicts.values() if verdict.seconds is not None]
            is_final = is_final and len(timed) == len(right)
            name = min(timed, key=lambda v: v.seconds or 0.0).candidate if timed else name
        return KernelChoice(component.name, component.shapes, component.names, name, tuple(verdicts.values())), is_final

    def _time(self, component: Component, trial: Trial, verdict: Verdict) -> Verdict:
        """The verdict with a time, or without if it cannot be taken: the candidate is right all the same."""
        try:
            return Verdict(verdict.candidate, seconds=self._measure(trial.run), error=verdict.error)
        except Exception as fault:
            logger.warning("%s: %s cannot be timed: %s", component.name, verdict.candidate, _reason(fault))
            return verdict

    def _check(self, component: Component, candidate: Candidate) -> None:
        """Raise if a candidate has left the device unusable: nothing that follows would tell of another one."""
        try:
            self._check_device()
        except Exception as fault:
            raise ModelError(
                f"{component.name}: {candidate.name} broke the device ({_reason(fault)}); name another candidate in "
                f"the setting kernels"
            ) from None


def _least_of(kept: KernelChoice, new: KernelChoice) -> KernelChoice:
    """The new choice by the least times that candidates had at this start or an earlier one."""
    known = {verdict.candidate: verdict.seconds for verdict in kept.verdicts}
    verdicts = []
    for verdict in new.verdicts:
        times = [time for time in (verdict.seconds, known.get(verdict.candidate)) if time is not None]
        verdicts.append(replace(verdict, seconds=min(times, default=None)))
    timed = {verdict.candidate: verdict.seconds for verdict in verdicts if verdict.seconds is not None}
    chosen = min(timed, key=timed.__getitem__, default=new.chosen)
    return replace(new, chosen=chosen, verdicts=tuple(verdicts), num_starts=kept.num_starts + 1)


def _reason(fault: Exception) -> str:
    line = " ".join(str(fault).split())[:200]
    return line if isinstance(fault, ModelError) else f"{type(fault).__name__}: {line}"


def relative_errors(*expected: Outputs) -> Judge:
    """A judge for tensors: the largest relative error of any row, in the Euclidean norm over the last dimension.

    Each row counts by itself, so that one wrong row among thousands counts in full.

    Args:
        expected: One or several results that are right; a row may be near any of them.
    """

    def judge(outputs: Outputs) -> float:
        errors = []
        for output, *targets in zip(outputs, *expected, strict=True):
            distances = [_row_errors(output, target) for target in targets]
            errors.append(torch.stack(distances).amin(0).max())
        return float(torch.stack(errors).max())  # a NaN stays one

    return judge


def _row_errors(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    distances: torch.Tensor = torch.linalg.vector_norm(output.float() - target, dim=-1)
    lengths: torch.Tensor = torch.linalg.vector_norm(target.float(), dim=-1)
    return distances / lengths.clamp_(min=1e-6)


_NUM_RUNS = 5
_WARM_UP_S = 0.05
_RUNS_IN_GRAPH = 4


def measure_on(device: torch.device) -> Measure:
    """The clock of a device."""
    return _time_in_graph if device.type == "cuda" else _time_plainly


def _time_plainly(run: Callable[[], object]) -> float:
    """The least of several runs. The first ones of a process are slow: ten times, in the steps of the demo model."""
    warm_at = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < warm_at:
        run()
    seconds = []
    for _ in range(_NUM_RUNS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _time_in_graph(run: Callable[[], object]) -> float:
    """Time on the device alone: several runs in one CUDA graph, so that what launches cost the host does not count."""

    def work() -> torch.Tensor:
        for _ in range(_RUNS_IN_GRAPH):
            run()
        return torch.empty(0)

    replay, _ = CudaCapture().record(work)
    replay()
    milliseconds = []
    for _ in range(_NUM_RUNS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        replay()
        ended.record()
        ended.synchronize()
        milliseconds.append(float(began.elapsed_time(ended)))
    return min(milliseconds) / _RUNS_IN_GRAPH / 1e3
