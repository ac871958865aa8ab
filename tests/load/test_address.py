import pytest

from raysd.errors import ExperimentError
from raysd.load.address import Address, parse_address


@pytest.mark.parametrize(("url", "address"), [
    ("http://127.0.0.1:8000", Address("127.0.0.1", 8000)), ("localhost:8000/v1", Address("localhost", 8000)), ("https://host/llm/v1/", Address("host", 443, True, "/llm")),
    ("http://[::1]:80", Address("::1", 80))])
def test_a_url_may_be_written_as_people_do(url, address):
    assert parse_address(url) == address and parse_address(address.url) == address


def test_a_key_is_in_no_message():
    assert "secret" not in repr(parse_address("http://host", "secret"))


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://host/v1?key=1", "http://me:secret@host"])
def test_what_names_no_server_is_refused(url):
    with pytest.raises(ExperimentError) as refused:
        parse_address(url)
    assert refused.value.exit_code == 64 and "http://127.0.0.1:8000" in refused.value.fix
