"""GGUFTokenizer: the tokenizer that the metadata of a GGUF file describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from async_engine.gguf_sentencepiece import CONTROL, UNUSED, USER_DEFINED, pair, sentencepiece_backend

if TYPE_CHECKING:
    from collections.abc import Mapping


class GGUFTokenizer(NamedTuple):
    """What a GGUF file says about tokenizing. Strings are empty where it says nothing."""

    backend: Tokenizer
    chat_template: str
    bos_token: str
    eos_token: str
    add_bos: bool
    add_eos: bool
    says_splitting: bool
    """Whether the file says how text is cut into words; if not, that is done as for GPT-2."""


class _Splitting(NamedTuple):
    """How a family of models cuts text into words before byte-pair encoding."""

    pattern: str | None = None
    """One match is one word; None is GPT-2's own pattern, which ByteLevel has built in."""
    digits: bool = False
    """Every digit is a word of its own, before anything else."""
    composed: bool = False
    """Text is brought to Unicode's composed form (NFC) first."""
    whole_words: bool = False
    """A word that is a token is taken as it is, whatever the merges say."""
    adds_bos: bool = False
    """Default for files that do not say whether a prompt starts with the bos token."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CL100K = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _PUNCTUATION_AND_SPACE
_LLAMA_3 = _Splitting(_CL100K, whole_words=True, adds_bos=True)
_QWEN_2 = _Splitting(_CONTRACTIONS + _WORDS + r"\p{N}" + _PUNCTUATION_AND_SPACE, composed=True)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTINGS = {
    "default": _Splitting(),
    "gpt-2": _Splitting(),
    "phi-2": _Splitting(),
    "olmo": _Splitting(),
    "smollm": _Splitting(digits=True),
    "starcoder": _Splitting(digits=True),
    "refact": _Splitting(digits=True),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "dbrx": _Splitting(_CL100K),
    "smaug-bpe": _Splitting(_CL100K),
    "gpt-4o": _Splitting(_O200K),
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "tekken": _Splitting(_TEKKEN, whole_words=True, adds_bos=True),
}
"""Of byte-level vocabularies, by tokenizer.ggml.pre. OLMo 2 and Phi-4 are `dbrx`."""
_SENTENCEPIECE = _Splitting(adds_bos=True)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Builds the tokenizer. Raises ValueError if it is of a kind not known here; that, KeyError or the library's
    plain Exception for metadata that contradicts itself."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model is {model!r}; known are 'gpt2' and 'llama'")
    name = metadata.get("tokenizer.ggml.pre", "default")
    splitting = _SENTENCEPIECE if model == "llama" else _SPLITTINGS.get(name)
    if splitting is None:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, a way to cut text into words that is not known here; "
            f"known are {', '.join(_SPLITTINGS)}"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [1] * len(tokens)
    if splitting is _SENTENCEPIECE:
        backend = sentencepiece_backend(metadata, tokens, kinds)
    else:
        backend = _byte_level_backend(metadata, tokens, kinds, splitting)
    for kind in (CONTROL, USER_DEFINED):
        _add_tokens(backend, tokens, kinds, kind)

    def special(name: str) -> str:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return "" if token_id is None else tokens[token_id]

    return GGUFTokenizer(
        backend=backend,
        chat_template=metadata.get("tokenizer.chat_template", ""),
        bos_token=special("bos"),
        eos_token=special("eos"),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", splitting.adds_bos),
        add_eos=metadata.get("tokenizer.ggml.add_eos_token", False),
        says_splitting=model == "llama" or "tokenizer.ggml.pre" in metadata,
    )


def _byte_level_backend(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], splitting: _Splitting
) -> Tokenizer:
    # Unused entries pad the vocabulary to a round size; no text has them and they have no text.
    vocabulary = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    merges = [pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words))
    if splitting.composed:
        backend.normalizer = normalizers.NFC()
    words: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        words.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        words.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
    words.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_tokens(backend: Tokenizer, tokens: list[str], kinds: list[int], kind: int) -> None:
    """The tokens of a kind, to be found in texts as they are written. One that the vocabulary spells in
    another way (a run of spaces) is found by its merges, and would get a second id here."""
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, its_kind in zip(tokens, kinds, strict=True)
        if its_kind == kind and backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens(added) if kind == CONTROL else backend.add_tokens(added)
