"""The web configuration: read as Prometheus' own exporters read it, and again while the exporter runs."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import bcrypt
import pytest

from tokengap.config.web import CIPHERS
from tokengap.errors import SettingsError
from tokengap.web import access as access_module
from tokengap.web.access import Access, followed, read_access
from tokengap.web.guard import Guard
from tokengap.web.routes import make_app
from tokengap.web.server import Server
from tokengap.web.serving import Serving
from web.certificates import certificates

__all__ = ["certificates"]

ROOT = Path(__file__).parent.parent.parent
HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
PAIR = "cert_file: server.crt, key_file: server.key"
MUST = "client_auth_type: RequireAndVerifyClientCert"

#: What both take.
GOOD = {
    "nothing": "",
    "a comment": "# later\n",
    "no values": "tls_server_config:\nbasic_auth_users:\n",
    "empty sections": "tls_server_config: {}\nhttp_server_config: {}\nbasic_auth_users: {}\n",
    "a certificate": f"tls_server_config: {{{PAIR}}}",
    "a client may": f"tls_server_config: {{{PAIR}, client_auth_type: VerifyClientCertIfGiven, client_ca_file: ca.crt}}",
    "a client must": f"tls_server_config: {{{PAIR}, {MUST}, client_ca_file: ca.crt}}",
    "the system's authorities": f"tls_server_config: {{{PAIR}, {MUST}}}",
    "nobody must": f"tls_server_config: {{{PAIR}, client_auth_type: NoClientCert}}",
    "TLS 1.3": f"tls_server_config: {{{PAIR}, min_version: TLS13, max_version: TLS13}}",
    "TLS 1.2": f"tls_server_config: {{{PAIR}, max_version: TLS12}}",
    "every cipher": f"tls_server_config: {{{PAIR}, cipher_suites: [{', '.join(CIPHERS)}]}}",
    "ciphers of TLS 1.3": f"tls_server_config: {{{PAIR}, cipher_suites: [TLS_AES_128_GCM_SHA256]}}",
    "the client's order": f"tls_server_config: {{{PAIR}, prefer_server_cipher_suites: false}}",
    "one user": f"basic_auth_users: {{alice: {HASH}}}",
    "users of every kind of bcrypt": "basic_auth_users: "
    f"{{a: {HASH}, b@c: {HASH.replace('2b', '2a')}, 'ä': {HASH.replace('2b', '2y')}}}",
    "no HTTP/2": "http_server_config: {http2: false}",
    "every header": "http_server_config: {headers: {Content-Security-Policy: x, Strict-Transport-Security: max-age=1, "
    "X-Content-Type-Options: nosniff, X-Frame-Options: sameorigin, X-XSS-Protection: '0'}}",
    "a header taken away": "http_server_config: {headers: {Content-Security-Policy: ''}}",
}

#: What both refuse, with what our line says of it.
BAD = {
    "not YAML": ("tls_server_config: {", "line 1"),
    "a list": ("- a", "not a mapping"),
    "an unknown section": ("tls_config: {}", "did you mean tls_server_config"),
    "an unknown key": (f"tls_server_config: {{{PAIR}, ca_file: x}}", "tls_server_config.ca_file"),
    "a key twice": ("basic_auth_users: {}\nbasic_auth_users: {}", "line 2"),
    "no key": ("tls_server_config: {cert_file: server.crt}", "has no key_file"),
    "no certificate": ("tls_server_config: {key_file: server.key}", "has no cert_file"),
    "only clients' authority": ("tls_server_config: {client_ca_file: ca.crt}", "has no cert_file"),
    "only asking clients": ("tls_server_config: {client_auth_type: RequireAndVerifyClientCert}", "has no cert_file"),
    "a certificate that is not there": (
        "tls_server_config: {cert_file: no.crt, key_file: server.key}",
        "cert_file: {folder}/no.crt cannot be read: No such file",
    ),
    "another's key": ("tls_server_config: {cert_file: server.crt, key_file: client.key}", "cert_file and key_file"),
    "no certificate in it": ("tls_server_config: {cert_file: names, key_file: server.key}", "cert_file and key_file"),
    "an encrypted key": ("tls_server_config: {cert_file: server.crt, key_file: sealed.key}", "cert_file and key_file"),
    "an authority that is not there": (
        f"tls_server_config: {{{PAIR}, client_auth_type: RequireAndVerifyClientCert, client_ca_file: no.crt}}",
        "client_ca_file",
    ),
    "an authority for nobody": (
        f"tls_server_config: {{{PAIR}, client_ca_file: ca.crt}}",
        "client_ca_file is of no use",
    ),
    "an unknown policy": (f"tls_server_config: {{{PAIR}, client_auth_type: Maybe}}", "client_auth_type is 'Maybe'"),
    "an unknown version": (f"tls_server_config: {{{PAIR}, min_version: TLS14}}", "min_version is 'TLS14'"),
    "an unknown cipher": (f"tls_server_config: {{{PAIR}, cipher_suites: [X]}}", "cipher_suites[0] is 'X'"),
    "a password in clear": (
        "basic_auth_users: {alice: hunter2}",
        "basic_auth_users.alice is ***; expected a bcrypt hash",
    ),
    "a hash of another kind": ("basic_auth_users: {alice: $6$salt$hash}", "a bcrypt hash"),
    "a hash cut off": (f"basic_auth_users: {{alice: '{HASH[:-3]}'}}", "a bcrypt hash"),
    "a hash of no cost": (f"basic_auth_users: {{alice: '{HASH.replace('$04$', '$03$')}'}}", "a bcrypt hash"),
    "users as a list": (f"basic_auth_users: ['alice={HASH}']", "basic_auth_users is no mapping"),
    "users as a word": ("basic_auth_users: hunter2", "basic_auth_users is no mapping"),
    "another header": ("http_server_config: {headers: {X-Mine: a}}", "http_server_config.headers.X-Mine"),
    "a header of another value": ("http_server_config: {headers: {X-Frame-Options: allow}}", "deny or sameorigin"),
    "TLS as a word": ("tls_server_config: yes please", "expected a mapping"),
}

#: What only promtool takes, with why we do not.
STRICTER = {
    "asks, and looks at nothing": f"tls_server_config: {{{PAIR}, client_auth_type: RequestClientCert}}",
    "wants any, and looks at nothing": f"tls_server_config: {{{PAIR}, client_auth_type: RequireAnyClientCert}}",
    "TLS that is forbidden": f"tls_server_config: {{{PAIR}, min_version: TLS10}}",
    "ciphers out of use": f"tls_server_config: {{{PAIR}, cipher_suites: [TLS_RSA_WITH_AES_128_CBC_SHA]}}",
    "curves, which Python cannot choose": f"tls_server_config: {{{PAIR}, curve_preferences: [X25519]}}",
    "versions that no client can have": f"tls_server_config: {{{PAIR}, min_version: TLS13, max_version: TLS12}}",
    "an authority without a certificate": f"tls_server_config: {{{PAIR}, "
    "client_auth_type: RequireAndVerifyClientCert, client_ca_file: names}",
    "hours for a password": f"basic_auth_users: {{alice: '{HASH.replace('$04$', '$31$')}'}}",
}

#: What came into the format after the promtool of Debian 12.
NEWER = {
    "a rate": ("rate_limit: {interval: 100ms, burst: 20}", None),
    "no rate": ("rate_limit: {interval: 0}", None),
    "a rate without its unit": ("rate_limit: {interval: 1}", "rate_limit.interval is 1"),
    "a negative burst": ("rate_limit: {interval: 1s, burst: -1}", "rate_limit.burst is -1"),
}


@pytest.fixture(scope="session")
def promtool(certificates: Path) -> Callable[[str], bool]:
    """Whether promtool takes a text, asked for all at once: a start for each would take seconds."""
    assert shutil.which("promtool"), "promtool is not installed: apt-get install prometheus"
    sealed = ("openssl", "ec", "-in", "server.key", "-aes128", "-passout", "pass:x", "-out", "sealed.key")
    subprocess.run(sealed, cwd=certificates, check=True, capture_output=True)
    texts = [*GOOD.values(), *(text for text, _ in BAD.values()), *STRICTER.values()]
    files = [certificates / f"web-{number}.yml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    asked = subprocess.run(("promtool", "check", "web-config", *files), capture_output=True, text=True, check=False)
    said = asked.stdout + asked.stderr
    verdicts = {text: f"{file} SUCCESS" in said for file, text in zip(files, texts, strict=True)}
    assert said.count("SUCCESS") + said.count(".yml FAILED") == len(texts)
    return verdicts.__getitem__


def read(folder: Path, text: str) -> Access:
    """What a text says, in the folder of the certificates."""
    file = folder / "web.yml"
    file.write_text(text)
    return read_access(file)


@pytest.mark.parametrize("name", GOOD)
def test_what_promtool_takes(name: str, certificates: Path, promtool: Callable[[str], bool]):
    """A file for any exporter of Prometheus is one for this."""
    assert promtool(GOOD[name])
    read(certificates, GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_promtool_refuses(name: str, certificates: Path, promtool: Callable[[str], bool]):
    """What promtool refuses is refused here in one line, that says where and what, and no secret."""
    text, why = BAD[name]
    assert not promtool(text)
    with pytest.raises(SettingsError) as refused:
        read(certificates, text)
    message = str(refused.value)
    assert why.replace("{folder}", str(certificates)) in message
    assert message.startswith(str(certificates / "web.yml"))
    assert "\n" not in message
    assert not {"hunter2", HASH, "PRIVATE"} & set(message.replace("'", " ").split())


@pytest.mark.parametrize("name", STRICTER)
def test_what_only_promtool_takes(name: str, certificates: Path, promtool: Callable[[str], bool]):
    """What would protect nothing, or cannot be done, is refused, although others take it."""
    assert promtool(STRICTER[name])
    with pytest.raises(SettingsError):
        read(certificates, STRICTER[name])


@pytest.mark.parametrize("name", NEWER)
def test_what_came_later(name: str, certificates: Path):
    """Rates are of a newer format than the promtool that the tests have."""
    text, why = NEWER[name]
    if why is None:
        read(certificates, text)
    else:
        with pytest.raises(SettingsError, match=why):
            read(certificates, text)


def test_the_example_is_right(certificates: Path, tmp_path: Path):
    """deploy/web.yml is taken as it is, beside a certificate and its key, by both."""
    for suffix in ("crt", "key"):
        shutil.copy(certificates / f"server.{suffix}", tmp_path / f"tokengap.{suffix}")
    example = tmp_path / "web.yml"
    shutil.copy(ROOT / "deploy" / "web.yml", example)
    subprocess.run(("promtool", "check", "web-config", example), check=True, capture_output=True)
    access = read_access(example)
    assert access.tls is not None
    assert set(access.users) == {"prometheus"}


def test_equal_where_nothing_changed(certificates: Path):
    """The same text and files are the same access; another certificate is another."""
    text = f"tls_server_config: {{{PAIR}}}\nbasic_auth_users: {{alice: {HASH}}}"
    assert read(certificates, text) == read(certificates, text)
    assert read(certificates, text) != read(certificates, text.replace("server.", "renewed."))


def test_no_secret_is_shown(certificates: Path):
    """What a log or a traceback would show of it is no key."""
    access = read(certificates, f"tls_server_config: {{{PAIR}}}")
    secret = (certificates / "server.key").read_text().splitlines()[1]
    assert secret not in repr(access)


# --- over real connections ------------------------------------------------------------------------------------------


def client_tls(folder: Path, name: str | None = None) -> ssl.SSLContext:
    """What trusts our authority, with a certificate or without."""
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    if name is not None:
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    return context


@asynccontextmanager
async def served(file: Path) -> AsyncIterator[Server]:
    """A server that goes by a file, and looks at it all the time."""
    access = read_access(file)
    server = Server(make_app(Serving(also=())), Guard(access))
    await server.start("127.0.0.1", 0, access.tls)
    try:
        async with followed(access, server.take, every=0.01):
            yield server
    finally:
        await server.stop()


async def asked(server: Server, tls: ssl.SSLContext | None = None, user: str | None = None) -> int:
    """The status with which a new connection is answered; 0: there is none."""
    headers = {} if user is None else {"Authorization": aiohttp.encode_basic_auth(user, "secret")}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as session:
        try:
            async with session.get(f"{server.url}/api/history", headers=headers) as answer:
                return answer.status
        except aiohttp.ClientError:
            return 0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for some seconds."""
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def serial(server: Server, tls: ssl.SSLContext) -> str:
    """The number of the certificate that is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=tls)
    number: str = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return number


async def test_tls(certificates: Path, tmp_path: Path):
    """With a certificate it is HTTPS only: plain HTTP and TLS 1.1 find nobody."""
    file = certificates / "tls.yml"
    file.write_text(f"tls_server_config: {{{PAIR}}}")
    async with served(file) as server:
        assert server.url.startswith("https://")
        assert await asked(server, client_tls(certificates)) == 200
        assert await asked(server, ssl.create_default_context()) == 0  # which does not trust our authority
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            assert not (await reader.read()).startswith(b"HTTP")
        writer.close()


@pytest.mark.parametrize(
    ("policy", "without", "client", "stranger"),
    [("RequireAndVerifyClientCert", 0, 200, 0), ("VerifyClientCertIfGiven", 200, 200, 0)],
)
async def test_clients_with_certificates(certificates: Path, policy: str, without: int, client: int, stranger: int):
    """Who has none, one of our authority, one of another."""
    file = certificates / f"{policy}.yml"
    file.write_text(f"tls_server_config: {{{PAIR}, client_auth_type: {policy}, client_ca_file: ca.crt}}")
    async with served(file) as server:
        assert await asked(server, client_tls(certificates)) == without
        assert await asked(server, client_tls(certificates, "client")) == client
        assert await asked(server, client_tls(certificates, "stranger")) == stranger


async def test_a_renewed_certificate(certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A certificate that does not fit its key yet is said, once, and changes nothing; with its key it is shown. Who was
    connected connects anew."""
    caplog.set_level(logging.INFO, "tokengap")
    for name in ("server.crt", "server.key"):
        shutil.copy(certificates / name, tmp_path)
    file = tmp_path / "web.yml"
    file.write_text(f"tls_server_config: {{{PAIR}}}")
    tls = client_tls(certificates)
    async with served(file) as server:
        before = await serial(server, tls)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=tls)
        shutil.copy(certificates / "renewed.crt", tmp_path / "server.crt")
        await until(lambda: "not taken" in caplog.text)
        assert await serial(server, tls) == before
        assert await asked(server, tls) == 200
        shutil.copy(certificates / "renewed.key", tmp_path / "server.key")
        await until(lambda: "read again" in caplog.text)
        assert await serial(server, tls) != before
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
    assert caplog.text.count("not taken") == 1


