"""What a body may ask of other servers and not of us.

OpenAI, vLLM, SGLang and Dynamo know fields that we do not serve. One that would change the answer
is refused by its name, unless its value asks for nothing: whoever sent it would believe that the
answer obeys it. What changes no answer (`user`, `metadata`) is ignored, as is what nobody defined.
"""

from collections.abc import Mapping

from router.errors import InvalidRequest, shown

# Beside null: the values that ask for nothing.
UNSERVED: dict[str, tuple[object, ...]] = {
    # an answer of a given form
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # how tokens are chosen
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "thinking_token_budget": (),
    # how the prompt is read
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "input_embeds": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "lora_path": (),
    "cache_salt": ("",),
    # what is said, and how
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "return_tokens_as_token_ids": (False,),
    "min_new_tokens": (0,),
    "max_new_tokens": (),
    "stop_regex": ([], ""),
    "nvext": ({},),
    "kv_transfer_params": ({},),
}
COMPLETION: dict[str, tuple[object, ...]] = {"add_special_tokens": (True,)}
CHAT: dict[str, tuple[object, ...]] = {"add_special_tokens": (False,), "echo": (False,)}


def refuse_unserved(body: Mapping[str, object], *, chat: bool) -> None:
    """Raises InvalidRequest for the first field that asks for what is not served."""
    for name, idle in (UNSERVED | (CHAT if chat else COMPLETION)).items():
        value = body.get(name)
        if value is None or value in idle:
            continue
        if name == "best_of" and value == body.get("n"):
            continue
        if name in ("tools", "functions") and body.get("tool_choice") == "none":
            continue
        raise InvalidRequest(name, f"is not served: {shown(value)}", kind="unsupported")
