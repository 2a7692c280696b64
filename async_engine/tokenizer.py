"""Tokenizer: text to token ids and back, for models from Hugging Face directories and GGUF files.

Only the `tokenizers` library is loaded, in a quarter of a second. transformers, which takes
seconds, is imported for models whose tokenizer it has to convert.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from async_engine.detokenizer import byte_alphabet, detokenizer_factory, token_bytes
from async_engine.gguf_tokenizer import gguf_tokenizer
from protos.config_spec import MAX_VOCAB_SIZE
from protos.errors import InvalidRequestError, StartupError
from protos.gguf import read_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from async_engine.detokenizer import Detokenizer

logger = logging.getLogger(__name__)

INLINE_CHARACTERS = 400
"""Texts up to this length are encoded on the event loop: 0.2 ms, less than a thread costs."""


class Tokenizer:
    """A vocabulary with the way into it and out of it, and what chat templates need to know of it."""

    def __init__(
        self, backend: Backend, *, chat_template: str | None = None, bos_token: str = "", eos_token: str = ""
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._factories: dict[tuple[bool, frozenset[str]], Callable[[], Detokenizer]] = {}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"a token has the id {self.vocab_size - 1}")
        """One more than the largest id. The model may have more: rows of padding, without tokens."""
        self._tokens = [backend.id_to_token(token_id) for token_id in range(self.vocab_size)]
        self.max_token_length = max(map(len, vocabulary), default=0)
        """Characters of the longest token's string: no token stands for more of a text."""
        special = {token_id: token for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        """Ids that `skip_special_tokens` leaves out of texts."""
        self._special_tokens = frozenset(token.content for token in special.values())
        self.chat_template = chat_template
        self.bos_token = bos_token
        """Text of the token that begins a sequence; empty if the model has none."""
        self.eos_token = eos_token

    def close(self) -> None:
        """Ends the encoding thread. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, with those the model expects around it if `add_special_tokens`.

        Raises InvalidRequestError for what is no Unicode text (lone surrogates).
        """
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise InvalidRequestError("text", "is not valid Unicode") from None

    async def encode_async(self, text: str, add_special_tokens: bool) -> list[int]:
        """`encode` that does not hold the event loop up, however long the text."""
        if len(text) <= INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self.encode, text, add_special_tokens)

    async def encode_all_async(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, without special ones, off the event loop."""

        def encode_all() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=False) for text in texts]

        return await asyncio.get_running_loop().run_in_executor(self._executor, encode_all)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of the ids; those without a token have none. What streams add up to."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def new_detokenizer(self, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> Detokenizer:
        """A detokenizer for one sequence, which leaves special tokens out or not, but for those `shown` in any case.
        The first of each mode builds the table that all share."""
        hidden = self._special_tokens - shown if skip_special_tokens else frozenset()
        mode = (skip_special_tokens, shown & self._special_tokens)
        factory = self._factories.get(mode)
        if factory is None:
            factory = self._factories[mode] = detokenizer_factory(self._backend, self._tokens, hidden)
        return factory()

    def alternatives(self, before: Sequence[int], token_ids: Sequence[int]) -> list[str]:
        """The text that each of these tokens would add behind the ones before. Of a character that stays unfinished
        that is nothing."""
        texts = []
        for token_id in token_ids:
            detokenizer = self.new_detokenizer(skip_special_tokens=False)
            detokenizer.prime(before)
            texts.append(detokenizer.push((token_id,)))
        return texts

    @property
    def bos_token_id(self) -> int | None:
        token_id: int | None = self._backend.token_to_id(self.bos_token) if self.bos_token else None
        return token_id

    def files(self) -> dict[str, bytes]:
        """What transformers, or the tokenizers library, loads as this tokenizer: a file's name and what it holds."""
        found = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token or None,
            "eos_token": self.eos_token or None,
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        config = {key: value for key, value in found.items() if value is not None}
        return {
            "tokenizer.json": self._backend.to_str().encode(),
            "tokenizer_config.json": msgspec.json.encode(config),
        }

    def token_bytes(self) -> list[bytes]:
        """By id, what each token adds to the UTF-8 of a text that has begun; special tokens add nothing."""
        return token_bytes(self._backend, self._tokens, self._special_tokens)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a .gguf file. Raises StartupError, one line."""
    try:
        tokenizer = _from_gguf(path) if path.suffix == ".gguf" else _from_directory(path)
    except StartupError:
        raise
    except Exception as error:  # the libraries raise plain Exception for files they cannot use
        cause = f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        problem = " ".join(cause.split()) or type(error).__name__
        raise StartupError(f"{path}: the tokenizer cannot be loaded: {problem}") from error
    tokenizer.new_detokenizer(True)  # builds the usual table here rather than on the loop of the first request
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """A vocabulary of the 256 bytes, each its own id, and <|bos|> (added to prompts) and <|eos|> behind them."""
    backend = Backend(models.BPE({character: byte for byte, character in enumerate(byte_alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    bos, eos = "<|bos|>", "<|eos|>"
    backend.add_special_tokens([AddedToken(token, special=True) for token in (bos, eos)])
    _frame(backend, [bos], [])
    return Tokenizer(backend, chat_template=_PLAIN_CHAT, bos_token=bos, eos_token=eos)


_PLAIN_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _from_directory(path: Path) -> Tokenizer:
    if not (path / "tokenizer.json").is_file():
        return _from_transformers(path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    if isinstance(config.get("add_bos_token"), bool) or isinstance(config.get("add_eos_token"), bool):
        # Stated there, it overrides what tokenizer.json does.
        _frame(backend, [bos] * bool(config.get("add_bos_token")), [eos] * bool(config.get("add_eos_token")))
    return Tokenizer(backend, chat_template=_directory_template(path, config), bos_token=bos, eos_token=eos)


def _directory_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _from_gguf(path: Path) -> Tokenizer:
    parts = gguf_tokenizer(read_gguf(path).metadata)
    if not parts.says_splitting:
        logger.warning("%s: has no tokenizer.ggml.pre; text is cut into words as for GPT-2, rightly or not", path)
    _frame(parts.backend, [parts.bos_token] * parts.add_bos, [parts.eos_token] * parts.add_eos)
    return Tokenizer(
        parts.backend,
        chat_template=parts.chat_template or None,
        bos_token=parts.bos_token,
        eos_token=parts.eos_token,
    )


def _from_transformers(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise StartupError(f"{path}: its tokenizer has no tokenizer.json form; convert it with transformers first")
    template = loaded.chat_template
    return Tokenizer(
        backend,
        chat_template=template if isinstance(template, str) else None,
        bos_token=loaded.bos_token or "",
        eos_token=loaded.eos_token or "",
    )


def _frame(backend: Backend, before: list[str], after: list[str]) -> None:
    """Makes these tokens surround every text that is encoded with its special tokens; empty names are none."""
    before, after = [token for token in before if token], [token for token in after if token]
    ids = [(token, backend.token_to_id(token)) for token in {*before, *after}]
    backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _token_text(token: str | dict[str, Any] | None) -> str:
    """A special token is written as its text, or as an object around it."""
    return (token["content"] if isinstance(token, dict) else token) or ""


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