async def test_a_file_that_an_editor_empties_first(tmp_path: Path):
    """It says nobody needs a password then, for a moment, and nobody believes it."""
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{alice: {HASH}}}")
    taken = []

    async def take(access: Access) -> None:
        taken.append(set(access.users))

    async with followed(read_access(file), take, every=0.05):
        for name in ("bob", "carol") * 5:
            file.write_text("")
            await asyncio.sleep(0.03)  # less than from one look to the next: due first, however late both are
            file.write_text(f"basic_auth_users: {{{name}: {HASH}}}")
            await until(lambda name=name: taken[-1:] == [{name}])
    assert taken == [{"bob"}, {"carol"}] * 5


async def test_a_file_that_is_emptied_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it said in that moment is not believed either, right or wrong: it is read again."""
    file = tmp_path / "web.yml"
    text = f"basic_auth_users: {{alice: {HASH}}}"
    file.write_text(text)
    before, taken, over = read_access(file), [], []
    moments = ["", "basic_auth_users: {alice: hunter2}"]

    def read(path: Path) -> Access:
        if not moments:
            return read_access(path)
        moment = moments.pop(0)
        path.write_text(moment)
        try:
            return read_access(path)
        finally:
            path.write_text(text)
            over.append(moment)

    async def take(access: Access) -> None:
        taken.append(set(access.users))

    monkeypatch.setattr(access_module, "read_access", read)
    async with followed(before, take, every=0.01):
        await until(lambda: len(over) == 2)
        file.write_text(f"basic_auth_users: {{bob: {HASH}}}")
        await until(lambda: taken)
    assert taken == [{"bob"}]


async def test_a_changed_file(certificates: Path, caplog: pytest.LogCaptureFixture):
    """Users, TLS and rates change while it runs; a broken file and one that is gone change nothing."""
    caplog.set_level(logging.INFO, "tokengap")
    file, tls = certificates / "changed.yml", client_tls(certificates)
    file.write_text(f"basic_auth_users: {{alice: {HASH}}}")
    async with served(file) as server:

        async def changed(text: str, said: str) -> None:
            caplog.clear()
            file.write_text(text)
            await until(lambda: said in caplog.text)

        assert (await asked(server), await asked(server, user="alice"), await asked(server, user="bob")) == (
            401,
            200,
            401,
        )
        await changed(f"basic_auth_users: {{bob: {HASH}}}", "read again")
        assert (await asked(server, user="alice"), await asked(server, user="bob")) == (401, 200)
        await changed("basic_auth_users: {bob: hunter2}", "not taken")
        assert "hunter2" not in caplog.text
        assert (await asked(server), await asked(server, user="bob")) == (401, 200)
        caplog.clear()
        file.unlink()
        await until(lambda: "cannot be read" in caplog.text)
        assert (await asked(server), await asked(server, user="bob")) == (401, 200)
        await changed(f"tls_server_config: {{{PAIR}}}", "read again")
        assert (await asked(server), await asked(server, tls)) == (0, 200)
        await changed("rate_limit: {interval: 1h, burst: 2}", "read again")
        assert [await asked(server) for _ in range(3)] == [200, 200, 429]
