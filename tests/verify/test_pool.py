"""Contract of fa4build.verify.pool.

Each task runs in a process of its own. Whatever becomes of it - a result, an error, an exception, a crash, too long a
run - is the end of that task alone, and every task has exactly one end. Nothing runs on when `run_tasks` is left.
"""

import os
import signal
import time

import pytest

from fa4build.errors import LaunchPlanError
from fa4build.verify.pool import Task, now_in, run_tasks


def work(what, tell):
    """A task; runs in another process."""
    if what == "fail":
        raise LaunchPlanError("no such plan")
    if what == "raise":
        raise ValueError("a bug")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "crash":
        tell("case 2/12 odd")
        now_in("the eager schedule")
        now_in("the late schedule")
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "sleep":
        time.sleep(60)
    tell(f"half of {what}")
    return what * 2


def run(*tasks: str, jobs: int = 2, timeout_s: float = 30.0):
    """(ends by task name, messages)."""
    ends, messages = {}, []
    run_tasks(
        [Task(name=name, function=work, argument=name) for name in tasks],
        jobs=jobs,
        timeout_s=timeout_s,
        on_message=lambda name, message: messages.append((name, message)),
        on_end=lambda end: ends.setdefault(end.name, end),
    )
    return ends, messages


def test_results_and_messages_come_back():
    """The empty message is the start."""
    ends, messages = run("ab", jobs=1)

    assert ends["ab"].result == "abab"
    assert ends["ab"].error is None
    assert messages == [("ab", ""), ("ab", "half of ab")]


def test_one_bad_task_harms_no_other():
    """An error of ours stays what it is; a bug and a crash become failures that tell which."""
    ends, _ = run("fail", "raise", "die", "good")

    assert ends["good"].result == "goodgood"
    assert (type(ends["fail"].error), str(ends["fail"].error)) == (LaunchPlanError, "no such plan")
    assert "ValueError: a bug" in str(ends["raise"].error)
    assert "killed by signal 9" in str(ends["die"].error)


def test_a_crash_is_told_with_the_case_and_the_order():
    """Those that the task was in; the others go on."""
    ends, _ = run("crash", "good", jobs=1)

    assert str(ends["crash"].error) == "crash: its process was killed by signal 11 in case 2/12 odd, the late schedule."
    assert ends["good"].result == "goodgood"


def test_a_task_that_takes_too_long_is_ended():
    """A minute's sleep, two seconds of patience."""
    started = time.monotonic()
    ends, _ = run("sleep", timeout_s=2.0)

    assert "not finished after 2 s" in str(ends["sleep"].error)
    assert time.monotonic() - started < 30


def test_nothing_runs_on_after_an_interrupt():
    """The callback raises, as Ctrl-C would."""
    from multiprocessing import active_children

    def interrupt(name, message):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(
            [Task(name="sleep", function=work, argument="sleep")],
            jobs=1,
            timeout_s=60,
            on_message=interrupt,
            on_end=lambda end: None,
        )
    assert active_children() == []
