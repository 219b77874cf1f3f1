"""Settings: what is right is read from four places, and every wrong one is refused in one line that helps."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tokengap.config import SETTINGS, Settings, load, topology
from tokengap.config.settings import EngineSettings, HaproxySettings, HopSettings, InterfaceSettings, Shape
from tokengap.config.values import Address, Listen, Netns, RuntimeSocket, Seconds, Url
from tokengap.errors import SettingsError, SourceError
from tokengap.topology import Endpoint, Engine, Hop, ProxyInterface, Topology

DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"

ENGINE = "engines: [{url: 'http://h:1'}]\n"


def from_file(directory: Path, text: str, env: dict[str, str] | None = None, **flags: object) -> Settings:
    file = directory / "t.yaml"
    file.write_text(text)
    return load(file, env or {}, flags)


def refusal(load_it) -> str:
    """Return the one line with which settings are refused."""
    with pytest.raises(SettingsError) as caught:
        load_it()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def reads(kind, written: object) -> bool:
    try:
        kind.read(written)
    except ValueError:
        return False
    return True


# --- single values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(8, 8), ("8", 8), ("8s", 8), ("500ms", 0.5), ("1m", 60), ("2h", 7200), (0.25, 0.25), ("1.5 s", 1.5), (".5", 0.5)],
)
def test_a_time_is_a_number_with_or_without_a_unit(written, seconds):
    """A bare number is seconds."""
    assert Seconds.read(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", [0, -1, "0s", "", "s", "8d", "8 8", "1e3", "nan", ".inf", True, None, "9" * 400, "٣s"]
)
def test_a_time_that_is_none(written):
    """Nothing, zero, negative, endless, another unit or other digits."""
    assert not reads(Seconds, written)


@given(st.floats(min_value=1e-3, max_value=1e6))
def test_a_time_reads_what_it_writes(seconds):
    """What a message shows can be put into a file; microseconds are shown."""
    assert Seconds.read(str(Seconds(seconds))) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("written", "endpoint"),
    [
        (8080, Endpoint(None, 8080)),
        ("8080", Endpoint(None, 8080)),
        (":8080", Endpoint(None, 8080)),
        ("*:8080", Endpoint(None, 8080)),
        ("0.0.0.0:8080", Endpoint(None, 8080)),
        ("[::]:8080", Endpoint(None, 8080)),
        ("127.0.0.1:8080", Endpoint("127.0.0.1", 8080)),
        ("[2001:db8::5]:8080", Endpoint("2001:db8::5", 8080)),
        ("[2001:DB8:0::5]:8080", Endpoint("2001:db8::5", 8080)),
        ("[::ffff:10.0.0.5]:8080", Endpoint("10.0.0.5", 8080)),
    ],
)
def test_an_address_becomes_the_endpoint_that_sockets_show(written, endpoint):
    """In the one spelling of each address; an address that means all of them is none."""
    assert Address.read(written).endpoint == endpoint


@pytest.mark.parametrize(
    "written",
    [
        *("", ":", "0", ":0", "65536", "99999999", "-1", "x", "٨٠", "08080", 80.0, True, None, "http://h:80"),
        *("localhost:80", "1.2.3:80", "2001:db8::5:80", "[10.0.0.5:80", "10.0.0.5]:80", "[10.0.0.5]:80"),
    ],
)
def test_an_address_that_is_none(written):
    """Ports out of range, names, IPv6 without brackets."""
    assert not reads(Address, written)


@given(st.one_of(st.none(), st.ip_addresses()), st.integers(1, 65535))
def test_every_endpoint_can_be_written_as_an_address(ip, port):
    """What a message shows of an endpoint can be put into a file."""
    endpoint = Endpoint(None if ip is None else str(ip), port)
    again = Address.read(str(endpoint))
    assert Address.read(again) == again
    if ip is not None and not ip.is_unspecified and getattr(ip, "ipv4_mapped", None) is None:
        assert again.endpoint == endpoint


@pytest.mark.parametrize("written", [12, "12", " 4194304", "/run/netns/edge", "/proc/12/ns/net", "all"])
def test_a_network_namespace(written):
    """By a process, by a file, or every one."""
    assert Netns.read(written) == str(written).strip()


@pytest.mark.parametrize(
    "written", ["", "0", "-1", "012", "edge", "run/netns/edge", "/", "ALL", "none", 1.0, True, None]
)
def test_no_network_namespace(written):
    """A name of ``ip netns`` is not its path, and there is no process 0."""
    assert not reads(Netns, written)


def test_network_namespaces_from_every_place(tmp_path: Path):
    """A repeated flag, a variable with commas, a list in the file."""
    wanted = ("12", "/run/netns/edge")
    assert load(None, {}, {"netns": wanted}).netns == wanted
    assert load(None, {"TOKENGAP_NETNS": "12, /run/netns/edge"}, {}).netns == wanted
    assert from_file(tmp_path, "netns: [12, /run/netns/edge]").netns == wanted
    assert refusal(lambda: load(None, {"TOKENGAP_NETNS": "edge"}, {})) == (
        "TOKENGAP_NETNS is 'edge'; expected a process id, an absolute path such as /run/netns/NAME, or all"
    )


@pytest.mark.parametrize("written", [":10788", "127.0.0.1:0", "localhost:80", "[::1]:10788", 10788])
def test_where_to_serve(written):
    """A host may be a name here, and port 0 stands for any that is free."""
    assert str(Listen.read(written)).endswith(str(written).rpartition(":")[2])


@pytest.mark.parametrize("written", ["", "x", ":", ":65536", "::1:80", "[10.0.0.5]:80", "http://h:80", 1.5, None])
def test_where_not_to_serve(written):
    """No port, no host that can be one, a URL."""
    assert not reads(Listen, written)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/metrics", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "127.0.0.1:8000"),
        ("https://GPU-7.example.com", "gpu-7.example.com"),
        ("http://user:secret@h:1/a", "h:1/a"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_an_engine_is_named_after_its_url(written, name):
    """Host and port, and the path where it tells engines apart; never what is secret."""
    assert load(None, {}, {"engines": (written,)}).engines[0].name == name


@pytest.mark.parametrize(
    "written",
    [
        *("", "h:8000", "127.0.0.1", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://h:x", "http://h /x"),
        *("x=y", "http://h?key=1", "http://h#a", "http://[::1", None, 8000),
    ],
)
def test_a_url_that_is_none(written):
    """No scheme or another one, no host, ports out of range, a query."""
    assert not reads(Url, written)


@pytest.mark.parametrize("written", ["/run/haproxy/admin.sock", "127.0.0.1:9999", "haproxy:9999", "[::1]:9999"])
def test_a_runtime_socket(written):
    """A path, or a host with a port."""
    assert reads(RuntimeSocket, written)


@pytest.mark.parametrize(
    "written", ["", "admin.sock", "./admin.sock", ":9999", "h:0", "h:99999", "/" + 107 * "x", "/a\nb"]
)
def test_a_runtime_socket_that_is_none(written):
    """Paths from here, no host, ports out of range, longer than an address of a socket."""
    assert not reads(RuntimeSocket, written)


async def test_interfaces_of_proxies_belong_to_hops(tmp_path: Path):
    """Of the only hop where none is named; with several, of the one that is."""
    settings = from_file(tmp_path, f"{ENGINE}hops: [edge=80]\nhaproxy_socket: /run/h.sock")
    assert (await topology(settings, resolve)).interfaces == (ProxyInterface("edge", "haproxy", "/run/h.sock"),)
    env = {
        "TOKENGAP_ENGINE": "http://h:1",
        "TOKENGAP_HOP": "edge=80 admit=81",
        "TOKENGAP_HAPROXY_SOCKET": "edge=127.0.0.1:9999",
        "TOKENGAP_ENVOY_ADMIN": "admit=http://127.0.0.1:9901/",
    }
    assert (await topology(load(None, env, {}), resolve)).interfaces == (
        ProxyInterface("edge", "haproxy", "127.0.0.1:9999"),
        ProxyInterface("admit", "envoy", "http://127.0.0.1:9901"),
    )


# --- four places ----------------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path):
    """Each place is taken away in turn."""
    file, env = "interval: 3s\n", {"TOKENGAP_INTERVAL": "2s"}
    assert from_file(tmp_path, file, env, interval="1500ms").interval == 1.5
    assert from_file(tmp_path, file, env).interval == 2
    assert from_file(tmp_path, file).interval == 3
    assert from_file(tmp_path, "").interval == 1


def test_a_list_replaces_the_list_below(tmp_path: Path):
    """Engines of the command line are not added to those of the file."""
    settings = from_file(tmp_path, "engines: [a=http://a:1, b=http://b:1]", engines=("c=http://c:1",))
    assert [engine.name for engine in settings.engines] == ["c"]


def test_the_same_settings_from_file_environment_and_flags(tmp_path: Path):
    """However they are written, they come out equal."""
    text = """
    engines:
      - {name: a, url: 'http://a:8000'}
      - http://b:8000
    hops:
      - {name: edge, listen: [8080, '[::1]:8443']}
      - {name: admit, listen: 8090}
    classes: {batch: 60s, offline: none}
    slots: 4
    auto: true
    """
    env = {
        "TOKENGAP_ENGINE": "a=http://a:8000, http://b:8000",
        "TOKENGAP_HOP": "edge=:8080,[::1]:8443  admit=:8090",
        "TOKENGAP_CLASS": "batch=1m,offline=none",
        "TOKENGAP_SLOTS": "4",
        "TOKENGAP_AUTO": "true",
    }
    flags = {
        "engines": ("a=http://a:8000", "http://b:8000"),
        "hops": ("edge=8080,[::1]:8443", "admit=*:8090"),
        "classes": ("batch=60", "offline=none"),
        "slots": "4",
        "auto": True,
    }
    settings = from_file(tmp_path, text)
    assert settings.classes == {"batch": 60.0, "offline": None}
    assert [hop.listen for hop in settings.hops] == [(":8080", "[::1]:8443"), (":8090",)]
    assert settings == load(None, env, {}) == load(None, {}, flags)


def test_nothing_given_is_the_default(tmp_path: Path):
    """Empty variables, keys without a value, flags that did not stand there."""
    file = "interval:\nengines:\nslots:\n"
    assert from_file(tmp_path, file, {"TOKENGAP_DEADLINE": " "}, hops=(), auto=None) == Settings()


def test_a_variable_names_the_file(tmp_path: Path):
    """Unless the command line names another."""
    (tmp_path / "one.yaml").write_text("interval: 2s")
    (tmp_path / "two.yaml").write_text("interval: 3s")
    env = {"TOKENGAP_CONFIG": str(tmp_path / "one.yaml")}
    assert load(None, env, {}).interval == 2
    assert load(tmp_path / "two.yaml", env, {}).interval == 3


def test_what_kubernetes_puts_beside_a_service_of_our_name_is_no_setting():
    """Every pod of the namespace gets such variables; refusing them would keep tokengap from starting there."""
    env = {
        "TOKENGAP_SERVICE_HOST": "10.96.0.7",
        "TOKENGAP_SERVICE_PORT": "10788",
        "TOKENGAP_SERVICE_PORT_HTTP_METRICS": "10788",
        "TOKENGAP_PORT": "tcp://10.96.0.7:10788",
        "TOKENGAP_PORT_10788_TCP": "tcp://10.96.0.7:10788",
        "TOKENGAP_PORT_10788_TCP_ADDR": "10.96.0.7",
        "TOKENGAP_EDGE_SERVICE_HOST": "10.96.0.8",
    }
    assert load(None, env, {}) == Settings()


def test_the_age_cut_follows_the_deadline():
    """Three quarters of it, unless it is set itself: `--deadline 5s` alone must not be refused."""
    assert load(None, {}, {"deadline": "4s"}).age_cut == 3
    assert load(None, {}, {"deadline": "8s"}).age_cut == Settings().age_cut
    assert load(None, {}, {"deadline": "30s", "age_cut": "6s"}).age_cut == 6


def test_a_merge_key_is_yaml(tmp_path: Path):
    """What a mapping says itself wins over what it merges, and is no duplicate of it."""
    text = "engines:\n  - &a {url: 'http://a:1', slots: 4}\n  - {<<: *a, url: 'http://b:1'}\n"
    assert [(e.name, e.slots) for e in from_file(tmp_path, text).engines] == [("a:1", 4), ("b:1", 4)]


# --- every wrong setting --------------------------------------------------------------------------------------------

WRONG_FILES = {
    # text of the file: what the line says after the file's name
    "intervall: 2s": " line 1: intervall is no setting; did you mean interval?",
    "age-cut: 2s": " line 1: age-cut is no setting; did you mean age_cut?",
    "\n\nzzz: 1": " line 3: zzz is no setting; expected one of engines, hops, auto, ",
    "12: 1": " line 1: 12 is no setting",
    "[1, 2]: 1": " line 1: ? is no setting",
    "interval: 0": " line 1: interval is 0; expected a time such as 8s",
    "interval: 10ms": " line 1: interval is 0.01s; expected 0.05s or more",
    "interval: [1, 2]": " line 1: interval is a list; expected a time",
    "interval: {a: 1}": " line 1: interval is a mapping; expected a time",
    "deadline: soon": " line 1: deadline is 'soon'; expected a time such as 8s, 500ms, 1m or 2h",
    "deadline: 8s\nage_cut: 8s": " line 2: age_cut is 8s; expected less than the deadline, 8s",
    "age_cut: 9s": " line 1: age_cut is 9s; expected less than the deadline, 8s",
    "auto: maybe": " line 1: auto is 'maybe'; expected true or false",
    "slots: many": " line 1: slots is 'many'; expected a whole number from 1 to 1000000, or none",
    "slots: 0": " line 1: slots is 0; expected a whole number",
    "slots: true": " line 1: slots is True; expected a whole number",
    "slots: 1.5": " line 1: slots is 1.5; expected a whole number",
    "listen: 127.0.0.1": " line 1: listen is '127.0.0.1'; expected [HOST]:PORT such as :10788",
    "telemetry_path: metrics": " line 1: telemetry_path is 'metrics'; expected a path such as /metrics",
    "telemetry_path: /api/streams": " line 1: telemetry_path is '/api/streams'; expected a path such as /metrics",
    "log_level: loud": " line 1: log_level is 'loud'; expected one of debug, info, warn, error",
    "log_format: xml": " line 1: log_format is 'xml'; expected one of logfmt, json",
    "gpu: maybe": " line 1: gpu is 'maybe'; expected true or false",
    "gpu_hour_price: 0": " line 1: gpu_hour_price is 0; expected a number above 0, or none",
    "gpu_hour_price: $2": " line 1: gpu_hour_price is '$2'; expected a number above 0",
    "gpu_idle_power: -71": " line 1: gpu_idle_power is -71; expected a number above 0",
    "currency: euro": " line 1: currency is 'euro'; expected a currency of three letters such as USD or EUR",
    "dcgm: gpus:9400": " line 1: dcgm is 'gpus:9400'; expected http://HOST:PORT",
    "gpu: false\ndcgm: http://h:9400": " line 2: dcgm names where to read GPUs, while gpu says not to; expected",
    "engines:\n- url: http://h:1\n  gpus: [0]": " line 3: engines[0].gpus[0] is 0; expected a UUID as `nvidia-smi -L`",
    "engines:\n- url: http://h:1\n  gpus: [GPU-aaaa, GPU-aaaa]": " line 3: engines[0].gpus names GPU-aaaa twice",
    "engines: 7": " line 1: engines[0] is 7; expected [NAME=]URL, or a mapping with url",
    "engines: [h:8000]": " line 1: engines[0].url is 'h:8000'; expected http://HOST:PORT",
    "engines:\n- name: a": " line 2: engines[0] has no url; expected http://HOST:PORT or https://HOST:PORT",
    "engines:\n- {url: 'http://h:1', slot: 3}": " line 2: engines[0].slot is no setting; did you mean slots?",
    "engines:\n- url: http://h:1\n  slots: -3": " line 3: engines[0].slots is -3; expected a whole number",
    "engines:\n- url: http://h:1\n  class: fast": " line 3: engines[0].class is fast; expected one of interactive, or",
    "engines:\n- url: http://h:1\n  name: 'a b'": " line 3: engines[0].name is 'a b'; expected a name of letters",
    "engines:\n- url: http://h:1\n  addresses: [h:1]": " line 3: engines[0].addresses[0] is 'h:1'; expected PORT",
    "engines:\n- http://h:1\n- http://h:1/": " line 3: engines[1].name is h:1 as that of another engine or hop",
    "engines: ['http://u:pw@h:x']": " line 1: engines[0].url is 'http://h:x'; expected http://HOST:PORT",
    f"{ENGINE}hops: [edge]": " line 2: hops[0] is 'edge'; expected NAME=ADDR[,ADDR...], or a mapping with name",
    f"{ENGINE}hops: [{{name: edge}}]": " line 2: hops[0] has no listen; expected PORT, :PORT",
    f"{ENGINE}hops: [{{name: edge, listen: []}}]": " line 2: hops[0] has no listen; expected PORT, :PORT",
    f"{ENGINE}hops: [{{listen: 1}}]": " line 2: hops[0] has no name; expected a name",
    f"{ENGINE}hops: [edge=99999]": " line 2: hops[0].listen[0] is '99999'; expected PORT, :PORT, IPV4:PORT or [IPV6]",
    f"{ENGINE}hops: [engine=80]": " line 2: hops[0].name is engine, which stands for the engines themselves",
    f"{ENGINE}hops: [a=80, a=81]": " line 2: hops[1].name is a as that of another engine or hop; expected names",
    f"{ENGINE}hops: [a=80, 'b=10.0.0.5:80']": " line 2: hops[1].listen has 10.0.0.5:80 for b, where a listens",
    f"{ENGINE}hops: [{{name: a, listen: 80, class: x}}]": " line 2: hops[0].class is x; expected one of interactive",
    f"{ENGINE}hops: [{{name: a, listen: 80, to: [h:2]}}]": " line 2: hops[0].to is h:2 for a; expected h:1",
    f"{ENGINE}hops: [{{name: a, listen: 80, to: a}}]": " line 2: hops[0].to is a for a; expected h:1",
    f"{ENGINE}hops: [{{name: a, listen: 80, to: b}}, {{name: b, listen: 81, to: a}}]": " line 2: hops form a ring, a",
    f"{ENGINE}haproxy_socket: /run/h.sock": " line 2: haproxy_socket[0] is of a proxy, and no hop is watched; expected",
    f"{ENGINE}hops: [a=80, b=81]\nenvoy_admin: http://h:1": " line 3: envoy_admin[0] does not say of which hop it is; ",
    f"{ENGINE}hops: [edge=80]\nnginx_status: egde=http://h:1": " line 3: nginx_status[0] is of egde; expected edge",
    f"{ENGINE}hops: [a=80]\nhaproxy_socket: [a=/s, b=/t]": " line 3: haproxy_socket[1] is of b; expected a",
    f"{ENGINE}hops: [a=80]\nhaproxy_socket: /s\nenvoy_admin: http://h:1": " line 4: envoy_admin[0] is of a as another",
    f"{ENGINE}hops: [a=80]\nhaproxy_socket: h.sock": " line 3: haproxy_socket[0].socket is 'h.sock'; expected an",
    f"{ENGINE}hops: [a=80]\nnginx_status: h:80": " line 3: nginx_status[0].url is 'h:80'; expected http://HOST:PORT",
    "classes: {batch: soon}": " line 1: classes.batch is 'soon'; expected a time",
    "classes: {'a b': 1}": " line 1: classes.a b is 'a b'; expected a name",
    "classes: {interactive: 5s}": " line 1: classes.interactive names interactive; expected another class",
    "classes: [batch]": " line 1: classes is 'batch'; expected NAME=VALUE",
    "classes: [a=1, a=2]": " line 1: classes is 'a=2'; expected NAME=VALUE",
    "interval: 1s\ndeadline: 8s\ninterval: 2s": " line 3: interval stands twice, first on line 1",
    "engines:\n- url: http://h:1\n  url: http://h:2": " line 3: engines[0].url stands twice, first on line 2",
    "hops: [:8080]": " line 1: expected the node content, but found ':'",
    "a: b: c": " line 1: mapping values are not allowed here",
    "a: !!python/object:os.system {}": " line 1: a is no setting",
    "interval: !!python/object:os.system {}": " line 1: interval is a mapping; expected a time",
    "interval: !secret x": " line 1: could not determine a constructor for the tag '!secret'",
    "- 1": " is not a mapping; expected lines such as `interval: 1s`",
    "just text": " is not a mapping",
    "a: 1\n---\nb: 2": " line 2: but found another document",
    "hops: &a [*a]": " line 1: hops[0] contains itself",
    "interval: 1s\nage_cut: 2026-13-45": " line 2: '2026-13-45' is no timestamp",
    'a: 1\n"b\\nc": 1': " line 1: a is no setting",
    '"b\\nc": 1': " line 1: 'b\\nc' is no setting",
    "interval: !!int x": " line 1: 'x' is no int",
    "auto: !!bool maybe": " line 1: 'maybe' is no bool",
    "interval: !!timestamp soon": " line 1: 'soon' is no timestamp",
    "a: \x07": " is not YAML: unacceptable character",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_is_refused_with_the_line_and_the_key(tmp_path: Path, text: str):
    """File and line, key path, value, what is expected: in one line."""
    message = refusal(lambda: from_file(tmp_path, text))
    assert message.startswith(str(tmp_path / "t.yaml") + WRONG_FILES[text])


WRONG_VARIABLES = {
    ("TOKENGAP_INTERVALL", "2s"): "TOKENGAP_INTERVALL is no setting; did you mean TOKENGAP_INTERVAL?",
    ("TOKENGAP_ENGINES", "http://h:1"): "TOKENGAP_ENGINES is no setting; did you mean TOKENGAP_ENGINE?",
    ("TOKENGAP_XYZ", "1"): "TOKENGAP_XYZ is no setting; expected TOKENGAP_ and one of ENGINE, HOP, ",
    ("TOKENGAP_INTERVAL", "fast"): "TOKENGAP_INTERVAL is 'fast'; expected a time such as 8s",
    ("TOKENGAP_SLOTS", "x"): "TOKENGAP_SLOTS is 'x'; expected a whole number",
    ("TOKENGAP_AUTO", "2"): "TOKENGAP_AUTO is '2'; expected true or false",
    ("TOKENGAP_ENGINE", "a=http://a:1,ftp://b"): "TOKENGAP_ENGINE is 'ftp://b'; expected http://HOST:PORT",
    ("TOKENGAP_HOP", "edge=:80, :81"): "TOKENGAP_HOP is ':81'; expected NAME=ADDR[,ADDR...]",
    ("TOKENGAP_HOP", "edge=:80 edge=:81"): "TOKENGAP_HOP is edge as that of another engine or hop",
    ("TOKENGAP_CLASS", "batch"): "TOKENGAP_CLASS is 'batch'; expected NAME=VALUE, the value a time such as 8s",
    ("TOKENGAP_CONFIG", "/nowhere/t.yaml"): "/nowhere/t.yaml cannot be read: No such file or directory",
}


@pytest.mark.parametrize("variable", WRONG_VARIABLES, ids="=".join)
def test_a_wrong_variable_is_refused_with_its_name(variable: tuple[str, str]):
    """Name, value, what is expected: in one line."""
    assert refusal(lambda: load(None, dict([variable]), {})).startswith(WRONG_VARIABLES[variable])


WRONG_FLAGS = {
    ("interval", "0s"): "--interval is '0s'; expected a time",
    ("interval", "1ms"): "--interval is 0.001s; expected 0.05s or more",
    ("deadline", "-1"): "--deadline is '-1'; expected a time",
    ("age_cut", "9s"): "--age-cut is 9s; expected less than the deadline, 8s",
    ("window", "x"): "--window is 'x'; expected a time",
    ("prefill_budget", "x"): "--prefill-budget is 'x'; expected a time",
    ("listen", "nowhere"): "--listen is 'nowhere'; expected [HOST]:PORT",
    ("engines", ("a=http://h:1", "a=http://h:2")): "--engine is a as that of another engine or hop",
    ("engines", ("http://user:secret@:80",)): "--engine is 'http://:80'; expected http://HOST:PORT",
    ("hops", ("edge",)): "--hop is 'edge'; expected NAME=ADDR[,ADDR...]",
    ("hops", ("edge=",)): "--hop is 'edge='; expected NAME=ADDR[,ADDR...]",
    ("hops", ("edge=localhost:80",)): "--hop is 'localhost:80'; expected PORT, :PORT, IPV4:PORT",
    ("classes", ("batch=soon",)): "--class is 'soon'; expected a time such as 8s, 500ms, 1m or 2h (a bare number is "
    "seconds), or none",
    ("classes", ("interactive=5s",)): "--class names interactive; expected another class",
}


@pytest.mark.parametrize("flag", WRONG_FLAGS, ids=str)
def test_a_wrong_flag_is_refused_with_its_name(flag: tuple[str, object]):
    """Flag, value, what is expected: in one line, without a password."""
    assert refusal(lambda: load(None, {}, dict([flag]))).startswith(WRONG_FLAGS[flag])


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path):
    """A directory, bytes that are no text, and a file without permission."""
    assert refusal(lambda: load(tmp_path, {}, {})) == f"{tmp_path} cannot be read: Is a directory"
    (binary := tmp_path / "b").write_bytes(b"a: \xff\xfe")
    assert refusal(lambda: load(binary, {}, {})) == f"{binary} is not a text file in UTF-8 (byte 3)"
    if os.geteuid():
        (closed := tmp_path / "c").touch(mode=0)
        assert refusal(lambda: load(closed, {}, {})) == f"{closed} cannot be read: Permission denied"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.sampled_from(SETTINGS), ANYTHING)
def test_whatever_stands_in_a_file_is_read_or_refused_in_one_line(tmp_path_factory, setting, value):
    """Any value for any setting: never a traceback, never a message of several lines."""
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump({setting.key: value}), encoding="utf-8")
    with suppress(SettingsError):
        load(file, {}, {})
        return
    refusal(lambda: load(file, {}, {}))


def test_an_alias_is_not_multiplied(tmp_path: Path):
    """Nine lists of nine aliases each are a small file, and are read as one."""
    lists = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 10)]
    text = "\n".join(["engines:", "- url: &x0 http://h:1", *(f"  {line}" for line in lists)])
    assert refusal(lambda: from_file(tmp_path, text)).endswith(
        "line 3: engines[0].x1 is no setting; expected one of url, name, slots, class, addresses, gpus"
    )


# --- what is watched ------------------------------------------------------------------------------------------------


async def resolve(url: str) -> tuple[Endpoint, ...]:
    """As sources.engine.resolve does for loopback; names do not resolve."""
    host, _, port = url.removeprefix("http://").partition(":")
    if host.isalpha():
        raise SourceError(f"{host} does not resolve")
    return (Endpoint(None if host.startswith("127.") else host, int(port)),)


def watched(engines: tuple[str, ...] = ("a=http://127.0.0.1:8000",), *hops: str, found=((), ()), **flags) -> Topology:
    settings = load(None, {}, {"engines": engines, "hops": hops} | flags)
    return asyncio.run(topology(settings, resolve, *found))


def test_hops_form_a_chain_and_the_last_goes_to_all_engines():
    """In the order given: edge, then admit, then both engines."""
    seen = watched(("a=http://127.0.0.1:8000", "b=http://127.0.0.1:8001"), "edge=8080,8443", "admit=8090")
    assert [(hop.name, hop.to) for hop in seen.hops] == [("edge", ("admit",)), ("admit", ("a", "b"))]
    assert seen.hops[0].listen == (Endpoint(None, 8080), Endpoint(None, 8443))


def test_a_hop_with_to_stands_outside_the_chain_and_hops_come_outermost_first(tmp_path: Path):
    """However they are ordered in the file, who calls stands before who is called."""
    settings = from_file(
        tmp_path,
        ENGINE
        + """
