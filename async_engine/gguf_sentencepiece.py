"""SentencePieceBackend: the tokenizer of GGUF files whose model is `llama`: pieces with scores, and no merges.

SentencePiece's BPE joins, again and again, the two neighbours whose union is the piece with the highest
score. That is byte-pair encoding with a merge for every way to cut a piece into two others, best piece
first. What no piece covers is spelt in byte pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, normalizers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Of tokenizer.ggml.token_type."""
_SPACE = "▁"


def sentencepiece_backend(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """Without its added tokens. Raises KeyError, ValueError or plain Exception for what contradicts itself."""
    # Converters write runs of spaces that are tokens as they look in a text; among pieces they look otherwise.
    pieces = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if "tokenizer.ggml.merges" in metadata:
        merges = [pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = _merges(_by_rank(pieces, kinds, metadata["tokenizer.ggml.scores"].tolist()))
    backend = Tokenizer(
        models.BPE(
            {piece: index for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)) if kind != UNUSED},
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    # As SentencePiece does: before every text, and every part of one behind a token found in it, whatever it starts
    # with. (The Metaspace step of newer conversions adds none where there is a space already.)
    prefix = [normalizers.Prepend(_SPACE)] * prefixed
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefixed)
    return backend


def _by_rank(pieces: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[str]:
    """Pieces that text can be joined to, best first: user-defined ones, whose scores mean nothing, before all."""
    ranked = [
        (-score if kind == NORMAL else float("-inf"), index)
        for index, (kind, score) in enumerate(zip(kinds, scores, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    ]
    return [pieces[index] for _, index in sorted(ranked)]


def _merges(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Of a quarter of a million pieces half a million, in about a second."""
    known = frozenset(pieces)
    return [
        (left, right)
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in known and (right := piece[cut:]) in known
    ]


def pair(merge: str) -> tuple[str, str]:
    """Left and right part of an entry of tokenizer.ggml.merges."""
    left, right = merge.split(" ")
    return left, right
