import pytest

from baton.config import TlsConfig, sections
from baton.core.errors import SetupError
from commands.settings import load_config, settings
from tests.certificates import tls_environment


def test_flags_win_over_sets_and_sets_over_the_environment(monkeypatch):
    monkeypatch.setenv("BATON_TRANSFER__LEASE_S", "7")
    monkeypatch.setenv("BATON_ROUTER__PORT", "1111")
    config = load_config(
        ["router.port=2222", "engine.block_tokens=16"], {"router.port": 3333, "model.path": None}
    )
    assert config.transfer.lease_s == 7
    assert config.router.port == 3333
    assert config.engine.block_tokens == 16


@pytest.mark.parametrize("text", ["nixl", "tcp,nixl", '["tcp", "nixl"]'])
def test_lists_are_json_or_separated_by_commas(text):
    backends = load_config([f"transfer.backends={text}"]).transfer.backends
    assert sorted(backends) in (["nixl"], ["nixl", "tcp"])


def test_a_text_with_a_comma_stays_a_text():
    assert load_config(["router.tenant_salt=a,b"]).router.tenant_salt == "a,b"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("engine.nonsense=1", "engine.nonsense"),
        ("nonsense.x=1", "nonsense"),
        ("engine.block_tokens=0", "engine.block_tokens"),
        ("engine.block_tokens=many", "engine.block_tokens"),
        ("engine.block_tokens", "section.field=value"),
        ("transfer.backends=pigeon", "transfer.backends"),
        ("transfer.backends=[", "transfer.backends"),
        ("model.dtype=int4", "model.dtype"),
        ("autoscale.headroom=nan", "autoscale.headroom"),
        ("router.predictor_error_max=inf", "router.predictor_error_max"),
        ("slo.classes.fast.ttft_s=nan", "slo.classes.fast.ttft_s"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_setting(text, names):
    with pytest.raises(SetupError) as caught:
        load_config([text])
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_entry_of_a_list_is_reported_once():
    with pytest.raises(SetupError) as caught:
        load_config(["transfer.backends=pigeon"])
    assert str(caught.value).startswith("transfer.backends.0: ")
    assert "at least 1 item" not in str(caught.value)


@pytest.mark.parametrize(
    "texts", [("slo.classes=abc", "slo.classes.x.y=1"), ("slo.classes.x=5", "slo.classes.x.ttft_s=1")]
)
def test_a_map_and_a_part_of_it_do_not_go_together(texts):
    with pytest.raises(SetupError, match="leave one of the two out"):
        load_config(texts)


def test_a_bad_environment_is_one_line_too(monkeypatch):
    monkeypatch.setenv("BATON_ENGINE__BLOCK_TOKENS", "0")
    with pytest.raises(SetupError, match=r"engine\.block_tokens"):
        load_config()


def test_every_setting_is_listed_and_can_be_set_to_its_own_default(monkeypatch):
    for name in tls_environment(TlsConfig()):  # a run with mutual TLS has other values there
        monkeypatch.delenv(name, raising=False)
    listed = list(settings())
    assert len(listed) == 1 + sum(len(section.model_fields) for section in sections().values())
    assert listed[0][0] == "models"  # it consists of the others
    for name, kind, default, variable, _ in listed[1:]:
        assert kind
        assert variable == f"BATON_{name.replace('.', '__').upper()}"
        text = ",".join(default) if isinstance(default, tuple) else str(default)
        section, field = name.split(".")
        assert getattr(getattr(load_config([f"{name}={text}"]), section), field) == default


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 * 2**20), ("1.5GiB", 3 * 2**29), ("64Mi", 2**26), ("500MB", 500_000_000), ("7", 7)],
)
def test_sizes_may_have_a_unit(monkeypatch, text, size):
    monkeypatch.setenv("BATON_STORE__HOST_BYTES", text)
    config = load_config([f"engine.kv_bytes={text}"])
    assert (config.engine.kv_bytes, config.store.host_bytes) == (size, size)


def test_a_unit_that_is_none_is_a_bad_value():
    with pytest.raises(SetupError, match=r"engine\.kv_bytes"):
        load_config(["engine.kv_bytes=5 apples"])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("engine.kv_byte=1", "did you mean engine.kv_bytes?"),
        ("engine.context_tokens_max=1", "did you mean model.context_tokens_max?"),
        ("routr.port=1", "did you mean router.port?"),
    ],
)
def test_a_name_that_is_nearly_one_is_asked_about(text, meant):
    with pytest.raises(SetupError, match=r"no such setting") as caught:
        load_config([text])
    assert meant in str(caught.value)
