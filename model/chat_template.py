"""A chat as the prompt its model was trained on, with no control token that a user wrote.

The template, which is the model's, is also compiled with marks that no user can guess in place of
the control tokens its source names; where it only consults them, as in `'</think>' in content`, a
third form spares them. Contents are given as they are, so templates may trim, split and compare
them. The form is taken whose text is the plain one but for its marks; and then, in this order:

    nothing in its text still looks like a control token     the marks are the control tokens
    contents covered by stand-ins leave the same text        and so is what looks like one with
                                                             no content in it
    every look-alike was inside one content                  the marks alone
    otherwise                                                refused, in words

The second line serves templates that put a control token together, such as `'<|' + role + '|>'`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from jinja2 import Template, TemplateSyntaxError, nodes

from model.chat_messages import Message, plain, plain_messages, rewritten, rewritten_messages, texts
from model.control_marks import ControlMarks, Part, Shadow
from model.template_environment import RaisedByTemplate, TemplateEnvironment
from model.tokenizer import Control, SpecialTokens, Tokenizer

MAX_SHOWN = 300


class ChatTemplateError(ValueError):
    """These messages cannot become a prompt of this model; the message says why."""


class NoChatTemplate(ChatTemplateError):
    """The model was published without a chat template."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a template is given. `tools` and `options` as in Hugging Face's chat templates."""

    messages: list[Message]
    add_generation_prompt: bool
    tools: object = None
    options: object = None

    def rewritten(self, rewrite: Callable[[str], str]) -> "Chat":
        return Chat(
            rewritten_messages(self.messages, rewrite),
            self.add_generation_prompt,
            rewritten(self.tools, rewrite),
            rewritten(self.options, rewrite),
        )

    def texts(self) -> list[str]:
        return [*texts(list(self.messages)), *texts(self.tools), *texts(self.options)]


@dataclass(frozen=True, slots=True)
class _Forms:
    """A template as it is, with every control token it names marked, and with those it writes."""

    plain: Template
    marked: Template
    cautious: Template


class ChatTemplate:
    """Safe to use from several threads."""

    def __init__(
        self,
        template: str | None,
        special_tokens: SpecialTokens,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = special_tokens
        self._marks = ControlMarks(special_tokens.names)
        self._environment = TemplateEnvironment(now)
        self._forms: _Forms | None = None
        self._broken = ""
        if template is not None:
            try:
                self._forms = self._compiled(template)
            except TemplateSyntaxError as error:
                self._broken = f"line {error.lineno}: {error.message}"

    def render_ids(
        self,
        messages: Sequence[Mapping[str, object]],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The prompt's ids, BOS included if the template writes it, and only then."""
        parts = self.render(messages, add_generation_prompt, tools=tools, options=options)
        return tokenizer.encode_scaffold(parts)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> list[Part]:
        """The prompt as plain text and control tokens.

        Raises InvalidChat or InvalidText for messages that are none, ChatTemplateError for those
        that this template does not take.
        """
        if self._broken:
            raise ChatTemplateError(f"this model's chat template is broken: {self._broken}")
        if self._forms is None:
            raise NoChatTemplate(
                "this model has no chat template: send the whole prompt to completions instead, or"
                " give the model a template (chat_template.jinja in a Hugging Face folder,"
                " tokenizer.chat_template in a GGUF file)"
            )
        chat = Chat(
            plain_messages(messages),
            add_generation_prompt,
            None if tools is None else plain("tools", list(tools)),
            plain("options", dict(options or {})),
        )
        return self._told_apart(self._forms, chat)

    def _compiled(self, source: str) -> "_Forms":
        return _Forms(
            plain=self._environment.from_string(source),
            marked=self._marked(source, spare_consulted=False),
            cautious=self._marked(source, spare_consulted=True),
        )

    def _marked(self, source: str, *, spare_consulted: bool) -> Template:
        tree = self._environment.parse(source)
        spared = _consulted(tree) if spare_consulted else set()
        for text in tree.find_all(nodes.TemplateData):
            text.data = self._marks.mark(text.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str) and id(constant) not in spared:
                constant.value = self._marks.mark(constant.value)
        return self._environment.from_string(tree)

    def _told_apart(self, forms: "_Forms", chat: Chat) -> list[Part]:
        marks = self._marks
        plain_text = self._text(forms.plain, chat, marked=False)
        form, text = self._faithful_form(forms, chat, plain_text)
        parts = marks.parts(text)
        look_alikes = marks.names_in(parts)
        if not look_alikes:
            return parts
        shadow = marks.shadow([*chat.texts(), plain_text])
        marked = form is not forms.plain
        covered = self._text_or_nothing(form, chat.rewritten(shadow.cover), marked=marked)
        if shadow.suffices and shadow.uncover(marks.unmark(covered)) == plain_text:
            return _uncovered(marks.parts(marks.mark(covered)), shadow)
        broken = chat.rewritten(lambda text: shadow.broken(text, look_alikes))
        covered = self._text_or_nothing(form, broken, marked=marked)
        same = shadow.uncover(marks.unmark(covered)) == plain_text
        if same and not marks.names_in(marks.parts(covered)):
            return parts
        raise ChatTemplateError(
            "the messages name control tokens of this model where its chat template reads the"
            " text; leave them out of the messages"
        )

    def _faithful_form(self, forms: "_Forms", chat: Chat, plain_text: str) -> tuple[Template, str]:
        """The first marked form whose text is the plain one but for its marks."""
        for form in (forms.marked, forms.cautious):
            text = self._text_or_nothing(form, chat, marked=True)
            if self._marks.unmark(text) == plain_text:
                return form, text
        return forms.plain, plain_text

    def _text(self, template: Template, chat: Chat, *, marked: bool) -> str:
        given = self._given(chat, marked)
        try:
            return template.render(given)
        except RaisedByTemplate as error:
            reason = f"refuses these messages: {error}"
        except Exception as error:  # a template's expressions can raise anything
            reason = f"fails on these messages: {type(error).__name__}: {error}"
        raise ChatTemplateError(f"the chat template {self._marks.unmark(reason)[:MAX_SHOWN]}")

    def _text_or_nothing(self, template: Template, chat: Chat, *, marked: bool) -> str:
        try:
            return self._text(template, chat, marked=marked)
        except ChatTemplateError:  # it read what is now covered
            return ""

    def _given(self, chat: Chat, marked: bool) -> dict[str, object]:
        special = self._special_tokens
        roles = {"bos": special.bos, "eos": special.eos, "unk": special.unk, "pad": special.pad}
        named = {f"{role}_token": name for role, name in roles.items() if name is not None}
        options = chat.options
        assert isinstance(options, dict)
        return {
            "tools": chat.tools,
            "documents": None,
            **{key: self._marks.mark(name) if marked else name for key, name in named.items()},
            **options,
            "messages": chat.messages,
            "add_generation_prompt": chat.add_generation_prompt,
        }


def _uncovered(parts: list[Part], shadow: Shadow) -> list[Part]:
    return [part if isinstance(part, Control) else shadow.uncover(part) for part in parts]


def _consulted(tree: nodes.Template) -> set[int]:
    """The constants that a template compares texts with, or hands to their methods and filters."""
    inside: list[nodes.Node] = [*tree.find_all((nodes.Compare, nodes.Test))]
    for each in tree.find_all(nodes.Filter):
        inside += [*each.args, *each.kwargs]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            inside += [*call.args, *call.kwargs]
    constants = [node for node in inside if isinstance(node, nodes.Const)]
    constants += [constant for node in inside for constant in node.find_all(nodes.Const)]
    return {id(constant) for constant in constants}
