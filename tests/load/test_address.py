import pytest

from raysd.errors import ExperimentError
from raysd.load.address import Address, key_from, parse_address


@pytest.mark.parametrize(("url", "address"), [
    ("http://127.0.0.1:8000", Address("127.0.0.1", 8000)), ("localhost:8000/v1", Address("localhost", 8000)), ("https://host/llm/v1/", Address("host", 443, True, "/llm")),
    ("http://[::1]:80", Address("::1", 80)), ("http://bücher.example", Address("xn--bcher-kva.example", 80)), ("http://host/a%20b", Address("host", 80, prefix="/a%20b"))])
def test_a_url_may_be_written_as_people_do(url, address):
    assert parse_address(url) == address and parse_address(address.url) == address


def test_a_key_is_in_no_message():
    assert "secret" not in repr(parse_address("http://host", "secret"))


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://host:0", "http://[::1", "http://a..b", "http://" + "a" * 64, "http://\ud800",
                                 "http://host/v1?key=secret", "http://me:secret@host", "http://:secret@host", "http://me:sec/ret@host:1", "me:secret@host", "http://host#secret"])
def test_what_names_no_server_is_refused_and_no_secret_in_it_shown(url):
    with pytest.raises(ExperimentError) as refused:
        parse_address(url)
    assert refused.value.exit_code == 64 and "http://127.0.0.1:8000" in refused.value.fix and "sec" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://my host", "http://host/a b", "http://host/ü", "http://host/\x00", "http://host/\x7f"])
def test_characters_that_a_request_cannot_carry_are_refused(url):
    with pytest.raises(ExperimentError, match="no URL has"):
        parse_address(url)


@pytest.mark.parametrize("key", ["secret", "a secret", "s=e/c+r.e~t!"])
def test_a_key_comes_from_its_variable(key):
    assert key_from({"KEY": key}, "KEY") == key


@pytest.mark.parametrize("key", ["secret\n", "secret\r\nx-other: 1", " secret", "secret ", "sec\x00ret", "sec\tret", "sécret", "secret\udcff", "secret\u2028", "\n"])
def test_a_key_that_no_header_can_carry_is_refused_by_the_name_of_its_variable(key):
    with pytest.raises(ExperimentError, match="THE_KEY") as refused:
        key_from({"THE_KEY": key}, "THE_KEY")
    assert refused.value.exit_code == 64 and not any(piece in str(refused.value) for piece in ("secret", "cret", "sec"))


@pytest.mark.parametrize("name", ["sk-secret", "", "A=B", "A B"])
def test_a_key_in_place_of_its_variable_is_not_repeated(name):
    with pytest.raises(ExperimentError, match="not the key itself") as refused:
        key_from({}, name)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("key", "said", "shown"), [
    ("sk-very-secret", "bad key sk-very-secret!", "bad key (the key)!"), ("sk-very-secret", "bad key sk-very-secr", "bad key (the key)"), ("abc", "xabcabx", "x(the key)abx"), (None, "said", "said")])
def test_what_a_server_says_is_shown_without_the_key(key, said, shown):
    assert parse_address("http://host", key).shown(said, 100) == shown


@pytest.mark.parametrize(("said", "shown"), [
    ("\x1b[2J\x1b[31mowned\r\n\nvalid\n", r"\x1b[2J\x1b[31mowned\r\n\nvalid\n"), ("a\tb\x00\x7f\x9b31m", r"a\tb\x00\x7f\x9b31m"), ("one\u2028two\x85three\x0bfour", r"one\u2028two\x85three\x0bfour"),
    ("\u202edilav", r"\u202edilav"), ("\ud800", r"\ud800"), ('{"error": "Grüße, C:\\\\n \ufffd"}', '{"error": "Grüße, C:\\\\n \ufffd"}'), ("x" * 101, "x" * 100)])
def test_what_a_server_says_is_shown_on_one_line_that_leaves_a_terminal_alone(said, shown):
    assert parse_address("http://host", "a key").shown(said, 100) == shown and shown.isprintable()
