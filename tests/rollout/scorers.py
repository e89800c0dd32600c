"""Scorers that tests name by reference: they load nothing, so that their processes start fast."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time


def length(prompt, text):
    """The completion's length."""
    return float(len(text))


def told(prompt, text):
    """Does what the text says, and gives 1 where that ends."""
    match text.split():
        case ["hang"]:
            time.sleep(1000)
        case ["spin"]:  # a runaway regex never gives up Python's lock
            re.match(r"(a+)+$", "a" * 64 + "b")
        case ["exit"]:
            os._exit(3)
        case ["segfault"]:
            ctypes.string_at(0)
        case ["kill"]:
            os.kill(os.getpid(), 9)
        case ["quit"]:
            sys.exit()
        case ["raise"]:
            raise ZeroDivisionError("no samples")
        case ["nan"]:
            return float("nan")
        case ["print"]:
            print("printed by a scorer")
        case ["pid"]:
            return float(os.getpid())
        case ["child"]:
            return float(subprocess.Popen(["sleep", "1000"]).pid)
        case ["sleep", seconds]:
            time.sleep(float(seconds))
    return 1.0


def faulty(prompt, text):
    """Of letters: `a` raises, `b` gives NaN, `c` hangs, `d` ends the process, others are scored by their place."""
    match text:
        case "a":
            raise ValueError("no a, please")
        case "b":
            return float("nan")
        case "c":
            time.sleep(1000)
        case "d":
            os._exit(3)
    return float(ord(text) - ord("e"))


def by_prompt(prompt, text):
    """Prompts of some names hang, end the process, raise, and give NaN; others are scored by their length."""
    deed = {"p1": "hang", "p2": "exit", "p3": "raise", "p4": "nan"}.get(prompt.id)
    return told(prompt, deed) if deed else float(len(text))


def hangs_and_tells(prompt, text):
    """Writes its process's number into a file that the environment names, and hangs."""
    with open(os.environ["SCORER_PID_FILE"], "w") as file:
        print(os.getpid(), file=file)
    time.sleep(1000)


def raises(prompt, text):
    """Scores nothing."""
    raise ValueError("never")


def one_argument(text):
    """Cannot be called with a prompt and a text."""


async def asynchronous(prompt, text):
    """Cannot be called without a loop."""


class Keyed:
    """A scorer with something of its own."""

    def __init__(self, key):
        self.key = key

    def __call__(self, prompt, text):
        return float(self.key in text)


keyed = Keyed("7")
not_callable = 5
