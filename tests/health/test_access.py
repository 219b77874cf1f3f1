"""Keys and TLS, on real servers: what is not trusted is not read, and a key is shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.commands import tokengap
from lab.guarded import Certificate, guarded
from tokengap.errors import SettingsError
from tokengap.health.access import Access, Answer, checked_key, read_key, tls_context

KEY = "sk-4711-secret"


@pytest.mark.e2e
async def test_tls(certificate: Certificate):
    """Read where the authority is given or checking is off; otherwise blind, and the reason is the certificate."""
    async with guarded(certificate) as url:
        trusting = await tokengap("health", url, "--ca-file", certificate.file)
        blind = await tokengap("health", url, "--insecure-skip-verify")
        distrusting = await tokengap("health", url, "--window", "0.2s")
    assert (trusting.code, trusting.out) == (0, f"{url} idle: running 0, waiting 0\n")
    assert (blind.code, blind.out) == (trusting.code, trusting.out)
    assert distrusting.code == 3
    assert "certificate verify failed" in distrusting.out.lower()


@pytest.mark.e2e
@pytest.mark.parametrize("way", ["file", "variable"])
async def test_a_key(way, tmp_path: Path):
    """From a file or the environment it opens the page, the models and the completion; for a proxy as well."""
    (tmp_path / "key").write_text(f"{KEY}\n")
    given = ("--api-key-file", tmp_path / "key") if way == "file" else ()
    environment = {"TOKENGAP_API_KEY": KEY} if way == "variable" else {}
    async with guarded(key=KEY) as url:
        ran = await tokengap(
            "health", url, "--proxy", url, "--ask", "--window", "0.2s", "--json", *given, **environment
        )
    assert ran.code == 0
    assert [finding["verdict"] for finding in ran.json["findings"]] == ["idle", "answers"]
    assert ran.json["findings"][0]["asked"]["status"] == 200
    assert KEY not in ran.out + ran.err


@pytest.mark.e2e
async def test_a_wrong_key_is_not_shown_even_if_the_server_says_it():
    """Blind by a 401, and for the completion too."""
    async with guarded(key="another") as url:
        ran = await tokengap("health", url, "--proxy", url, "--window", "0.2s", TOKENGAP_API_KEY=KEY)
    assert ran.code == 3
    assert "blind: HTTP 401" in ran.out
    assert "Unauthorized: Bearer ***" in ran.out
    assert KEY not in ran.out + ran.err


@pytest.mark.e2e
async def test_the_variable_is_no_wrong_setting_for_other_commands():
    """One environment serves the exporter and the watchdog."""
    assert (await tokengap("doctor", TOKENGAP_API_KEY=KEY)).err == ""


async def test_credentials_in_a_url_win():
    """They are used as they stand and not shown; the key stays at home."""
    async with Access("key").session("http://user:word@h") as session:
        assert "Authorization" not in session.headers
    async with Access("key").session("http://h") as session:
        assert session.headers["Authorization"] == "Bearer key"
    assert Access("key").clean("said key at\nhttp://user:word@h") == "said *** at http://h"
    assert "key" not in repr(Access("key")).replace("key=", "")


@pytest.mark.parametrize("text", ["", " \n", "two words", "sk-\x00", "schlüssel"])
def test_what_is_no_key(text, tmp_path: Path):
    """It is refused, and not shown."""
    (tmp_path / "key").write_text(text)
    with pytest.raises(SettingsError, match="key holds no API key; expected one word of printable ASCII") as refused:
        read_key(tmp_path / "key")
    assert not text.strip() or text not in str(refused.value)
    assert checked_key(" sk-1\n", "X") == "sk-1"


def test_files_that_cannot_be_used(tmp_path: Path):
    """Missing, not text, or without a certificate: one line that names the file."""
    with pytest.raises(SettingsError, match=r"the API key cannot be read from .*nowhere: No such file or directory"):
        read_key(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="bytes: not text"):
        read_key(tmp_path / "bytes")
    with pytest.raises(SettingsError, match=r"--ca-file .*nowhere cannot be used: No such file or directory"):
        tls_context(tmp_path / "nowhere", verify=True)
    with pytest.raises(SettingsError, match=r"--ca-file .*bytes cannot be used: no certificate in it"):
        tls_context(tmp_path / "bytes", verify=True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error":{"message":"a"}}', "a"),
        (b'{"message":"b\\nc"}', "b c"),
        (b'{"error":"d"}', '{"error":"d"}'),
        (b"[]", "[]"),
        (b"<p>e\n</p>", "<p>e </p>"),
        (b"\xff", "\ufffd"),
        (b"x" * 300, "x" * 197 + "..."),
        (b"", ""),
    ],
)
def test_what_an_answer_said(body, said):
    """The message of an OpenAI error, or the text, in one line and not long."""
    assert Answer(400, body).said == said
