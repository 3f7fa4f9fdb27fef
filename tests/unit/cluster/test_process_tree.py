import os
import signal
import subprocess
import sys

from cluster.process_tree import MakeWatch


def test_a_parent_that_is_not_make_is_not_watched() -> None:
    watch = MakeWatch(os.getpid(), [signal.SIGINT])

    assert not watch.is_useful


def test_a_parent_that_is_gone_is_not_ending() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    watch = MakeWatch(process.pid, [signal.SIGINT])

    assert not watch.is_useful
    assert not watch.is_ending()
