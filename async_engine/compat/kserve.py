"""`inference.GRPCInferenceService`: KServe v2, as clients of Triton's vLLM backend speak it.

One stream carries many requests; their answers interleave, have their ids, and failures are answers too.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from async_engine.auth import caller
from async_engine.compat.adapter import Adapter, opened
from async_engine.engine_state import EngineState, engine_state
from async_engine.outputs import Delta
from async_engine.request import GenerationRequest
from async_engine.results import Whole
from async_engine.unexpected import first_error, hide_error
from protos.compat import kserve_pb2 as pb
from protos.compat import kserve_pb2_grpc
from protos.errors import InvalidRequestError, TailraceError, UnavailableError, UnsupportedFeatureError
from protos.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc

    from async_engine.async_llm import AsyncLLM
    from async_engine.profiler import Profiler
    from protos.server_config import ServerOptions

MAX_ANSWERS = 1024
"""Requests of one call in work at once; more are not read. A client that does not read cannot pile answers up."""
MAX_SAMPLING = 1 << 18
"""Characters of JSON: parsing holds up every stream."""
DEFAULT_MAX_TOKENS = 16
"""That backend's."""
INPUTS = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", "exclude_input_in_output": "BOOL"}
"""Tensors of one element; all but the first may be left out."""
OUTPUT = "text_output"
VERSION = "1"


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The JSON of `sampling_parameters`. Numbers may be strings."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1


class KServeServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """The service over an AsyncLLM."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm = llm
        self._options = options

    # Discovery --------------------------------------------------------------------------------

    @property
    def _is_ready(self) -> bool:
        return engine_state(self._llm, self._options.step_timeout) is EngineState.SERVING

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._llm.error is None)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._is_ready and request.name in self._llm.model.names)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="tailrace", version=importlib.metadata.version("tailrace"))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        self._llm.input.check_model(request.name)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform="tailrace",
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUTS.items()],
            outputs=[tensor(name=OUTPUT, datatype="BYTES", shape=[-1])],
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        self._llm.input.check_model(request.name)
        types = {"BYTES": pb.TYPE_STRING, "BOOL": pb.TYPE_BOOL}
        config = pb.ModelConfig(
            name=request.name,
            backend="tailrace",
            input=[
                pb.ModelInput(name=name, data_type=types[datatype], dims=[1], optional=name != "text_input")
                for name, datatype in INPUTS.items()
            ],
            output=[pb.ModelOutput(name=OUTPUT, data_type=pb.TYPE_STRING, dims=[-1])],
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
        return pb.ModelConfigResponse(config=config)

    # Inference --------------------------------------------------------------------------------

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        asked = Asked(request)
        if asked.stream:
            raise InvalidRequestError("stream", "needs ModelStreamInfer: this call has one answer")
        answers: list[pb.ModelInferResponse] = []

        async def keep(answer: pb.ModelInferResponse) -> None:
            answers.append(answer)

        await self._infer(asked, context, keep)
        return answers[0]

    async def ModelStreamInfer(self, requests: AsyncIterator[pb.ModelInferRequest], context: Any) -> None:
        writing, slots = asyncio.Lock(), asyncio.Semaphore(MAX_ANSWERS)

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with writing:
                await context.write(response)

        async def answer(request: pb.ModelInferRequest) -> None:
            try:
                await self._infer(
                    Asked(request),
                    context,
                    lambda response: write(pb.ModelStreamInferResponse(infer_response=response)),
                )
            except TailraceError as error:
                await write(_failure(request, error))
            except Exception as error:  # one request's bug must not end the others
                if context.cancelled() or context.done():
                    raise
                await write(_failure(request, hide_error(error)))
            finally:
                slots.release()

        async def leave_when_drained() -> None:
            await self._llm.drained.wait()
            raise UnavailableError("the server is going away")

        try:
            async with asyncio.TaskGroup() as tasks:
                leaving = tasks.create_task(leave_when_drained())
                answers = set()
                async for request in requests:
                    await slots.acquire()
                    task = tasks.create_task(answer(request))
                    answers.add(task)
                    task.add_done_callback(answers.discard)
                if answers:
                    await asyncio.wait(answers)
                leaving.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _infer(
        self, asked: Asked, context: Any, write: Callable[[pb.ModelInferResponse], Awaitable[None]]
    ) -> None:
        """One answer with everything, or one per delta; the last says so."""
        request = asked.generation(caller(context), context.time_remaining())
        async with opened(self._llm, request, "", whole=not asked.stream) as (stream, _):
            whole, left = Whole(), request.params.n
            async for event in stream:
                if not isinstance(event, Delta):
                    continue
                if not asked.stream:
                    whole.add(event)
                    continue
                texts = [""] * request.params.n
                texts[event.index] = event.text
                left -= event.finish is not None
                if event.text or not left:
                    await write(asked.response(texts, is_last=not left))
            if not asked.stream:
                texts = [asked.echo + delta.text for delta in whole.sequences()]
                await write(asked.response(texts, is_last=True))


def _add(llm: AsyncLLM, options: ServerOptions, profiler: Profiler, server: grpc.aio.Server) -> None:
    kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(KServeServicer(llm, options), server)


ADAPTER = Adapter((pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,), _add)


def _failure(request: pb.ModelInferRequest, error: TailraceError) -> pb.ModelStreamInferResponse:
    told = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    return pb.ModelStreamInferResponse(error_message=str(error), infer_response=told)


class Asked:
    """What one request asks for. Raises InvalidRequestError, UnsupportedFeatureError for what is not offered."""

    def __init__(self, request: pb.ModelInferRequest) -> None:
        self._request = request
        tensors = read_tensors(request)
        if "text_input" not in tensors:
            raise InvalidRequestError("text_input", "is required")
        self._text = _text("text_input", tensors["text_input"])
        self._sampling = _sampling(_text("sampling_parameters", tensors.get("sampling_parameters", b"{}")))
        self.stream = bool(tensors.get("stream", False))
        without_input = bool(tensors.get("exclude_input_in_output", self.stream))
        if self.stream and not without_input:
            raise InvalidRequestError("exclude_input_in_output", "must be true where the answer is streamed")
        self.echo = "" if without_input else self._text
        """What comes before the output."""

    def generation(self, caller: str, deadline: float | None) -> GenerationRequest:
        given = self._sampling
        params = SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=0 if given.top_k == -1 else given.top_k,
            min_p=given.min_p,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
            repetition_penalty=given.repetition_penalty,
            seed=given.seed,
            max_tokens=given.max_tokens,
            min_tokens=given.min_tokens,
            stop=(given.stop,) if isinstance(given.stop, str) else tuple(given.stop),
            stop_token_ids=tuple(given.stop_token_ids),
            include_match=given.include_stop_str_in_output,
            ignore_eos=given.ignore_eos,
            skip_special_tokens=given.skip_special_tokens,
            n=given.n,
        )
        model = self._request.model_name
        return GenerationRequest(prompt=self._text, params=params, model=model, caller=caller, deadline=deadline)

    def response(self, texts: list[str], *, is_last: bool) -> pb.ModelInferResponse:
        """The texts of all sequences, empty where one has nothing new."""
        response = pb.ModelInferResponse(
            model_name=self._request.model_name, model_version=VERSION, id=self._request.id
        )
        response.parameters["triton_final_response"].bool_param = is_last
        response.outputs.add(name=OUTPUT, datatype="BYTES", shape=[len(texts)])
        elements = [text.encode() for text in texts]
        response.raw_output_contents.append(b"".join(struct.pack("<I", len(data)) + data for data in elements))
        return response


def read_tensors(request: pb.ModelInferRequest) -> dict[str, bytes | bool]:
    """The one element of each tensor, by the tensor's name. Raises InvalidRequestError for what is not of INPUTS."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError("raw_input_contents", f"{len(raw)} contents for {len(request.inputs)} tensors")
    found: dict[str, bytes | bool] = {}
    for index, tensor in enumerate(request.inputs):
        if tensor.name not in INPUTS:
            raise UnsupportedFeatureError(tensor.name[:40], f"no such input; there are {', '.join(INPUTS)}")
        if tensor.datatype != INPUTS[tensor.name]:
            raise InvalidRequestError(tensor.name, f"must be {INPUTS[tensor.name]}, not {tensor.datatype[:40]}")
        found[tensor.name] = _element(tensor, raw[index] if raw else None)
    return found


def _element(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bytes | bool:
    elements: list[bytes | bool]
    is_bool = tensor.datatype == "BOOL"
    if raw is None:
        elements = list(tensor.contents.bool_contents if is_bool else tensor.contents.bytes_contents)
    elif is_bool:
        elements = [byte != 0 for byte in raw]
    else:
        is_whole = len(raw) >= 4 and len(raw) == 4 + struct.unpack_from("<I", raw)[0]
        elements = [raw[4:]] if is_whole else []
    if len(elements) != 1:
        raise InvalidRequestError(tensor.name, "must have one element")
    return elements[0]


def _text(name: str, data: bytes | bool) -> str:
    assert isinstance(data, bytes)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(name, "is not UTF-8") from None


def _sampling(text: str) -> Sampling:
    if len(text) > MAX_SAMPLING:
        raise InvalidRequestError("sampling_parameters", f"must be at most {MAX_SAMPLING} characters")
    try:
        return msgspec.convert(msgspec.json.decode(text or "{}"), Sampling, strict=False)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError("sampling_parameters", str(error)) from None
