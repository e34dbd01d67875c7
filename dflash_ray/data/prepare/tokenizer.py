"""Tokenizer and chat template of a folder, encoding exactly what a server would feed its model.

`encode` equals the tokenizer's own encoding of the whole text, but works piece by piece between added tokens, so that the pieces a
conversation repeats in every turn (its history, the scaffolds of the template) are encoded once. Their flags tell which added tokens are
such borders: one that swallows neighbouring blanks is none. `fingerprint` depends on what the tokenizer does (vocabulary and a probe
text), not on how its files are written, so a copy of a target's tokenizer has the target's fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import jinja2

# What a template may raise on data it was not written for; everything else is a bug.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_PROBE = "Probe 1234: a  b\n\n\tcafé नमस्ते 𝔘 don't WON'T <tag/> `x = [1]`\r\n"
_ANSWER = "PROBEANSWER"
_CACHE_CHARACTERS = 1 << 20
_LONG_PIECE = 1 << 16  # characters


class ChatTokenizer:
    """`folder`: a Hugging Face folder with a fast tokenizer. `chat_template`: a Jinja file that replaces the folder's template.

    ValueError for a folder without a usable tokenizer. A missing template is one too, but only once it is needed (`require_template`):
    rows that are already token ids need none.
    """

    def __init__(self, folder: Path | str, chat_template: Path | str | None = None):
        self.folder = Path(folder)
        self._tokenizer = _load(self.folder)
        if chat_template is not None:
            self._tokenizer.chat_template = _read_template(Path(chat_template))
        self._backend = self._tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self.added_ids = sorted(added)
        self.size = max(self._backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.vocab_size = max(self.size, _embedding_rows(self.folder))
        self._borders = _border_tokens(added)
        self._border = _any_of(self._borders)
        self._special = _any_of(token.content for token in added.values() if token.special)
        self._cache: dict[str, list[int]] = {}
        self.known: dict[str, list[int]] = {}  # ids of pieces that are known to come, from `encode_pieces`
        self._cached_characters = 0
        self._opening = self._find_opening()
        self._end: tuple[str, str] | None = None

    # ---- templates

    @property
    def template(self) -> str | None:
        template = self._tokenizer.chat_template
        return json.dumps(template, sort_keys=True) if isinstance(template, dict) else template

    def require_template(self) -> None:
        """ValueError unless conversations can be rendered and the template ends the assistant's turn with a token."""
        _ = self._ending

    def render(self, messages: list[dict], tools: list[dict] | None, *, generation: bool, thinking: bool) -> str:
        """The template's text. With `generation` the text ends where the model's answer begins. Raises one of `TEMPLATE_ERRORS`."""
        return self._tokenizer.apply_chat_template(
            [messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation,
            enable_thinking=thinking,
            thinking=thinking,
        )[0]

    def has_thinking_switch(self) -> bool:
        """Whether the template writes another prompt when thinking is asked for."""
        question = [{"role": "user", "content": "Hi"}]
        try:
            off, on = (self.render(question, None, generation=True, thinking=thinking) for thinking in (False, True))
        except TEMPLATE_ERRORS:
            return False
        return off != on

    def check_thinking(self, thinking: tuple[bool, ...]) -> None:
        """ValueError where both ways are wanted of a template that knows one: every prompt would come twice."""
        if len(thinking) > 1 and not self.has_thinking_switch():
            raise ValueError(f"--thinking both: the chat template of {self.folder} has no thinking switch; use on or off")

    @property
    def end_of_turn(self) -> str:
        """The token that ends the assistant's turn, as text."""
        return self._ending[0]

    @property
    def tail(self) -> str:
        """What the template writes from the end-of-turn token on after the last answer of a conversation."""
        return self._ending[1]

    @property
    def _ending(self) -> tuple[str, str]:
        if self._end is None:
            if self.template is None:
                raise ValueError(
                    f"{self.folder}: the tokenizer has no chat template; pass --chat-template FILE with the Jinja template of the target"
                )
            try:
                text = self.render(
                    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER}], None, generation=False, thinking=False
                )
            except TEMPLATE_ERRORS as error:
                raise ValueError(f"{self.folder}: the chat template fails on a question and an answer: {one_line(error)}") from None
            before, found, tail = text.rpartition(_ANSWER)
            match = self._special.search(tail) or self._border.search(tail)
            if not found or match is None:
                raise ValueError(
                    f"{self.folder}: the chat template writes no end-of-turn token after an answer (it ends {text[-40:]!r}); "
                    "pass --chat-template FILE with one that does"
                )
            self._end = (match.group(), tail)
        return self._end

    def split_ending(self, answer: str) -> tuple[str, str, str] | None:
        """(text, end-of-turn token, what follows) of a rendered answer; None if no token ends it."""
        before = self.tail[: self.tail.index(self.end_of_turn)]
        if answer.endswith(self.tail):
            text = answer[: len(answer) - len(self.tail)] + before
            return text, self.end_of_turn, self.tail[len(before) + len(self.end_of_turn) :]
        matches = list(self._special.finditer(answer))
        if not matches or answer[matches[-1].end() :].strip():
            return None
        last = matches[-1]
        return answer[: last.start()], last.group(), answer[last.end() :]

    def special_strings(self, text: str) -> int:
        """How often `text` spells a special token."""
        return sum(1 for _ in self._special.finditer(text))

    # ---- ids

    def encode(self, text: str, limit: int | None = None, start: bool = True) -> list[int]:
        """Token ids of `text`, without any added begin or end. `start`: the text opens the sequence; otherwise it continues one.

        With `limit` at least the first `limit` ids are exact and the rest may be missing, so that a huge text costs no more than it gives.
        """
        ids: list[int] = []
        for index, piece in enumerate(self._border.split(text)):
            if index % 2:
                ids.append(self._borders[piece])
            elif piece:
                room = None if limit is None else limit - len(ids)
                ids += self._encode_piece(piece, start and index == 0, room)
            if limit is not None and len(ids) >= limit:
                break
        return ids

    def encode_pieces(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Ids of the pieces between border tokens of texts that are to be encoded, all at once and without Python's lock.

        Only a help to `encode` (see `known`): huge pieces and the one that opens a sequence are left to it.
        """
        pieces = list({piece for text in texts for piece in self._border.split(text)[::2] if 0 < len(piece) <= _LONG_PIECE})
        encoded = self._backend.encode_batch_fast([self._opening + piece for piece in pieces], add_special_tokens=False)
        skipped = bool(self._opening)
        return {piece: encoding.ids[skipped:] for piece, encoding in zip(pieces, encoded, strict=True)}

    def encode_literally(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of a continuation in which special tokens are ordinary text, as a model writes them when it means the words."""
        return self._encode_up_to(text, limit, self._encode_literal)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens included."""
        return self._tokenizer.decode([int(index) for index in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _encode_piece(self, piece: str, start: bool, limit: int | None) -> list[int]:
        if start and self._opening:
            return self._encode_up_to(piece, limit, self._encode_opening)
        if limit is not None and len(piece) > 4 * limit:
            return self._encode_up_to(piece, limit, self._encode_continuation)
        ids = self.known.get(piece) or self._cache.get(piece)
        if ids is None:
            ids = self._encode_continuation(piece)
            if self._cached_characters > _CACHE_CHARACTERS:
                self._cache.clear()
                self._cached_characters = 0
            self._cache[piece] = ids
            self._cached_characters += len(piece)
        return ids

    def _encode_up_to(self, text: str, limit: int | None, encode: Callable[[str], list[int]]) -> list[int]:
        """Doubles the part it encodes until that holds `limit` ids and a margin in which the cut may have changed them."""
        characters = len(text) if limit is None else 16 * (limit + 64)
        while True:
            ids = encode(text[:characters])
            if characters >= len(text):
                return ids
            if len(ids) >= limit + 64:
                return ids[:limit]
            characters *= 2

    def _encode_opening(self, text: str) -> list[int]:
        # the batch call alone has a form that leaves the offsets out (a fifth of the time) and lets other threads run
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_continuation(self, text: str) -> list[int]:
        return self._encode_opening(self._opening + text)[bool(self._opening) :]

    def _encode_literal(self, text: str) -> list[int]:
        before = "\n" if self._opening else ""  # an opening token would be spelled out, too
        encoded = self._literal_backend.encode(before + text, add_special_tokens=False)
        return [index for index, (_, stop) in zip(encoded.ids, encoded.offsets, strict=True) if stop > len(before)]

    @cached_property
    def _literal_backend(self):
        """A tokenizer of its own, because the switch would count for what another thread encodes meanwhile."""
        backend = type(self._backend).from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _find_opening(self) -> str:
        """A border token to put before a text that continues a sequence, or "" where the tokenizer treats both alike."""
        token = next(iter(self._borders), "")
        alone = [self._backend.encode(text, add_special_tokens=False).ids for text in ("a b", " a", "\nA")]
        after = [self._backend.encode(token + text, add_special_tokens=False).ids[1:] for text in ("a b", " a", "\nA")]
        return "" if alone == after else token

    # ---- identity

    def fingerprint(self) -> dict[str, str]:
        """{"tokenizer": hash of vocabulary and behaviour, "chat_template": hash of the template, "" without one}."""
        vocabulary = sorted(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        digest = hashlib.sha256(json.dumps(vocabulary).encode())
        digest.update(json.dumps(self._backend.encode(_PROBE, add_special_tokens=False).ids).encode())
        template = self.template
        return {
            "tokenizer": digest.hexdigest()[:32],
            "chat_template": hashlib.sha256(template.encode()).hexdigest()[:32] if template else "",
        }


def check_same_tokenizer(manifest: dict, folder: Path | str) -> None:
    """ValueError if the data set of `manifest` was made with another tokenizer than the one in `folder`; says nothing without a print."""
    made_with = manifest.get("tokenizer")
    if made_with is not None and made_with != (found := ChatTokenizer(folder).fingerprint()["tokenizer"]):
        raise ValueError(
            f"data.path was made with another tokenizer ({made_with}) than that of target.path {folder} ({found}); "
            "prepare the data again with --tokenizer set to the target's folder"
        )


def one_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for a report."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def _load(folder: Path):
    if not folder.is_dir():
        raise ValueError(f"--tokenizer {folder}: no such folder")
    from transformers import AutoTokenizer  # imported late: it loads torch

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        raise ValueError(f"--tokenizer {folder}: no tokenizer can be loaded from it: {one_line(error)}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"--tokenizer {folder}: only a slow tokenizer; save it once with a tokenizer.json")
    # a file saved after padded or cut calls would do so here too: pad tokens in answers, long ones cut
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path}: cannot be read: {one_line(error)}") from None


def _embedding_rows(folder: Path) -> int:
    """`vocab_size` of the folder's model config (models pad their embedding); 0 where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {folder}: config.json cannot be read: {one_line(error)}") from None
    text = config.get("text_config") if isinstance(config, dict) else None
    rows = (text or config).get("vocab_size", 0) if isinstance(config, dict) else 0
    return rows if isinstance(rows, int) else 0


def _any_of(tokens: Iterable[str]) -> re.Pattern:
    """One group that matches any of the tokens, the longest first; never matches if there are none."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True))) or '(?!)'})")


def _border_tokens(added: dict) -> dict[str, int]:
    """Added tokens that always cut the text around them and leave it alone: text -> id."""
    contents = [token.content for token in added.values()]
    return {
        token.content: index
        for index, token in added.items()
        if not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        and not any(token.content != other and token.content in other for other in contents)
    }