hops:
  - {name: inner, listen: 1, to: 'h:1'}
  - {name: outer, listen: 2, to: inner, class: batch}
  - {name: other, listen: 3}
classes: {batch: none}
""",
    )
    seen = asyncio.run(topology(settings, resolve))
    assert {hop.name: hop.to for hop in seen.hops} == {"inner": ("h:1",), "outer": ("inner",), "other": ("h:1",)}
    names = [hop.name for hop in seen.hops]
    assert names.index("outer") < names.index("inner")
    assert [hop.klass for hop in seen.hops if hop.name == "outer"] == ["batch"]
    assert seen.limits.deadlines == {"interactive": 8.0}


def test_limits_and_slots_are_carried_over():
    """Numbers as plain floats; a class without deadline has none; an engine's own slots win."""
    seen = watched(deadline="10s", age_cut="7s", window="5s", prefill_budget="1m", interval="500ms", slots="8")
    assert (seen.limits.age_cut, seen.limits.window, seen.limits.prefill_budget, seen.interval) == (7, 5, 60, 0.5)
    assert seen.limits.deadlines == {"interactive": 10.0}
    assert type(seen.interval) is float
    assert [engine.slots for engine in seen.engines] == [8]


def test_an_engine_whose_name_does_not_resolve_is_watched_all_the_same(tmp_path: Path):
    """Its page will say what is wrong; addresses that are configured serve for its sockets."""
    settings = from_file(tmp_path, "engines: [{url: 'http://gone:1', addresses: ['10.0.0.9:80']}]")
    (engine,) = asyncio.run(topology(settings, resolve)).engines
    assert engine == Engine("gone:1", "http://gone:1", (Endpoint("10.0.0.9", 80),))


