import pytest

from cluster.arguments import parse_up_arguments
from models.errors import ConfigError


def test_without_words_the_bundled_model_is_served_on_the_loopback_address() -> None:
    arguments = parse_up_arguments([], {})

    assert (arguments.host, arguments.port, arguments.builder) == ("127.0.0.1", 8000, {})


def test_host_and_port_are_the_launchers_own_and_the_rest_goes_to_the_builder() -> None:
    arguments = parse_up_arguments(["port=81", "host=::1", "model=/m", "replicas=2"], {})

    assert (arguments.host, arguments.port) == ("::1", 81)
    assert arguments.builder == {"model": "/m", "replicas": "2"}


def test_a_value_may_hold_equals_signs() -> None:
    assert parse_up_arguments(["model=/a=b"], {}).builder == {"model": "/a=b"}


def test_a_word_replaces_a_default() -> None:
    arguments = parse_up_arguments(["cache_folder=/b"], {"cache_folder": "/a", "dtype": "float32"})

    assert arguments.builder == {"cache_folder": "/b", "dtype": "float32"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["modle=/m"], "unknown argument 'modle' (did you mean 'model'?)"),
        (["xyz=1"], "unknown argument 'xyz' (known are "),
        (["model"], "'model' is not of the form key=value"),
        (["=1"], "'=1' is not of the form key=value"),
        (["dtype=float32", "dtype=float32"], "'dtype' is given twice"),
        (["port=0"], "port: '0' is not a number from 1 to 65535"),
        (["port=65536"], "port: '65536' is not a number from 1 to 65535"),
        (["port=eight"], "port: 'eight' is not a number from 1 to 65535"),
        (["replicas=many"], "replicas: "),
        (["dtype=int3"], "dtype: 'int3' is not one of "),
        (["min_replicas=2"], "min_replicas needs max_replicas"),
    ],
)
def test_a_bad_word_is_refused_in_one_line_that_names_it(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_up_arguments(words, {})

    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_every_problem_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_up_arguments(["replicas=0", "ingress_replicas=0"], {})

    assert "replicas: " in str(caught.value)
    assert "ingress_replicas: " in str(caught.value)
