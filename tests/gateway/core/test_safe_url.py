"""Where requests may go, against every way that is known to make a server speak to its own network."""

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.safe_url import INNER, METADATA, UnsafeUrl, check_addresses, is_fit, parse_url

# IANA's special-purpose registries and multicast, in words of their own.
CLOSED = [
    ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        *("::/128", "::1/128", "::/96", "100::/64", "2001::/32", "2001:db8::/32", "2002::/16"),
        *("64:ff9b:1::/48", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
    )
]
CLOSED4 = [network for network in CLOSED if network.version == 4]
WRAPPERS = ("::ffff:{}", "64:ff9b::{}")


def inside(networks):
    """Addresses of any of them, the first and the last ones more often."""

    def of(network):
        first, last = int(network.network_address), int(network.broadcast_address)
        kind = IPv4Address if network.version == 4 else IPv6Address
        return st.one_of(st.sampled_from([first, last]), st.integers(first, last)).map(kind)

    return st.sampled_from(networks).flatmap(of)


@given(inside(CLOSED))
def test_no_special_address_is_fit(address):
    assert not is_fit(address)


@given(st.one_of(inside(CLOSED4), st.ip_addresses(v=4)), st.sampled_from(WRAPPERS), st.booleans())
def test_an_ipv4_address_is_judged_the_same_in_any_wrapping(address, wrapper, inner):
    assert is_fit(ip_address(wrapper.format(address)), inner=inner) == is_fit(address, inner=inner)


@given(st.one_of(inside(CLOSED), st.ip_addresses()))
def test_inner_networks_are_all_that_allowing_them_adds(address):
    unwrapped = getattr(address, "ipv4_mapped", None) or address
    if address in ip_network("64:ff9b::/96"):
        unwrapped = IPv4Address(int(address) % 2**32)
    added = any(unwrapped in network for network in INNER) and unwrapped not in METADATA
    assert is_fit(address, inner=True) == (is_fit(address) or added)


@pytest.mark.parametrize(
    "address", [*sorted(map(str, METADATA)), "0.0.0.0", "255.255.255.255", "224.0.0.1", "169.254.0.1"]
)
@pytest.mark.parametrize("inner", [False, True])
def test_metadata_and_addresses_of_no_host_are_closed_even_to_those_who_may_go_inside(address, inner):
    with pytest.raises(UnsafeUrl, match=r"^hooks\.example is at"):
        check_addresses("hooks.example", [address], inner=inner)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::5db8:d822"])
def test_the_open_internet_is_open(address):
    assert check_addresses("hooks.example", [address]) == [ip_address(address)]


@pytest.mark.parametrize("found", [[], ["1.1.1.1", "127.0.0.1"], ["10.0.0.1", "1.1.1.1"], ["fe80::1%eth0"], ["eth0"]])
def test_one_bad_address_spoils_the_others(found):
    with pytest.raises(UnsafeUrl):
        check_addresses("hooks.example", found)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "0", "localhost"),
        *("[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[0:0:0:0:0:0:0:1]"),
        *("169.254.169.254", "2852039166", "[fd00:ec2::254]", "[::ffff:169.254.169.254]", "192.168.0.1", "127.0.0.1."),
    ],
)
def test_no_spelling_of_a_closed_address_gets_through(host):
    url = parse_url(f"https://{host}/hook")
    try:
        found = [place[0] for *_, place in socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)]
    except OSError:
        return  # not an address to this machine's resolver
    with pytest.raises(UnsafeUrl):
        check_addresses(url.host, found)


@pytest.mark.parametrize(
    "text",
    [
        *("", "hooks.example", "//hooks.example", "https://", "https:///path", "https:hooks.example", "ftp://a/"),
        *("http://hooks.example/", "file:///etc/passwd", "gopher://a:70/_", "javascript:alert(1)"),
        *("https://user@hooks.example/", "https://user:pw@hooks.example/", "https://a#@b/", "https://a/#x"),
        *("https://a\\@b/", "https://a b/", "https://a\t/", "https://a\r\nhost: b/", "https://a/\x00", "https://é.fr/"),
        *("https://a:0/", "https://a:65536/", "https://a:x/", "https://a:-1/", "https://[::1/", "https://[::1%25lo]/"),
        *("https://%31%32%37.0.0.1/", "https://[v1.x]/", "https://a/" + "x" * 2048, "https://-a/", "https://[::1]x/"),
    ],
)
def test_what_is_no_plain_https_url_is_refused(text):
    with pytest.raises(UnsafeUrl):
        parse_url(text)


def test_http_is_for_those_who_ask_for_it():
    assert parse_url("http://hooks.example/x?y=1", plain=True).target == "/x?y=1"
    with pytest.raises(UnsafeUrl):
        parse_url("ftp://hooks.example/", plain=True)


URLS = st.builds(
    "https://{}{}{}".format,
    st.from_regex(r"[A-Za-z0-9_.\-@\[\]:%]{1,30}", fullmatch=True),
    st.sampled_from(["", ":8443", ":80"]),
    st.from_regex(r"(/[a-z0-9?&=%.;]{0,12})?", fullmatch=True),
)


@given(st.one_of(URLS, st.text(max_size=40)))
def test_what_is_accepted_has_the_same_host_for_another_parser(text):
    try:
        ours = parse_url(text)
    except UnsafeUrl:
        return
    other = httpx.URL(text)
    assert ours.host == other.host.lower()
    assert ours.port == (other.port or 443)
    path = ours.target.split("?")[0]
    if not {".", ".."} & set(path.split("/")):  # httpx resolves these, we leave them to the server
        assert path.encode() == other.raw_path.split(b"?")[0]
    assert parse_url(f"https://{ours.authority}{ours.target}") == ours
