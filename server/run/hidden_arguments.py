"""Secrets on the command line: takes them out of the list of processes, which everybody on the machine can read.

Overwrites the memory that the kernel shows as this process's arguments; Python has copies of its own. Until then, some
milliseconds, and in the shell's history, the secret can be seen: the environment and files are better places.
"""

import ctypes
import os
import pathlib


def hide_values(flag: str) -> None:
    """Put asterisks over what follows a flag, also after an equals sign; does nothing where /proc is missing."""
    try:
        numbers = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(numbers[45]), int(numbers[46])  # arg_start, arg_end
    except (OSError, IndexError):
        return
    name = os.fsencode(flag)
    position, is_value = start, False
    for argument in ctypes.string_at(start, end - start).split(b"\0"):
        num_shown = 0 if is_value else len(name) + 1 if argument.startswith(name + b"=") else len(argument)
        ctypes.memset(position + num_shown, ord("*"), len(argument) - num_shown)
        position += len(argument) + 1
        is_value = argument == name and not is_value
