"""The address of the page is checked and taken before anything else."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.monitor.web import address


@pytest.mark.parametrize(("text", "url"), [("127.0.0.1:0", "http://127.0.0.1:"), ("0", "http://127.0.0.1:"),
                                           ("0.0.0.0:0", "http://127.0.0.1:"), ("localhost:0", "http://")])  # fmt: skip
def test_a_bound_address_has_a_url_for_a_browser(text: str, url: str) -> None:
    with address.bind(text) as bound:
        assert address.url_of(bound).startswith(url)
        assert address.is_loopback(bound) == (text != "0.0.0.0:0")


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536", "::1:8080", ":8080",
                                  "127.0.0.1:-1", "127.0.0.1:8080/page"])  # fmt: skip
def test_malformed_addresses_of_the_web_page_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not HOST:PORT; write for example --web 127\.0\.0\.1:8080"):
        address.bind(text)


def test_a_host_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="name another address"):
        address.bind("192.0.2.1:8080")


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example"])
def test_a_name_that_no_host_can_have_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="is not a host of this machine"):
        address.bind(f"{host}:8080")


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*; name another address, for example --web "):
            address.bind(f"127.0.0.1:{port}")


def test_two_pages_cannot_share_a_port() -> None:
    with address.bind("127.0.0.1:0") as first, pytest.raises(ConfigError, match="another address"):
        address.bind(f"127.0.0.1:{first.getsockname()[1]}")


def test_the_web_page_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"--web needs .*\[web\]"):
        address.bind("127.0.0.1:0")