def test_a_hop_that_listens_where_an_engine_is_is_refused():
    """The proxy's address was given for the engine, or the reverse: every stream would be its own client."""
    for hop in ("edge=8000", "edge=127.0.0.1:8000"):
        message = refusal(lambda hop=hop: watched(("a=http://127.0.0.1:8000",), hop))
        assert message.startswith("hops say that edge listens on ")
        assert "where engine a is; expected" in message
    assert watched(("a=http://127.0.0.1:8000",), "edge=10.0.0.5:8000").hops  # nginx on the same port of another address


VLLM = Engine("vllm-8000", "http://127.0.0.1:8000", (Endpoint(None, 8000),))
OTHER = Engine("vllm-8001", "http://127.0.0.1:8001", (Endpoint(None, 8001),))
NGINX = Hop("nginx", (Endpoint(None, 8080),), ("vllm-8000",))


def test_what_was_found_is_watched_besides():
    """Engines and hops of the host, with the settings' slots; a configured chain goes to found engines as well."""
    seen = watched((), "edge=9000", found=((VLLM, OTHER), (NGINX,)), auto=True, slots="16")
    assert [(engine.name, engine.slots) for engine in seen.engines] == [("vllm-8000", 16), ("vllm-8001", 16)]
    assert {hop.name: hop.to for hop in seen.hops} == {"edge": ("vllm-8000", "vllm-8001"), "nginx": ("vllm-8000",)}


