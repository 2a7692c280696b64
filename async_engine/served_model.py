"""ServedModel: what the front end knows of the model, read from its files without torch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from async_engine.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from protos.messages import Vocabulary
from protos.model_files import model_digest, read_model_spec, resolve_model
from protos.model_spec import BasicSpec
from protos.params import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path


NULL_MODEL = "null"


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Names, vocabulary and defaults of the model."""

    names: tuple[str, ...]
    """What requests may call it; the first is how it calls itself."""
    path: str
    spec: BasicSpec
    tokenizer: Tokenizer
    vocab_size: int
    """Ids the model knows; the tokenizer may know fewer."""
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams
    """Temperature, top_p, top_k and min_p of requests that do not say."""

    def vocabulary(self) -> Vocabulary:
        """What the tokens spell. Takes a microsecond or two per token."""
        return Vocabulary(self.tokenizer.token_bytes(), tuple(sorted(self.tokenizer.special_ids)), self.eos_token_ids)


async def open_model(name: str, served_name: str) -> tuple[tuple[int, ...], asyncio.Future[ServedModel]]:
    """The tokens that end an output, which a core needs to start, and the rest, which is still being read."""
    if name == NULL_MODEL:
        return (), asyncio.ensure_future(asyncio.sleep(0, null_model(served_name)))
    path = await asyncio.to_thread(resolve_model, name)
    spec = await asyncio.to_thread(read_model_spec, path)
    return spec.eos_token_ids, asyncio.ensure_future(load_served_model(name, path, spec, served_name))


async def digest_model(name: str) -> str:
    """For two processes to see whether they have the same files. Raises StartupError."""
    if name == NULL_MODEL:
        return NULL_MODEL
    return await asyncio.to_thread(lambda: model_digest(resolve_model(name)))


def null_model(served_name: str) -> ServedModel:
    """Scripted tokens over bytes."""
    tokenizer = byte_tokenizer()
    return ServedModel(
        names=_names(served_name, NULL_MODEL),
        path=NULL_MODEL,
        spec=BasicSpec(architecture=NULL_MODEL, vocab_size=tokenizer.vocab_size),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(),
        defaults=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0),
    )


async def load_served_model(name: str, path: Path, spec: BasicSpec, served_name: str) -> ServedModel:
    """Reads the tokenizer, off the loop."""
    tokenizer = await asyncio.to_thread(load_tokenizer, path)
    own_name = path.stem.partition(".")[0] if path.suffix == ".gguf" else path.name
    return ServedModel(
        names=_names(served_name, own_name, name),
        path=str(path),
        spec=spec,
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        defaults=SamplingParams(
            temperature=spec.default_temperature, top_p=spec.default_top_p, top_k=spec.default_top_k, min_p=0.0
        ),
    )


def _names(*candidates: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, candidates)))
