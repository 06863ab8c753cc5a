"""Everything a cluster is told, composed once from a YAML file, the environment and flags.

The file has one section per component, each with the fields of that component's own model:

    model: smollm2            # shared by all components
    num_prefill: 2
    router: {http_port: 8000}
    prefill: {tp: 1}
    decode: {tp: 2}

A flag beats the environment (`KVFERRY_MODEL`, `KVFERRY_ROUTER__HTTP_PORT`), which beats the file,
which beats the defaults. The same file serves `kvferry up` and the roles that pods run. Nothing
else in the project reads the environment.
"""

import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from decode_worker.settings import DecodeSettings
from kvferry.errors import BadSettings
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings
from worker.settings import Listed

ENV_PREFIX = "KVFERRY_"
SECTIONS: dict[str, type[BaseModel]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}
SHARED = (
    "model",
    "redis_url",
    "key_prefix",
    "block_size",
    "kv_layout",
    "dtype",
    "weights",
    "wires",
)
# What a section's own model leaves open, or what suits one machine better than its default.
SECTION_DEFAULTS: dict[str, dict[str, Any]] = {
    "router": {},
    "prefill": {"name": "prefill-0"},
    "decode": {"name": "decode-0", "tp": 2},
}


def default_state_dir() -> Path:
    """Where `up` leaves word of the running cluster: private to the user, gone after a reboot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "kvferry"
    return Path(tempfile.gettempdir()) / f"kvferry-{os.getuid()}"


def child_environment() -> dict[str, str]:
    """The environment of our own processes, which get their settings as a file instead."""
    return {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}


class YamlEnvironment(EnvSettingsSource):
    """The environment, whose values are YAML as those of `--set` are."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """What is no YAML stays as it is, so that the field itself refuses it by its name."""
        return _yaml_or_text(value)


class Settings(BaseSettings):
    """The whole cluster. A shared field reaches each section that does not set it itself."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid"
    )

    model: Annotated[str, Field(min_length=1)] = "smollm2"
    launcher: Literal["ray", "local"] = "ray"
    num_prefill: Annotated[int, Field(ge=1, le=64)] = 2
    num_decode: Annotated[int, Field(ge=1, le=64)] = 1
    redis_url: str = ""  # empty: `up` finds or starts one
    key_prefix: Annotated[str, Field(min_length=1, max_length=32)] = "kvferry"
    block_size: int | None = None  # None, here and below: the workers' own
    kv_layout: str | None = None
    dtype: str | None = None
    weights: str | None = None
    wires: Listed[tuple[str, ...]] | None = None
    state_dir: Path = Field(default_factory=default_state_dir)
    start_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 180.0
    router: RouterSettings
    prefill: PrefillSettings
    decode: DecodeSettings

    @model_validator(mode="before")
    @classmethod
    def _complete_sections(cls, values: dict[str, Any]) -> dict[str, Any]:
        completed = dict(values)
        if "redis_url" in completed:  # nothing after the colon is nothing, too
            completed["redis_url"] = completed["redis_url"] or ""
        given = {key: values[key] for key in SHARED if values.get(key) not in (None, "")}
        given.setdefault("model", cls.model_fields["model"].default)
        for name, component in SECTIONS.items():
            section = values.get(name) or {}
            if isinstance(section, Mapping):
                shared = {key: given[key] for key in given if key in component.model_fields}
                completed[name] = SECTION_DEFAULTS[name] | shared | dict(section)
        return completed

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(init_settings, InitSettingsSource)
        file = init_settings.init_kwargs.pop("config_file", None)
        in_file = {} if file is None else read_file(Path(file))
        environment = YamlEnvironment(settings_cls)
        return init_settings, environment, InitSettingsSource(settings_cls, in_file)

    def with_redis(self, url: str) -> Self:
        """The same settings, with every component pointed at this Redis."""
        sections = {
            name: getattr(self, name).model_copy(update={"redis_url": url}) for name in SECTIONS
        }
        return self.model_copy(update={"redis_url": url, **sections})

    @property
    def num_ranks(self) -> int:
        """Of all workers of the cluster."""
        return self.num_prefill * self.prefill.tp + self.num_decode * self.decode.tp

    def prefill_worker(self, index: int, threads: int = 0) -> PrefillSettings:
        """`threads` for each rank where the settings leave it open."""
        threads = self.prefill.threads or threads
        return self.prefill.model_copy(update={"name": f"prefill-{index}", "threads": threads})

    def decode_worker(self, index: int, threads: int = 0) -> DecodeSettings:
        threads = self.decode.threads or threads
        return self.decode.model_copy(update={"name": f"decode-{index}", "threads": threads})


