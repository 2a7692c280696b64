"""ModelServicer: what callers ask before they generate."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from async_engine import from_proto
from async_engine.chat_formats import detect_formats
from protos.errors import InvalidRequestError
from protos.tailrace.v1 import model_pb2 as pb
from protos.tailrace.v1 import model_pb2_grpc

if TYPE_CHECKING:
    from async_engine.async_llm import AsyncLLM

PIECE_BYTES = 64 << 10
INLINE_TOKENS = 1000
"""So many are decoded on the event loop; more take a thread."""


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """`tailrace.v1.ModelService` over an AsyncLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        model, core = self._llm.model, self._llm.ready
        tokenizer, defaults = model.tokenizer, model.defaults
        tool_format, reasoning_format = detect_formats(tokenizer.chat_template or "")
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=model.names[0],
                    aliases=model.names[1:],
                    max_context_tokens=core.max_model_len,
                    vocabulary_size=model.vocab_size,
                    eos_token_ids=model.eos_token_ids,
                    bos_token_id=tokenizer.bos_token_id,
                    chat_template=tokenizer.chat_template,
                    default_sampling=pb.DefaultSampling(
                        temperature=defaults.temperature,
                        top_p=defaults.top_p,
                        top_k=defaults.top_k,
                        min_p=defaults.min_p,
                    ),
                    tool_format=tool_format,
                    reasoning_format=reasoning_format,
                    dtype=core.dtype,
                    device=core.device,
                    kv_capacity_tokens=core.kv_capacity_tokens,
                    max_sequences=core.max_num_seqs,
                    weight_bytes=core.weight_bytes,
                    adapters=self._llm.cores.adapters.names,
                )
            ]
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._llm.input.check_model(request.model)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return pb.TokenizeResponse(token_ids=await self._llm.input.tokenize("text", request.text, special))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        self._llm.input.check_model(request.model)
        limit = self._llm.ready.max_model_len
        if len(request.token_ids) > limit:
            raise InvalidRequestError("token_ids", f"{len(request.token_ids)} are more than the context of {limit}")
        token_ids = list(request.token_ids)
        self._llm.input.check_ids("token_ids", token_ids)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        decode = self._llm.model.tokenizer.decode
        if len(token_ids) <= INLINE_TOKENS:
            return pb.DetokenizeResponse(text=decode(token_ids, skip))
        return pb.DetokenizeResponse(text=await asyncio.to_thread(decode, token_ids, skip))

    async def RenderChat(self, request: pb.RenderChatRequest, context: Any) -> pb.RenderChatResponse:
        self._llm.input.check_model(request.model)
        text = await self._llm.input.render(from_proto.to_chat(request.chat))
        token_ids = await self._llm.input.tokenize("chat", text, add_special_tokens=False)
        return pb.RenderChatResponse(text=text, token_ids=token_ids)

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> None:
        self._llm.input.check_model(request.model)
        for name, data in (await asyncio.to_thread(self._llm.model.tokenizer.files)).items():
            digest = hashlib.sha256(data).digest()
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                is_last = start + PIECE_BYTES >= len(data)
                await context.write(
                    pb.GetTokenizerResponse(file_name=name, data=piece, sha256=digest if is_last else b"")
                )
