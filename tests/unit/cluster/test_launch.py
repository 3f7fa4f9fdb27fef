import json
import shlex
import socket

import pytest

from cluster.launch import find_port_problem, main
from cluster.serve_driver import LaunchOrder, make_ready_line


def _order(host: str) -> LaunchOrder:
    return LaunchOrder(host=host, port=8000, parent_pid=1, arguments={"model": "/m"})


def test_an_order_survives_its_way_to_the_driver() -> None:
    order = _order("127.0.0.1")

    assert LaunchOrder.from_json(order.to_json()) == order


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("example.test", "http://example.test:8000"),
    ],
)
def test_the_address_can_be_called_from_this_machine(host: str, url: str) -> None:
    assert _order(host).url == url


def test_the_ready_line_is_one_line_with_a_command_that_a_shell_understands() -> None:
    line = make_ready_line("http://127.0.0.1:8000", "it's")

    assert "\n" not in line
    words = shlex.split(line.partition("try: ")[2])
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"


def test_a_free_port_has_no_problem_and_a_taken_one_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]

        problem = find_port_problem("127.0.0.1", port)

    assert problem is not None
    assert problem.startswith(f"cannot listen on 127.0.0.1 port {port}: Address already in use")
    assert find_port_problem("127.0.0.1", port) is None


def test_a_port_that_others_may_share_counts_as_taken() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)

        assert find_port_problem("127.0.0.1", taken.getsockname()[1]) is not None


def test_validate_names_the_models_of_a_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["validate", "cluster/configs/multi_model.yaml"])

    assert status == 0
    assert "smollm2-135m-float32" in capsys.readouterr().out


def test_validate_fails_with_one_line_on_a_missing_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(["validate", "nowhere.yaml"])

    assert status == 1
    assert capsys.readouterr().err.startswith("medley: nowhere.yaml: ")


def test_an_unknown_command_is_a_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sing"])

    assert caught.value.code == 2