def load(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Compose the settings. Raises BadSettings, naming the key and the value that will not do."""
    try:
        return Settings(config_file=file, **(flags or {}))  # type: ignore[call-arg]
    except ValidationError as error:
        raise BadSettings(_sentence(error)) from None


def as_yaml(settings: Settings) -> str:
    """All of them, as a file would hold them; without the API keys and the password of Redis."""
    values = settings.model_dump(mode="json")
    for part in (values, *(values[name] for name in SECTIONS)):
        part["redis_url"] = hide_password(part["redis_url"])
    keys = values["router"]["api_keys"]
    values["router"]["api_keys"] = {f"***{number}": keys[key] for number, key in enumerate(keys)}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def hide_password(url: str) -> str:
    """The URL for people to see."""
    try:
        parts = urlsplit(url)
        user, at, address = parts.netloc.rpartition("@")
        name = user.partition(":")[0]
        return urlunsplit(parts._replace(netloc=f"{name}:***@{address}" if at else address))
    except ValueError:
        return re.sub(r"//.*@", "//***@", url)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises BadSettings when there is none."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_EachKeyOnce)
    except _Twice as twice:
        raise BadSettings(f"{path}: {twice}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"cannot read the settings file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise BadSettings(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise BadSettings(f"{path} must hold a mapping of settings, such as `model: smollm2`")
    return content


class _Twice(Exception):
    """A key that a mapping has more than once."""


class _EachKeyOnce(yaml.SafeLoader):
    """Of a key that stands in a mapping twice, YAML by itself silently takes the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _Twice(f"{key.value} is set in line {lines[key.value]} and in line {line}")
            lines[str(key.value)] = line
        return super().construct_mapping(node, deep)


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """`["decode.tp=3"]` as `{"decode": {"tp": 3}}`; values are YAML."""
    flags: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip("."):
            raise BadSettings(
                f"--set takes KEY=VALUE, such as decode.num_blocks=512: {assignment!r}"
            )
        *outer, last = key.strip().split(".")
        section = flags
        for part in outer:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise BadSettings(f"--set gives {part} both a value and fields")
        section[last] = _yaml_or_text(value)
    return flags


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Variables that look like settings of ours and are none, each with what it may have meant.

    They are no error: Kubernetes makes some for every service whose name begins like ours.
    """
    known = [field.upper() for field in Settings.model_fields]
    said = []
    for name in sorted(environment):
        field = name.upper().split("__")[0].removeprefix(ENV_PREFIX)
        if name.upper().startswith(ENV_PREFIX) and field not in known:
            close = get_close_matches(field, known, n=1)
            said.append(f"{name} is no setting" + "".join(f": {ENV_PREFIX}{it} is" for it in close))
    return said


def _yaml_or_text(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _sentence(error: ValidationError) -> str:
    problems = []
    found = error.errors(include_url=False)
    for problem in found:
        if any(_is_inside(other["loc"], problem["loc"]) for other in found):
            continue  # it only follows from that
        key = ".".join(str(part) for part in problem["loc"]) or "settings"
        given = problem["input"]
        if "api_keys" in problem["loc"]:
            problems.append(f"router.api_keys: {_said(problem)}")  # whose values are secret
        elif problem["type"] == "extra_forbidden":
            problems.append(f"there is no setting {key}{_meant(problem['loc'])}")
        elif problem["type"] == "missing":
            problems.append(f"{key} is missing")
        elif problem["type"] == "model_type":
            problems.append(f"{key} = {given!r}: it has fields, such as {key}.{_first_field(key)}")
        elif problem["type"] == "value_error":  # of several fields: its own words say which
            problems.append(f"{key}: {problem['msg'].removeprefix('Value error, ')}")
        else:
            problems.append(f"{key} = {given!r}: {_said(problem)}")
    return "; ".join(problems)


def _is_inside(inner: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _meant(loc: tuple[int | str, ...]) -> str:
    """What may have been meant: that name in another place, else almost that name in this one."""
    *outer, field = (str(part) for part in loc)
    here = SECTIONS.get(outer[0]) if outer else Settings
    meant = [
        f"{name}.{field}" for name, section in SECTIONS.items() if field in section.model_fields
    ]
    if here is not None and not meant:
        close = get_close_matches(field, here.model_fields, n=1)
        meant = [".".join([*outer, name]) for name in close]
    return f": {' and '.join(meant)} {'are' if len(meant) > 1 else 'is'}" if meant else ""


def _first_field(section: str) -> str:
    return next(iter(SECTIONS[section].model_fields))


def _said(problem: ErrorDetails) -> str:
    message = problem["msg"]
    return message[:1].lower() + message[1:]
