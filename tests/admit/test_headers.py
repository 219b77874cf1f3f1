"""What passes a proxy, and what does not; which class a request is of."""

from __future__ import annotations

import hashlib

import pytest
from multidict import CIMultiDict

from tokengap.admit.classes import Classes, Sign
from tokengap.admit.headers import passed, request_id, to_engine


def test_what_concerns_one_connection_does_not_pass():
    """Neither the standard's, nor what Connection names; the rest in its order, repeated ones too."""
    headers = CIMultiDict(
        [
            ("A", "1"),
            ("Connection", "close, X-Hop"),
            ("x-hop", "2"),
            ("Keep-Alive", "3"),
            ("TE", "trailers"),
            ("Transfer-Encoding", "chunked"),
            ("Upgrade", "h2c"),
            ("Proxy-Authorization", "s"),
            ("a", "4"),
            ("B", "5"),
        ]
    )
    assert list(passed(headers).items()) == [("A", "1"), ("a", "4"), ("B", "5")]


def test_what_goes_to_an_engine():
    """Keys pass, our own framing and host do not, and who asked is added to those before."""
    headers = CIMultiDict(
        {"Host": "edge", "Authorization": "Bearer k", "Content-Length": "9", "Expect": "100-continue"}
    )
    headers.add("X-Forwarded-For", "10.0.0.1")
    headers.add("Accept-Encoding", "br")
    going = to_engine(headers, "id-1", "10.0.0.2", readable=True)
    assert dict(going) == {
        "Authorization": "Bearer k",
        "Accept-Encoding": "identity",
        "X-Request-Id": "id-1",
        "X-Forwarded-For": "10.0.0.1, 10.0.0.2",
    }
    assert to_engine(headers, "id-1", "10.0.0.2", readable=False)["Accept-Encoding"] == "br"


@pytest.mark.parametrize("given", ["", "two words", "line\nbreak", "x" * 201, "ü"])
def test_a_name_that_is_none_is_replaced(given):
    """What could break a log's line or a header is not passed on."""
    made = request_id({"X-Request-Id": given})
    assert made != given
    assert len(made) == 32


def test_a_name_is_kept():
    """As it came."""
    assert request_id({"X-Request-Id": "req-1/a:b"}) == "req-1/a:b"


def test_classes():
    """What a request says itself, then the first sign that fits; else a person waits for it."""
    digest = hashlib.sha256(b"sk-batch").hexdigest()
    classes = Classes(
        ["interactive", "batch", "slow"],
        [
            Sign("batch", "key", digest),
            Sign("slow", "path", "/v1/responses"),
            Sign("batch", "header", "X-Job: nightly"),
        ],
    )
    assert classes.of("/v1/completions", {}) == "interactive"
    assert classes.of("/v1/completions", {"X-Tokengap-Class": "slow"}) == "slow"
    assert classes.of("/v1/completions", {"X-Tokengap-Class": "none such"}) == "interactive"
    assert classes.of("/v1/completions", {"Authorization": "Bearer sk-batch"}) == "batch"
    assert classes.of("/v1/completions", {"X-Api-Key": "sk-batch"}) == "batch"
    assert classes.of("/v1/responses", {"Authorization": "Bearer other"}) == "slow"
    assert classes.of("/v1/responses/1", {}) == "slow"
    assert classes.of("/v1/responses-2", {}) == "interactive"
    assert classes.of("/v1/completions", {"X-Job": "Nightly"}) == "batch"
