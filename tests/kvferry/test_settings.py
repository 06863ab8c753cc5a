from pathlib import Path

import pytest

from kvcache.layout import KvLayout
from kvferry.errors import BadSettings
from kvferry.flags import flags_of
from kvferry.settings import (
    Settings,
    as_yaml,
    child_environment,
    default_state_dir,
    load,
    parse_assignments,
    unknown_variables,
)

FILE = """
model: checksum
num_prefill: 3
router:
  http_port: 8100
decode:
  tp: 3
  num_blocks: 99
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvferry.yaml"
    path.write_text(FILE)
    return path


def test_by_default_two_prefill_workers_and_one_decode_group_of_two_ranks_serve_smollm2() -> None:
    settings = load()
    assert settings.model == "smollm2"
    assert settings.launcher == "ray"
    assert settings.num_prefill == 2
    assert settings.num_decode == 1
    assert settings.prefill.tp == 1
    assert settings.decode.tp == 2
    assert settings.router.http_port == 8000
    assert settings.router.grpc_port == 50051


def test_the_file_beats_the_defaults(file: Path) -> None:
    settings = load(file)
    assert settings.num_prefill == 3
    assert settings.router.http_port == 8100
    assert settings.decode.tp == 3
    assert settings.decode.num_blocks == 99
    assert settings.prefill.num_blocks == 1024


def test_the_environment_beats_the_file_and_a_flag_beats_both(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_NUM_PREFILL", "4")
    monkeypatch.setenv("KVFERRY_ROUTER__HTTP_PORT", "8200")
    monkeypatch.setenv("KVFERRY_DECODE__TP", "2")
    settings = load(file, {"decode": {"tp": 1}})
    assert settings.num_prefill == 4
    assert settings.router.http_port == 8200
    assert settings.decode.tp == 1
    assert settings.decode.num_blocks == 99  # of the file, beside what the others set


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("DECODE", "3", r"decode = 3: it has fields, such as decode\.name"),
        ("DECODE", '{"tp": 3', r"decode = '\{\"tp\": 3': it has fields"),
        ("DECODE__TP__X", "3", r"decode\.tp = \{'x': '3'\}"),
        ("PREFILL__WIRES", "shm, smoke", r"prefill\.wires\.1 = 'smoke'"),
        ("ROUTER__TENANT_WEIGHTS", "much", r"router\.tenant_weights = 'much'"),
        ("ROUTER__API_KEYS", "hush", r"^router\.api_keys: input should be a valid dictionary$"),
    ],
)
def test_a_variable_of_the_wrong_shape_is_refused_by_the_name_of_its_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(f"KVFERRY_{name}", value)
    with pytest.raises(BadSettings, match=sentence):
        load()


def test_a_variable_holds_yaml_and_a_list_may_be_said_with_commas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVFERRY_WIRES", "tcp, grpc")
    monkeypatch.setenv("KVFERRY_DECODE__WIRES", '["grpc"]')
    monkeypatch.setenv("KVFERRY_ROUTER", "{api_keys: {k: shop}, tenant_weights: {shop: 2}}")
    settings = load()
    assert settings.prefill.wires == ("tcp", "grpc")
    assert settings.decode.wires == ("grpc",)
    assert settings.router.api_keys == {"k": "shop"}
    assert settings.router.tenant_weights == {"shop": 2.0}
    assert load(flags=flags_of(["prefill.wires=shm"])).prefill.wires == ("shm",)


def test_variables_that_are_no_settings_are_named_with_what_they_may_have_meant() -> None:
    environment = ["PATH", "KVFERRY_MODEL", "KVFERRY_DECODE__TP", "KVFERRY_NUM_PREFIL", "KVFERRY_Q"]
    assert unknown_variables(environment) == [
        "KVFERRY_NUM_PREFIL is no setting: KVFERRY_NUM_PREFILL is",
        "KVFERRY_Q is no setting",
    ]


def test_a_shared_field_reaches_every_section_that_does_not_set_it_itself(file: Path) -> None:
    settings = load(file, {"key_prefix": "blue", "wires": ["grpc"], "decode": {"model": "smollm2"}})
    assert settings.router.model == "checksum"
    assert settings.prefill.model == "checksum"
    assert settings.decode.model == "smollm2"
    assert settings.router.key_prefix == "blue"
    assert settings.prefill.wires == ("grpc",)
    assert settings.decode.key_prefix == "blue"


def test_each_role_may_have_blocks_and_pools_of_its_own_shape(file: Path) -> None:
    flags = flags_of(["kv_layout=token-major"], prefill__block_size=32, block_size=64)
    settings = load(file, flags)
    assert (settings.prefill.block_size, settings.decode.block_size) == (32, 64)
    assert settings.prefill.kv_layout is settings.decode.kv_layout is KvLayout.TOKEN_MAJOR
    again = type(settings.prefill).model_validate_json(settings.prefill.model_dump_json())
    assert again == settings.prefill
    assert load(file).decode.kv_layout is KvLayout.HEAD_MAJOR
    with pytest.raises(BadSettings, match=r"decode\.kv_layout = 'diagonal'"):
        load(file, {"decode": {"kv_layout": "diagonal"}})


def test_the_redis_that_was_found_reaches_every_section() -> None:
    settings = load().with_redis("redis://127.0.0.1:7000/0")
    sections = (settings.router, settings.prefill, settings.decode)
    assert {section.redis_url for section in sections} == {"redis://127.0.0.1:7000/0"}
    assert settings.redis_url == "redis://127.0.0.1:7000/0"


def test_workers_are_numbered() -> None:
    settings = load()
    assert settings.prefill_worker(1).name == "prefill-1"
    assert settings.decode_worker(0).name == "decode-0"


def test_ranks_get_the_threads_that_are_left_open_and_keep_those_that_are_set() -> None:
    settings = load(flags={"num_prefill": 2, "prefill": {"threads": 3}, "decode": {"tp": 2}})

    assert settings.num_ranks == 4
    assert settings.prefill_worker(0, threads=1).threads == 3
    assert settings.decode_worker(0, threads=1).threads == 1


def test_settings_never_change_after_they_were_composed() -> None:
    settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.model = "checksum"
    with pytest.raises(ValueError, match="frozen"):
        settings.decode.tp = 5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("modell: smollm2", "there is no setting modell: model is$"),
        ("router: {http_prt: 1}", "there is no setting router.http_prt: router.http_port is$"),
        ("num_blocks: 1", "no setting num_blocks: prefill.num_blocks and decode.num_blocks are$"),
        ("decode: {colour: red}", "there is no setting decode.colour$"),
        ("router: {grpc_port: 8000}", "router: grpc_port and http_port are both 8000: change one"),
        ("decode: {port: 9, system_port: 9}", "decode: port and system_port are both 9: change"),
        ("decode: {wires: [owl]}", r"^decode\.wires\.0 = 'owl': input should be [^;]* or 'nccl'$"),
        ("decode: {tp: 0}", r"decode.tp = 0: input should be greater than or equal to 1"),
        ("num_prefill: many", "num_prefill = 'many': input should be a valid integer"),
        ("- a\n- b", "must hold a mapping of settings"),
        ("prefill: {name: a/b}", r"prefill.name = 'a/b': .* pattern '\^\[A-Za-z0-9\]"),
        ("a: [", "is not YAML"),
        ("router: 5", "router = 5"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_key_and_the_value(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text(text)
    with pytest.raises(BadSettings, match=sentence):
        load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="cannot read the settings file"):
        load(tmp_path / "none.yaml")


def test_a_file_that_sets_something_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text("prefill:\n  tp: 1\ndecode: {tp: 2}\nprefill: {tp: 3}\n")
    with pytest.raises(BadSettings, match=r"yaml: prefill is set in line 1 and in line 4$"):
        load(path)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text("# nothing yet\n")
    assert load(path) == load()
    path.write_text("redis_url:\n")
    assert load(path) == load()


def test_assignments_reach_any_setting() -> None:
    assert parse_assignments(["decode.tp=3", "model=checksum", "prefill.wires=[grpc]"]) == {
        "decode": {"tp": 3},
        "model": "checksum",
        "prefill": {"wires": ["grpc"]},
    }
    for wrong in ("decode.tp", "=3", ".=3"):
        with pytest.raises(BadSettings, match="KEY=VALUE"):
            parse_assignments([wrong])
    with pytest.raises(BadSettings, match="both a value and fields"):
        parse_assignments(["decode=3", "decode.tp=3"])


def test_all_settings_as_yaml_load_as_the_same_and_tell_no_secret(tmp_path: Path) -> None:
    settings = load(flags=flags_of(["decode.tp=3", "wires=tcp,grpc", "prefill.block_size=64"]))
    path = tmp_path / "all.yaml"
    path.write_text(as_yaml(settings))
    assert load(path) == settings
    secret = flags_of(["router.api_keys={hush: shop}", "redis_url=redis://me:hush@host:1/0"])
    shown = as_yaml(load(flags=secret))
    assert "hush" not in shown
    assert "'***0': shop" in shown and shown.count("redis_url: redis://me:***@host:1/0") == 4


def test_a_section_written_for_a_child_loads_as_the_same_settings(tmp_path: Path) -> None:
    settings = load(flags={"model": "checksum", "decode": {"tp": 3}})
    section = settings.decode_worker(1)
    path = tmp_path / "decode-1.json"
    path.write_text('{"decode": ' + section.model_dump_json() + "}")
    assert load(path).decode == section


def test_a_child_inherits_nothing_that_would_override_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVFERRY_DECODE__TP", "9")
    monkeypatch.setenv("PATH", "/bin")
    assert "KVFERRY_DECODE__TP" not in child_environment()
    assert child_environment()["PATH"] == "/bin"


def test_the_state_directory_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_state_dir() == tmp_path / "kvferry"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_state_dir().name.startswith("kvferry-")
    assert Settings.model_fields["state_dir"].default_factory is default_state_dir


@pytest.mark.parametrize("section", ["router", "prefill", "decode"])
@pytest.mark.parametrize("host", ["::1", "[::1]", "fe80::1%eth0"])
def test_an_ipv6_host_is_refused_at_start_with_what_to_give_instead(
    section: str, host: str
) -> None:
    with pytest.raises(BadSettings, match="is an IPv6 address: give an IPv4 address or a name"):
        load(flags={section: {"host": host}})
