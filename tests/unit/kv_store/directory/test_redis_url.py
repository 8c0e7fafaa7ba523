import pytest

from baton.core.errors import SetupError
from kv_store.directory.redis_url import RedisKind, RedisUrl, Tls, masked, parse_redis_url

SERVER, SENTINEL, CLUSTER = RedisKind.SERVER, RedisKind.SENTINEL, RedisKind.CLUSTER


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("redis://h", RedisUrl(SERVER, (("h", 6379),))),
        ("redis://h:1/", RedisUrl(SERVER, (("h", 1),))),
        (" redis://:p@h:1/3\n", RedisUrl(SERVER, (("h", 1),), db=3, password="p")),
        ("redis://h:1/3", RedisUrl(SERVER, (("h", 1),), db=3)),
        ("redis://[::1]:7", RedisUrl(SERVER, (("::1", 7),))),
        ("redis://:p@h", RedisUrl(SERVER, (("h", 6379),), password="p")),
        ("redis://u:p%40%2F%3A@h", RedisUrl(SERVER, (("h", 6379),), username="u", password="p@/:")),
        ("redis://u:p@q@h", RedisUrl(SERVER, (("h", 6379),), username="u", password="p@q")),
        ("rediss://h", RedisUrl(SERVER, (("h", 6379),), tls=Tls())),
        ("rediss://h?verify=ca", RedisUrl(SERVER, (("h", 6379),), tls=Tls(verify="ca"))),
        ("unix:///run/r.sock", RedisUrl(SERVER, socket_path="/run/r.sock")),
        ("unix://u:p@/a%20b?db=2", RedisUrl(SERVER, (), "/a b", db=2, username="u", password="p")),
        ("redis+sentinel://a,b:2/them", RedisUrl(SENTINEL, (("a", 26379), ("b", 2)), service="them")),
        (
            "rediss+sentinel://u:p@a/them/4?sentinel_username=s&sentinel_password=q%26",
            RedisUrl(
                SENTINEL, (("a", 26379),), "", "them", 4, "u", "p", "s", "q&", tls=Tls()
            ),
        ),
        ("redis+cluster://:p@a:1,[::2]:3", RedisUrl(CLUSTER, (("a", 1), ("::2", 3)), password="p")),
    ],
)  # fmt: skip
def test_means(url, parsed):
    assert parse_redis_url(url) == parsed


def test_files_of_tls_are_looked_for(tmp_path):
    for name in ("ca", "cert", "key"):
        (tmp_path / name).touch()
    query = f"ca={tmp_path}/ca&cert={tmp_path}/cert&key={tmp_path}/key&verify=none"
    tls = parse_redis_url(f"rediss://h?{query}").tls
    assert tls == Tls(f"{tmp_path}/ca", f"{tmp_path}/cert", f"{tmp_path}/key", "none")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "begin with redis://"),
        ("h:6379", "begin with redis://"),
        ("http://:s3cret@h", "begin with redis://"),
        ("redis+star://:s3cret@h", "begin with redis://"),
        ("unix+cluster://h", "begin with redis://"),
        ("redis://", "host:port"),
        ("redis://:s3cret@", "host:port"),
        ("redis://:s3cret@h:0", "ports 1 to 65535"),
        ("redis://:s3cret@h:99999", "ports 1 to 65535"),
        ("redis://:s3cret/x@h", "%2F"),
        ("redis://:s3cret@[::1", "hosts are written host:port"),
        ("redis://:s3cret#x@h", "%23"),
        ("redis://:s3cret@h/one", "the database is a number"),
        ("redis://:s3cret@h/1/2", "too many parts"),
        ("redis://a,b", "one host"),
        ("redis://h?ca=x", "rediss://"),
        ("redis://h?colour=red", "no such option: colour"),
        ("redis://h?sentinel_password=s3cret", "no such option: sentinel_password"),
        ("redis://h?", ""),
        ("rediss://h?ca", "?name=value"),
        ("rediss://h?ca=/not/there", "no such file"),
        ("rediss://h?key=/etc/passwd", "key needs cert"),
        ("rediss://h?verify=perhaps", "choose full, ca or none"),
        ("unix://host/path", "unix:///path"),
        ("unix://", "unix:///path"),
        ("redis+sentinel://:s3cret@h", "name the service"),
        ("redis+sentinel://h/them/x?sentinel_password=s3cret", "the database is a number"),
        ("redis+cluster://:s3cret@h/1", "no numbered databases"),
    ],
)
def test_what_is_wrong_is_said_without_what_is_secret(url, says):
    if not says:
        parse_redis_url(url)
        return
    with pytest.raises(SetupError) as caught:
        parse_redis_url(url)
    assert says in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert str(caught.value).startswith(masked(url))


def test_a_url_is_shown_without_its_secrets():
    assert masked("redis://u:s3cret@h:1/0") == "redis://***@h:1/0"
    assert masked("redis://h/0") == "redis://h/0"
    assert "s3cret" not in masked("redis+sentinel://u:p@h/x?sentinel_password=s3cret&db=1")
    for mistyped in ("redis//u:s3cret@h", "u:s3cret@h:1", "redis:/u:s3cret@h", "redis://h?Pass=s3cret"):
        assert "s3cret" not in masked(mistyped)
