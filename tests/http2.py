"""A client of HTTP/2 that does as it is told: for what gRPC's own hides, and for what it would never send."""

import socket

import h2.config
import h2.connection
import h2.errors
import h2.events

FRAME = 16_384
HEADERS = {":method": "POST", ":scheme": "http", ":authority": "test", "te": "trailers"}


class Answer:
    """What came on one stream. `status` is gRPC's, or None; `error` is that of a reset, or None."""

    def __init__(self):
        self.headers, self.data = {}, b""
        self.error = None
        self.is_over = False

    @property
    def status(self):
        return int(self.headers["grpc-status"]) if "grpc-status" in self.headers else None


class Http2:
    """A connection; a context manager. What is read blocks, for `timeout` seconds at most."""

    def __init__(self, address, timeout=10):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout)
        config = h2.config.H2Configuration(validate_outbound_headers=False, header_encoding="latin-1")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.answers = {}
        self.is_closed = False
        self.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def flush(self):
        self.socket.sendall(self.h2.data_to_send())

    def call(self, path, *, content_type="application/grpc", end=False, flush=True, **headers):
        """Sends the headers, with the next `flush` at the latest; the stream's number."""
        stream = self.h2.get_next_available_stream_id()
        fields = {**HEADERS, ":path": path, "content-type": content_type} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        # Pseudo-headers come first.
        self.h2.send_headers(stream, sorted(fields.items(), key=lambda pair: pair[0][0] != ":"), end_stream=end)
        self.answers[stream] = Answer()
        if flush:
            self.flush()
        return stream

    def send(self, stream, data, end=True):
        """At most the 64 KiB that a server takes unseen."""
        frames = [data[i : i + FRAME] for i in range(0, len(data), FRAME)] or [b""]
        for frame in frames[:-1]:
            self.h2.send_data(stream, frame)
        self.h2.send_data(stream, frames[-1], end_stream=end)
        self.flush()

    def reset(self, stream):
        self.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        self.flush()

    def read(self, stream):
        """The answer, once it is over or the server has closed the connection."""
        answer = self.answers[stream]
        while not answer.is_over and not self.is_closed:
            data = self.socket.recv(1 << 16)
            if not data:
                self.is_closed = True
            for event in self.h2.receive_data(data) if data else ():
                self._take(event)
            self.flush()
        return answer

    def _take(self, event):
        answer = self.answers.get(getattr(event, "stream_id", None))
        match event:
            case h2.events.ConnectionTerminated():
                self.is_closed = True
            case h2.events.DataReceived():
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                answer.data += event.data
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                answer.headers.update(event.headers)
            case h2.events.StreamReset():
                answer.error, answer.is_over = event.error_code, True
            case h2.events.StreamEnded():
                answer.is_over = True


def framed(message, length=None, compressed=0):
    """A gRPC message with its prefix; `length` is what that says, if not the truth."""
    return bytes([compressed]) + (len(message) if length is None else length).to_bytes(4, "big") + message
