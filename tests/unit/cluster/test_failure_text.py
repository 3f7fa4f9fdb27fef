import subprocess
import sys

from cluster.failure_text import StartFailure, read_failure

_RETRYING = "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"


def _traceback_of(code: str) -> str:
    """Return a real traceback, as Ray keeps it: coloured, one traceback inside of another."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return (
        "\x1b[36mray::ServeReplica:medley:M.initialize_and_get_metadata()\x1b[39m (pid=1)\n"
        '  File "replica.py", line 1928, in initialize\n'
        "    raise RuntimeError(traceback.format_exc()) from None\n"
        f"RuntimeError: {run.stderr}"
    )


def test_a_message_without_an_error_is_no_failure() -> None:
    assert read_failure("") is None
    assert read_failure("Upscaling from 1 to 2 replicas.") is None


def test_a_configuration_error_is_final_and_its_own_words_are_the_text() -> None:
    traceback = _traceback_of(
        "from models.errors import ConfigError\nraise ConfigError('model', 'no such folder: /m')"
    )

    failure = read_failure(_RETRYING + traceback)

    assert failure == StartFailure(text="model: no such folder: /m", is_final=True)


def test_a_configuration_error_is_found_below_an_error_that_it_caused() -> None:
    traceback = _traceback_of(
        "from models.errors import ConfigError\n"
        "try:\n    raise ConfigError('model', 'too large')\n"
        "except ConfigError as error:\n    raise ValueError('start failed') from error"
    )

    failure = read_failure(_RETRYING + traceback)

    assert failure == StartFailure(text="model: too large", is_final=True)


def test_another_error_is_not_final_and_keeps_its_class() -> None:
    failure = read_failure(_RETRYING + _traceback_of("raise MemoryError('no room')"))

    assert failure == StartFailure(text="MemoryError: no room", is_final=False)


def test_a_report_without_an_exception_gives_its_last_line() -> None:
    failure = read_failure(_RETRYING + "something\nwent wrong\n")

    assert failure == StartFailure(text="went wrong", is_final=False)