def test_what_was_found_at_a_configured_address_is_the_configured_one():
    """It is watched once, under the configured name, also as the target of what was found."""
    haproxy = Hop("haproxy", (Endpoint(None, 9090),), ("nginx",))
    seen = watched(("worker=http://127.0.0.1:8000",), "edge=8080", found=((VLLM,), (NGINX, haproxy)), auto=True)
    assert [engine.name for engine in seen.engines] == ["worker"]
    assert [(hop.name, hop.to) for hop in seen.hops] == [("haproxy", ("edge",)), ("edge", ("worker",))]


def test_a_name_that_is_taken_gets_the_port():
    """A configured name is kept; what was found elsewhere under the same name is told apart."""
    seen = watched(("vllm-8000=http://10.0.0.5:8000",), "nginx=9000", found=((VLLM,), (NGINX,)), auto=True)
    assert [engine.name for engine in seen.engines] == ["vllm-8000", "vllm-8000-8000"]
    assert {hop.name: hop.to for hop in seen.hops}["nginx-8080"] == ("vllm-8000-8000",)


def test_with_auto_a_hop_may_forward_to_what_is_found(tmp_path: Path):
    """And it is refused only when that is not found."""
    settings = from_file(tmp_path, "auto: true\nhops: [{name: edge, listen: 80, to: vllm-8000}]")
    assert asyncio.run(topology(settings, resolve, (VLLM,), ())).hops[0].to == ("vllm-8000",)
    message = refusal(lambda: asyncio.run(topology(settings, resolve, (OTHER,), ())))
    assert message == "hops is vllm-8000 for edge; expected vllm-8001"


