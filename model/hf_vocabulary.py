"""The vocabulary of a Hugging Face folder: `tokenizer.json` and the files that complete it.

`tokenizer.json` decides the ids. `tokenizer_config.json` names the special tokens and may hold the
chat template; `generation_config.json` may list more tokens that end a text.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as Codec

from model.errors import BadModelFile
from model.fields import Fields
from model.vocabulary import AddedToken, Json, Vocabulary, merged_tokens


def read_hf_vocabulary(folder: Path) -> Vocabulary:
    """Raises BadModelFile with a sentence that names the file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BadModelFile(f"{folder} has no tokenizer.json; save the fast tokenizer there first")
    written = _read_json(path)
    config = _read_json(folder / "tokenizer_config.json", optional=True)
    config = _read_json(folder / "special_tokens_map.json", optional=True) | config
    codec = _codec(path, written)
    roles = {role: _role(codec, config, role, path) for role in ("bos", "eos", "unk", "pad")}
    _mark_roles(written, codec, (role for role in roles.values() if role is not None))
    generation = Fields(
        str(folder / "generation_config.json"),
        _read_json(folder / "generation_config.json", optional=True),
    )
    ends = [roles["eos"], *generation.integers("eos_token_id")]
    written["truncation"] = written["padding"] = None
    return Vocabulary(
        origin=str(path),
        document=written,
        size=codec.get_vocab_size(with_added_tokens=True),
        bos_token_id=roles["bos"],
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        unk_token_id=roles["unk"],
        pad_token_id=roles["pad"],
        adds_bos=_adds_bos(codec, config, roles["bos"]),
        chat_template=_chat_template(folder, config),
    )


def _read_json(path: Path, *, optional: bool = False) -> Json:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadModelFile(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise BadModelFile(f"{path} is not a JSON object")
    return value


def _codec(path: Path, written: Json) -> Codec:
    try:
        return Codec.from_str(json.dumps(written))
    except Exception as error:  # whatever the library raises; it has no type of its own
        raise BadModelFile(f"{path} is not a tokenizer we can load: {error}") from None


def _role(codec: Codec, config: Json, role: str, path: Path) -> int | None:
    named = config.get(f"{role}_token")
    content = named.get("content") if isinstance(named, dict) else named
    if content is None:
        return None
    token_id = codec.token_to_id(content) if isinstance(content, str) else None
    if token_id is None:
        raise BadModelFile(f"{path} has no token {content!r}, named as {role}_token")
    return token_id


def _mark_roles(written: Json, codec: Codec, role_ids: Iterable[int]) -> None:
    """Make control tokens of those with a role, and match every control token as it is written.

    An ordinary token may have a role too (`!` as the padding, say), and stays ordinary.
    """
    added = written.setdefault("added_tokens", [])
    model = written.get("model")
    assert isinstance(added, list) and isinstance(model, dict)
    known = {token["id"]: token for token in added}
    ordinary = merged_tokens(model) if model.get("type") == "BPE" else set(model.get("vocab", ()))
    for token_id in dict.fromkeys(role_ids):
        content = codec.id_to_token(token_id) or ""
        if token_id in known:
            known[token_id]["special"] = True
        elif len(content) > 1 and content not in ordinary:
            added.append(AddedToken(token_id, content, special=True).to_json())
    for token in added:
        token["normalized"] = token["normalized"] and not token["special"]
    added.sort(key=lambda token: token["id"])


def _adds_bos(codec: Codec, config: Json, bos: int | None) -> bool:
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said and bos is not None
    with_specials = codec.encode("a", add_special_tokens=True).ids
    plain = codec.encode("a", add_special_tokens=False).ids
    return bos is not None and with_specials[:1] == [bos] and plain[:1] != [bos]


def _chat_template(folder: Path, config: Json) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadModelFile(f"{path} cannot be read: {error}") from None
    alone = _read_json(folder / "chat_template.json", optional=True)
    template = alone.get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
