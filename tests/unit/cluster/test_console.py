import io

from cluster.console import Console
from tests.unit.cluster.clock import StepClock


def test_progress_has_the_seconds_since_the_start() -> None:
    progress, clock = io.StringIO(), StepClock()
    console = Console(progress, io.StringIO(), clock)

    clock.advance(2.5)
    console.say("loading")

    assert progress.getvalue() == "[  2.5 s] loading\n"


def test_results_and_failures_go_to_different_streams() -> None:
    progress, result = io.StringIO(), io.StringIO()
    console = Console(progress, result)

    console.announce("ready")
    console.fail("port: taken")

    assert (result.getvalue(), progress.getvalue()) == ("ready\n", "medley: port: taken\n")


def test_a_closed_stream_loses_lines_and_nothing_else() -> None:
    progress = io.StringIO()
    console = Console(progress, progress)
    progress.close()

    console.say("nobody reads this")
    console.announce("nor this")