def test_proxies_that_call_each_other_are_watched_in_any_order():
    """Found ones may; it is no reason not to start."""
    ring = (Hop("x", (Endpoint(None, 1),), ("y",)), Hop("y", (Endpoint(None, 2),), ("x", "vllm-8000")))
    assert [hop.name for hop in watched((), found=((VLLM,), ring), auto=True).hops] == ["x", "y"]


# --- the documentation ----------------------------------------------------------------------------------------------

BEGIN, END = "<!-- made from exporter/tokengap/config/settings.py by `make accept` -->\n", "<!-- /made -->"


def tables() -> str:
    """Return the tables of all settings as the documentation shows them."""
    lines = ["| file | flag | variable | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for setting in SETTINGS:
        metavar = f" {setting.metavar}".replace("|", "\\|") if setting.metavar else ""
        flags = "<br>".join(f"`{flag}{metavar}`" for flag in setting.flags)
        lines.append(
            f"| `{setting.key}` | {flags} | `{setting.variable}` | `{setting.default}` | {setting.shape.meaning} |"
        )
    for title, kind in (
        ("an engine", EngineSettings),
        ("a hop", HopSettings),
        ("an entry of `haproxy_socket`", HaproxySettings),
        ("an entry of `envoy_admin` or `nginx_status`", InterfaceSettings),
    ):
        lines += ["", f"In the file {title} has these keys:", "", "| key | takes | meaning |", "| --- | --- | --- |"]
        for declared in msgspec.structs.fields(kind):
            shape = Shape.of(declared.type)
            needed = "" if not declared.required else " Required."
            lines.append(f"| `{declared.encode_name}` | {shape.expects} | {shape.meaning}{needed} |")
    return "\n".join(lines) + "\n"


def test_golden_every_setting_is_in_the_documentation():
    """The tables of docs/configuration.md are those of the code. If this fails: `make accept`, and look at the diff."""
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}{tables()}{END}{after}"
    if os.environ.get("TOKENGAP_ACCEPT"):
        DOCS.write_text(wanted)
    assert DOCS.read_text() == wanted


def test_the_examples_of_the_documentation_are_right(tmp_path: Path):
    """The file and the variables shown there are read, and say what the text around them says."""
    text = DOCS.read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    settings = from_file(tmp_path, example)
    assert [engine.name for engine in settings.engines] == ["worker", "10.0.0.8:8000"]
    assert [hop.name for hop in settings.hops] == ["edge", "admit"]
    assert settings.classes == {"batch": 300.0, "offline": None}
    settings = load(None, dict(re.findall(r'export (\w+)="(.*)"', text)), {})
    assert [hop.listen for hop in settings.hops] == [(":8080", ":8443"), (":8090",)]
    assert len(settings.engines) == len(settings.classes) == 2


def test_the_messages_of_the_documentation_are_those_that_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Word by word."""
    shown = re.findall(r"^tokengap: (.*)$", DOCS.read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("tokengap.yaml").write_text("engines:\n- url: http://h:1\n  slot: 3\n")
    said = [
        refusal(lambda: load(Path("tokengap.yaml"), {}, {})),
        refusal(lambda: load(None, {"TOKENGAP_INTERVAL": "fast"}, {})),
        refusal(lambda: load(None, {}, {"age_cut": "9s"})),
    ]
    assert said == shown
